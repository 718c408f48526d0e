"""What the functions of a script do while they run: which statements act, which values they assign.

The script itself is not changed: Python reports each line to a trace function before it runs. Of
the scripts two habits are used: `part` holds the rows of a micro-batch, whoever has it or is called
by who has it, and a loop over `t` goes over the tokens.
"""
import ast
import dataclasses
import sys

import torch

MISSING = object()          # the value of a name that has none yet
SIMPLE = (int, float, str, bool)
ROWS = "part"
TOKEN = "t"


@dataclasses.dataclass
class Function:
    """A function at the top of a file, and which statement stands on each of its lines. A function
    in it is one statement."""
    name: str
    node: ast.FunctionDef
    statements: dict            # line -> statement; of an if or a loop only the lines of its head
    over_tokens: set            # lines in a loop over t, the tokens

    @classmethod
    def read(cls, node):
        found = cls(node.name, node, {}, set())
        found.add(node.body)
        return found

    def add(self, body):
        for statement in body:
            is_simple = isinstance(statement, ast.FunctionDef) or not hasattr(statement, "body")
            inner = [] if is_simple else statement.body
            last = statement.end_lineno if is_simple else inner[0].lineno - 1
            for line in range(first_line(statement), last + 1):
                self.statements[line] = statement
            if isinstance(statement, ast.For) and ast.unparse(statement.target) == TOKEN:
                self.over_tokens |= set(range(statement.lineno, statement.end_lineno + 1))
            self.add(inner)
            self.add(getattr(statement, "orelse", []))

    @property
    def loop(self):
        """The first line of its last loop, as that of main over the steps."""
        return max(part.lineno for part in self.node.body if isinstance(part, ast.For))


def first_line(statement):
    """The first line of a statement, its decorators included. -> int"""
    return min(part.lineno for part in [statement, *getattr(statement, "decorator_list", ())])


def functions(source):
    """The functions at the top of a text, in its order. -> list of Function"""
    return [Function.read(node) for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef)]


@dataclasses.dataclass
class Value:
    """What a statement assigned. Row i of a tensor belongs to row rows[i] of the batch; of a value
    that was assigned for one token after the other, `tensor` has a column for each."""
    tensor: object              # a tensor, a number or a string
    rows: list = None


@dataclasses.dataclass
class Call:
    """One call of a function."""
    function: Function
    above: object               # the Call from which it comes, None for main
    site: int                   # the line of that call from which it comes
    rows: list                  # of the batch, which its tensors are about; None: all
    given: dict                 # its arguments that are tensors: name -> Value
    ran: set = dataclasses.field(default_factory=set)       # first lines of statements
    acts: set = dataclasses.field(default_factory=set)      # of those that changed something
    values: dict = dataclasses.field(default_factory=dict)  # statement's last line -> name: Value
    current: ast.stmt = None
    before: list = None         # what the current statement assigns to, as it was

    def note(self, line, name, value, t=None):
        """Keep what was assigned last, or, for token t, one column of it."""
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        elif isinstance(value, tuple):
            for number, part in enumerate(value, start=1):
                self.note(line, f"{name}, {number}", part)
            return
        elif not isinstance(value, SIMPLE):
            return
        names = self.values.setdefault(line, {})
        if t is not None and is_column(value):
            if not (name in names and isinstance(names[name].tensor, dict)):
                names[name] = Value({}, self.rows)
            names[name].tensor[t] = value.flatten()
        else:
            names[name] = Value(value, self.rows)

    def finish(self):
        """Put the columns of values together."""
        for names in self.values.values():
            for value in names.values():
                if isinstance(value.tensor, dict):
                    columns = [value.tensor[t] for t in sorted(value.tensor)]
                    value.tensor = torch.stack(columns, dim=1)


def is_column(value):
    """Whether a value is a tensor with one number for each row. -> bool"""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == len(value) > 1


