"""Record which statements of a script run, and which values they assign.

This relies on one convention of the scripts: a loop over `t` is a loop over tokens.
"""
import ast

import torch

from learn.record import Recorder


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


class Call:
    """One call of a function of a lesson, which is given as its AST node.

    by, site: the name of the caller, and the line of the call; current: the statement that runs
    ran: first lines of statements; values: last line of a statement -> name -> value
    """

    def __init__(self, watch, function, by, site):
        self.watch = watch
        self.function = function
        self.by, self.site = by, site
        self.ran, self.values = set(), {}
        self.current = None

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

    def step(self, frame, event, arg):
        statement = self.watch.lesson.statements.get(frame.f_lineno)
        if event == "line" and statement is not self.current:
            self.complete(frame)
            self.current = statement
            self.ran.add(statement.lineno)
            if isinstance(statement, ast.Expr) and ast.unparse(statement).endswith(".backward()"):
                loss = ast.unparse(statement.value.func.value)
                self.note_gradient("L", eval(loss, frame.f_globals, frame.f_locals))
        elif event == "return":
            self.complete(frame)
            if isinstance(self.current, ast.Return):
                self.note_current(f"-> {self.function.name}", arg)

    def complete(self, frame):
        """Record what the current statement assigned: x and x.y, and x itself for x[i]."""
        if not isinstance(self.current, (ast.Assign, ast.AugAssign)):
            return
        targets = getattr(self.current, "targets", None) or [self.current.target]
        for node in (node for target in targets for node in getattr(target, "elts", [target])):
            name = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
            if name != "_":
                value = eval(name, frame.f_globals, frame.f_locals)
                self.note_current(name, value, frame.f_locals.get("t"))

    def note_current(self, name, value, t=None):
        """Keep a value that the current statement assigned or returned and, if it holds the losses
        of tokens or pairs, its gradient."""
        last = self.current.end_lineno
        self.note(last, name, value, t)
        loss = self.watch.lesson.losses.get(last)
        if loss and getattr(value, "requires_grad", False) and value.numel() > 1:
            self.note_gradient(loss, value)

    def note_gradient(self, loss, value):
        symbol, gradient = self.watch.gradient(value)
        self.note(self.current.end_lineno, f"∂{loss}/∂{symbol}", gradient)


class Watch(Recorder):
    """A context that records the calls of the functions of a lesson.

    The gradients of its losses are recorded, too, as is the gradient of any value on which
    .backward() is called. gradient: function that returns a name and the gradient with respect to
    it."""

    def __init__(self, lesson, gradient):
        super().__init__(self.watched)
        self.lesson = lesson
        self.gradient = gradient

    def watched(self, frame):
        """Begin to record a call, unless it is of another function. -> Call, or None"""
        code = frame.f_code
        node = self.lesson.functions.get(code.co_name)
        if node is None or code.co_filename != self.lesson.script.__file__:
            return None
        by, site = "", 0
        if self.running:
            by, site = self.running[-1].function.name, self.running[-1].current.lineno
        call = Call(self, node, by, site)
        for name in code.co_varnames[:code.co_argcount]:
            if isinstance(frame.f_locals[name], torch.Tensor):
                call.note(node.body[0].lineno - 1, name, frame.f_locals[name])
        return call
