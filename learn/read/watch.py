"""Record which statements of a script run, and which values they assign.

The script itself is not changed: Python reports each line to a trace function before it runs. This
relies on one convention of the scripts: a loop over `t` is a loop over tokens.
"""
import ast
import dataclasses
import sys

import torch

SIMPLE = (int, float, str, bool)


class Function:
    """A top-level function of a file. statements: line -> the statement on it, where an if or a
    loop has only the lines of its head, and an inner function is one statement. head: the last line
    of the function's own head, below which its arguments are shown."""

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
    """The first line of a statement, including its decorators. -> int"""
    return min(part.lineno for part in [statement, *getattr(statement, "decorator_list", ())])


@dataclasses.dataclass
class Call:
    """One call of a function."""
    function: Function
    by: str = ""                # the name of the caller
    site: int = 0               # the line of the call
    ran: set = dataclasses.field(default_factory=set)       # first lines of statements
    values: dict = dataclasses.field(default_factory=dict)  # last line -> name -> value
    current: ast.stmt = None

    def note(self, line, name, value, t=None):
        """Keep the last value of a name or, in a loop over tokens, the column of token t."""
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
    """A context that records the calls of some functions of a file, in self.calls.

    losses: last line of a statement -> name of the losses of tokens or pairs that it computes.
    Their gradients are recorded, too, as is the gradient of any value on which .backward() is
    called. gradient: function that returns a name and the gradient with respect to it."""

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
        """Called by Python when a function begins. -> the function for its lines, or None"""
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
        """Record what the current statement assigned, now that it has run."""
        for target in targets(call.current):
            if ast.unparse(target) != "_":
                value = look_up(target, frame)
                self.note(call, ast.unparse(target), value, frame.f_locals.get("t"))

    def note(self, call, name, value, t=None):
        """Keep a value that the current statement assigned or returned and, if it holds the losses
        of tokens or pairs, its gradient."""
        last = call.current.end_lineno
        call.note(last, name, value, t)
        is_loss = last in self.losses and isinstance(value, torch.Tensor) and value.requires_grad
        if is_loss and value.numel() > 1:
            self.note_gradient(call, self.losses[last], value)

    def note_gradient(self, call, loss, value):
        symbol, gradient = self.gradient(value)
        call.note(call.current.end_lineno, f"∂{loss}/∂{symbol}", gradient)


def targets(statement):
    """The targets of an assignment: x and x.y, and x itself for x[i]. -> list"""
    nodes = statement.targets if isinstance(statement, ast.Assign) else []
    nodes = [statement.target] if isinstance(statement, ast.AugAssign) else nodes
    nodes = [part for node in nodes for part in getattr(node, "elts", [node])]
    return [part.value if isinstance(part, ast.Subscript) else part for part in nodes]


def look_up(expression, frame):
    """Evaluate an expression in the current state of a function."""
    return eval(ast.unparse(expression), frame.f_globals, frame.f_locals)