class Watch:
    """While entered, notes the calls of some functions of a file, in self.calls.

    losses: line -> name of the losses of tokens or pairs that it computes. Below them stands their
    derivative, and that of whatever .backward() is called on; `gradient` finds it, and by what."""

    def __init__(self, path, wanted, losses, gradient):
        self.path = str(path)
        self.losses = losses
        self.gradient = gradient
        self.functions = {first_line(function.node): function for function in wanted}
        self.calls = []
        self.stack = []

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)
        for call in self.calls:
            call.finish()

    def enter(self, frame, _event, _arg):
        """Called by Python when a function begins. -> who is told of its lines, or None"""
        code = frame.f_code
        function = self.functions.get(code.co_firstlineno)
        is_ours = code.co_filename == self.path and function and function.name == code.co_name
        if not is_ours:
            return None
        above = self.stack[-1] if self.stack else None
        rows = above.rows if above else None
        given = {name: Value(copy(frame.f_locals[name]), rows)
                 for name in code.co_varnames[:code.co_argcount]
                 if isinstance(frame.f_locals[name], torch.Tensor)}
        site = above.current.lineno if above else 0
        call = Call(function, above, site, rows, given)
        self.calls.append(call)
        self.stack.append(call)
        return self.step

    def step(self, frame, event, arg):
        """Called by Python before a line, and when the function returns."""
        call = self.stack[-1]
        statement = call.function.statements.get(frame.f_lineno)
        if event == "line" and statement is not call.current:
            self.complete(call, frame)
            self.begin(call, frame, statement)
        elif event == "return":
            self.complete(call, frame)
            if isinstance(call.current, ast.Return):
                self.note(call, f"-> {call.function.name}", arg)
            self.stack.pop()
        return self.step

    def begin(self, call, frame, statement):
        """A statement is going to run."""
        call.current = statement
        call.ran.add(statement.lineno)
        call.before = [copy(look_up(target, frame)) for target in targets(statement)]
        if isinstance(statement, ast.Expr) and ast.unparse(statement).endswith(".backward()"):
            symbol, gradient = self.gradient(look_up(statement.value.func.value, frame))
            call.note(statement.end_lineno, f"∂L/∂{symbol}", gradient)

    def complete(self, call, frame):
        """The current statement has run: note what it assigned, and whether that is new."""
        statement = call.current
        rows = frame.f_locals.get(ROWS)
        if isinstance(rows, torch.Tensor):
            call.rows = rows.tolist()
        if statement is None:
            return
        found = [(target, look_up(target, frame)) for target in targets(statement)]
        is_new = [not is_same(old, value) for old, (_, value) in zip(call.before, found)]
        if any(is_new) or not found:
            call.acts.add(statement.lineno)
        t = frame.f_locals[TOKEN] if statement.lineno in call.function.over_tokens else None
        for target, value in found:
            name = ast.unparse(target)
            if not is_constant(statement.value) and name != "_":
                self.note(call, name, value, t)

    def note(self, call, name, value, t=None):
        """Keep what the current statement assigns or returns, and if that is a loss of each token
        or pair, its derivative."""
        statement = call.current
        call.note(statement.end_lineno, name, value, t)
        loss = next((name for line, name in self.losses.items()
                     if statement.lineno <= line <= statement.end_lineno), None)
        if loss and isinstance(value, torch.Tensor) and value.requires_grad and value.numel() > 1:
            symbol, gradient = self.gradient(value)
            call.note(statement.end_lineno, f"∂{loss}/∂{symbol}", gradient)


def targets(statement):
    """What a statement assigns to: x and x.y, and x itself where it assigns x[i]. -> list"""
    found = statement.targets if isinstance(statement, ast.Assign) else []
    found = [statement.target] if isinstance(statement, ast.AugAssign) else found
    found = [part for target in found for part in getattr(target, "elts", [target])]
    return [part.value if isinstance(part, ast.Subscript) else part for part in found]


def look_up(expression, frame):
    """The value of an expression where a function now stands, or MISSING."""
    try:
        return eval(ast.unparse(expression), frame.f_globals, frame.f_locals)
    except (NameError, AttributeError):
        return MISSING


def copy(value):
    """What a value is now, in case that it changes."""
    if isinstance(value, dict):
        return dict(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def is_same(one, two):
    """Whether two values are the same numbers, or the same thing. -> bool"""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(is_same(one[key], two[key]) for key in one)
    return one is two or (isinstance(one, SIMPLE) and isinstance(two, SIMPLE) and one == two)


def is_constant(expression):
    """Whether an expression says its value itself, as 0.0 does. -> bool"""
    parts = getattr(expression, "elts", [expression])
    return all(isinstance(part, ast.Constant) for part in parts)
