"""What the functions of a script do while they run: which statements run, what they assign.

The script itself is not changed: Python reports each line to a trace function before it runs. Of
the scripts one habit is used: a loop over `t` goes over the tokens.
"""
import ast
import dataclasses
import sys

import torch

SIMPLE = (int, float, str, bool)


class Function:
    """A function at the top of a file. statements: on each of its lines the statement, of an if or
    a loop only on the lines of its head; a function in it is one. head: the last line of its own
    head, to which its arguments belong."""

    def __init__(self, node):
        self.node = node
        self.name = node.name
        self.head = node.body[0].lineno - 1
        self.statements = {}
        self.add(node.body)

    def add(self, body):
        for statement in body:
            is_simple = isinstance(statement, ast.FunctionDef) or not hasattr(statement, "body")
            inner = [] if is_simple else statement.body
            last = statement.end_lineno if is_simple else inner[0].lineno - 1
            lines = range(first_line(statement), last + 1)
            self.statements |= dict.fromkeys(lines, statement)
            self.add(inner + getattr(statement, "orelse", []))


def first_line(statement):
    """The first line of a statement, its decorators included. -> int"""
    return min(part.lineno for part in [statement, *getattr(statement, "decorator_list", ())])


@dataclasses.dataclass
class Call:
    """One call of a function."""
    function: Function
    by: str = ""                # the name of the function from which it comes
    site: int = 0               # the line from which it comes
    ran: set = dataclasses.field(default_factory=set)       # first lines of statements
    values: dict = dataclasses.field(default_factory=dict)  # last line -> name -> what it assigned
    current: ast.stmt = None

    def note(self, line, name, value, t=None):
        """Keep what was assigned last, or, for token t, one column of it."""
        names = self.values.setdefault(line, {})
        if isinstance(value, tuple):
            for number, part in enumerate(value, start=1):
                self.note(line, f"{name}, {number}", part)
        elif isinstance(value, torch.Tensor):
            if t is not None and value.dim() > 0 and value.numel() == len(value):
                names.setdefault(name, torch.zeros(len(value), 3))[:, t] = value.flatten()
            else:
                names[name] = value.detach().clone()
        elif isinstance(value, SIMPLE):
            names[name] = value


class Watch:
    """While entered, notes the calls of some functions of a file, in self.calls.

    losses: the last line of a statement -> name of the losses of tokens or pairs that it computes.
    Below these stands their derivative, and that of whatever .backward() is called on; `gradient`
    finds it, and by what."""

    def __init__(self, path, wanted, losses, gradient):
        self.functions = {(str(path), first_line(function.node)): function for function in wanted}
        self.losses = losses
        self.gradient = gradient
        self.calls = []
        self.stack = []

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def enter(self, frame, _event, _arg):
        """Called by Python when a function begins. -> who is told of its lines, or None"""
        code = frame.f_code
        function = self.functions.get((code.co_filename, code.co_firstlineno))
        if function is None or function.name != code.co_name:
            return None
        call = Call(function)
        if self.stack:
            call.by, call.site = self.stack[-1].function.name, self.stack[-1].current.lineno
        for name in code.co_varnames[:code.co_argcount]:
            if isinstance(frame.f_locals[name], torch.Tensor):
                call.note(function.head, name, frame.f_locals[name])
        self.calls.append(call)
        self.stack.append(call)
        return self.step

    def step(self, frame, event, arg):
        """Called by Python before a line, and when the function returns."""
        call = self.stack[-1]
        statement = call.function.statements.get(frame.f_lineno)
        if event == "line" and statement is not call.current:
            self.complete(call, frame)
            call.current = statement
            call.ran.add(statement.lineno)
            if isinstance(statement, ast.Expr) and ast.unparse(statement).endswith(".backward()"):
                self.note_gradient(call, "L", look_up(statement.value.func.value, frame))
        elif event == "return":
            self.complete(call, frame)
            if isinstance(call.current, ast.Return):
                self.note(call, f"-> {call.function.name}", arg)
            self.stack.pop()
        return self.step

    def complete(self, call, frame):
        """The current statement has run: note what it assigned."""
        for target in targets(call.current):
            if ast.unparse(target) != "_":
                value = look_up(target, frame)
                self.note(call, ast.unparse(target), value, frame.f_locals.get("t"))

    def note(self, call, name, value, t=None):
        """Keep what the current statement assigns or returns, and if that is a loss of each token
        or pair, its derivative."""
        last = call.current.end_lineno
        call.note(last, name, value, t)
        is_loss = last in self.losses and isinstance(value, torch.Tensor) and value.requires_grad
        if is_loss and value.numel() > 1:
            self.note_gradient(call, self.losses[last], value)

    def note_gradient(self, call, loss, value):
        symbol, gradient = self.gradient(value)
        call.note(call.current.end_lineno, f"∂{loss}/∂{symbol}", gradient)


def targets(statement):
    """What a statement assigns to: x and x.y, and x itself where it assigns x[i]. -> list"""
    found = statement.targets if isinstance(statement, ast.Assign) else []
    found = [statement.target] if isinstance(statement, ast.AugAssign) else found
    found = [part for target in found for part in getattr(target, "elts", [target])]
    return [part.value if isinstance(part, ast.Subscript) else part for part in found]


def look_up(expression, frame):
    """The value of an expression where a function now stands."""
    return eval(ast.unparse(expression), frame.f_globals, frame.f_locals)
