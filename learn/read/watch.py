"""Record which statements of a script run, and which values they assign.

The script itself is not changed: Python reports each line to a trace function before it runs. This
relies on one convention of the scripts: a loop over `t` is a loop over tokens.
"""
import ast
import dataclasses
import sys

import torch


def first_line(statement):
    """The first line of a statement, including its decorators. -> int"""
    return min(part.lineno for part in [statement, *getattr(statement, "decorator_list", ())])


def statements(body):
    """Map each line to the statement on it. An if or a loop has only the lines of its head, and an
    inner function is one statement. -> dict"""
    found = {}
    for statement in body:
        inner = [] if isinstance(statement, ast.FunctionDef) else getattr(statement, "body", [])
        last = inner[0].lineno - 1 if inner else statement.end_lineno
        found |= dict.fromkeys(range(first_line(statement), last + 1), statement)
        found |= statements(inner + getattr(statement, "orelse", []))
    return found


@dataclasses.dataclass
class Call:
    """One call of a function, which is given as its AST node."""
    function: ast.FunctionDef
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
        elif isinstance(value, (int, float, str)):
            names[name] = value
        elif isinstance(value, torch.Tensor):
            if t is not None and value.dim() > 0 and value.numel() == len(value):
                names.setdefault(name, torch.zeros(len(value), 3))[:, t] = value.flatten()
            else:
                names[name] = value.detach().clone()


class Watch:
    """A context that records the calls of the functions of a lesson, in self.calls.

    The gradients of its losses are recorded, too, as is the gradient of any value on which
    .backward() is called. gradient: function that returns a name and the gradient with respect to
    it."""

    def __init__(self, lesson, gradient):
        self.lesson = lesson
        self.gradient = gradient
        self.calls, self.stack = [], []

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def enter(self, frame, _event, _arg):
        """Called by Python when a function begins. -> the function for its lines, or None"""
        code = frame.f_code
        node = self.lesson.functions.get(code.co_name)
        if node is None or code.co_filename != self.lesson.script.__file__:
            return None
        call = Call(node)
        if self.stack:
            call.by, call.site = self.stack[-1].function.name, self.stack[-1].current.lineno
        for name in code.co_varnames[:code.co_argcount]:
            if isinstance(frame.f_locals[name], torch.Tensor):
                call.note(node.body[0].lineno - 1, name, frame.f_locals[name])
        self.calls.append(call)
        self.stack.append(call)
        return self.step

    def step(self, frame, event, arg):
        """Called by Python before a line, and when the function returns."""
        call = self.stack[-1]
        statement = self.lesson.statements.get(frame.f_lineno)
        if event == "line" and statement is not call.current:
            self.complete(call, frame)
            call.current = statement
            call.ran.add(statement.lineno)
            if isinstance(statement, ast.Expr) and ast.unparse(statement).endswith(".backward()"):
                loss = ast.unparse(statement.value.func.value)
                self.note_gradient(call, "L", eval(loss, frame.f_globals, frame.f_locals))
        elif event == "return":
            self.complete(call, frame)
            if isinstance(call.current, ast.Return):
                self.note(call, f"-> {call.function.name}", arg)
            self.stack.pop()
        return self.step

    def complete(self, call, frame):
        """Record what the current statement assigned: x and x.y, and x itself for x[i]."""
        if not isinstance(call.current, (ast.Assign, ast.AugAssign)):
            return
        targets = getattr(call.current, "targets", None) or [call.current.target]
        for node in (node for target in targets for node in getattr(target, "elts", [target])):
            name = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
            if name != "_":
                value = eval(name, frame.f_globals, frame.f_locals)
                self.note(call, name, value, frame.f_locals.get("t"))

    def note(self, call, name, value, t=None):
        """Keep a value that the current statement assigned or returned and, if it holds the losses
        of tokens or pairs, its gradient."""
        last = call.current.end_lineno
        call.note(last, name, value, t)
        loss = self.lesson.losses.get(last)
        if loss and getattr(value, "requires_grad", False) and value.numel() > 1:
            self.note_gradient(call, loss, value)

    def note_gradient(self, call, loss, value):
        symbol, gradient = self.gradient(value)
        call.note(call.current.end_lineno, f"∂{loss}/∂{symbol}", gradient)
