"""What the functions of a script do while they run: which statements, and which values they assign.

The script itself is not changed: Python reports each line to a trace function before it runs. Of
the scripts two habits are used: `part` holds the rows of a micro-batch, whoever has it or is called
by who has it, and a loop over `t` goes over the tokens.
"""
import ast
import dataclasses
import sys

import torch

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
            for line in range(statement.lineno, last + 1):
                self.statements[line] = statement
            if isinstance(statement, ast.For) and ast.unparse(statement.target) == TOKEN:
                self.over_tokens |= set(range(statement.lineno, statement.end_lineno + 1))
            self.add(inner)
            self.add(getattr(statement, "orelse", []))

    def body_lines(self):
        """The first lines of its statements, without those of strings. -> set"""
        is_string = {statement.lineno for statement in self.statements.values()
                     if isinstance(statement, ast.Expr)
                     and isinstance(statement.value, ast.Constant)}
        return {statement.lineno for statement in self.statements.values()} - is_string


def functions(source):
    """The functions at the top of a text, in its order. -> list of Function"""
    return [Function.read(node) for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef)]


@dataclasses.dataclass
class Value:
    """What a statement assigned. Row i of a tensor belongs to row rows[i] of the batch; of a value
    that was assigned for one token after the other, `tensor` has a column for each."""
    tensor: object              # a tensor, a number or a string
    rows: list


@dataclasses.dataclass
class Call:
    """One call of a function."""
    function: Function
    caller: str                 # the watched function that calls it; "" if none does
    rows: list                  # of the batch, which its tensors are about; None: all
    ran: set = dataclasses.field(default_factory=set)       # first lines of statements
    values: dict = dataclasses.field(default_factory=dict)  # statement's last line -> name: Value
    current: ast.stmt = None

    def note(self, line, name, value, t=None):
        """Keep what was assigned first, or, for token t, one column of it."""
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        elif isinstance(value, dict) and name.startswith("->"):
            for key, part in value.items():
                self.note(line, key, part)
            return
        elif isinstance(value, tuple):
            for number, part in enumerate(value, start=1):
                self.note(line, f"{name}, {number}", part)
            return
        elif not isinstance(value, SIMPLE):
            return
        names = self.values.setdefault(line, {})
        if t is None:
            names.setdefault(name, Value(value, self.rows))
        elif is_column(value):
            columns = names.setdefault(name, Value({}, self.rows))
            columns.tensor[t] = value.flatten()
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


def is_name_of_dict(statement, value):
    """Whether a function returns a dict by its name, so that its entries stand above. -> bool"""
    return isinstance(value, dict) and isinstance(statement.value, ast.Name)


class Watch:
    """While entered, notes the calls of some functions of a file, in self.calls.

    gradients: function name -> (name, function that returns a tensor), which is noted wherever that
    function has called .backward()."""

    def __init__(self, path, wanted, gradients):
        self.path = str(path)
        self.gradients = gradients
        self.functions = {}                 # first line, decorators included -> Function
        for function in wanted:
            decorators = [decorator.lineno for decorator in function.node.decorator_list]
            self.functions[min([function.node.lineno, *decorators])] = function
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
        call = Call(function, above.function.name if above else "", above.rows if above else None)
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
        elif event == "return":
            self.complete(call, frame)
            if isinstance(call.current, ast.Return) and not is_name_of_dict(call.current, arg):
                line = call.current.end_lineno
                call.note(line, f"-> {call.function.name}", arg)
            self.stack.pop()
        return self.step

    def complete(self, call, frame):
        """Note what the current statement, which has run, has assigned."""
        statement = call.current
        rows = frame.f_locals.get(ROWS)
        if isinstance(rows, torch.Tensor):
            call.rows = rows.tolist()
        is_over_tokens = statement and statement.lineno in call.function.over_tokens
        t = frame.f_locals[TOKEN] if is_over_tokens else None
        for name, value in assigned(statement, frame):
            call.note(statement.end_lineno, name, value, t)
        is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if is_call and ast.unparse(statement).endswith(".backward()"):
            name, gradient = self.gradients[call.function.name]
            call.note(statement.end_lineno, name, gradient())


def assigned(statement, frame):
    """Names and values of what a statement assigns: x, x.y, of a tensor x where it assigns x[i], of
    a dict x its key where it assigns x[key]. Nothing where it only writes down a constant. Yields
    pairs"""
    targets = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    if targets and is_constant(statement.value):
        return
    for target in targets:
        for part in getattr(target, "elts", [target]):
            if not isinstance(part, ast.Subscript):
                if ast.unparse(part) != "_":
                    yield ast.unparse(part), look_up(part, frame)
            elif isinstance(look_up(part.value, frame), dict):
                yield look_up(part.slice, frame), look_up(part, frame)
            else:
                yield ast.unparse(part.value), look_up(part.value, frame)


def look_up(expression, frame):
    """The value of a name, of x.y or x[y], where a function now stands."""
    return eval(ast.unparse(expression), frame.f_globals, frame.f_locals)


def is_constant(expression):
    """Whether an expression says its value itself, as 0.0 does. -> bool"""
    parts = getattr(expression, "elts", [expression])
    return all(isinstance(part, ast.Constant) for part in parts)
