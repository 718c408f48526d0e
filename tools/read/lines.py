"""Which lines of a script a first reading needs; nothing is marked by hand.

A line is of a variant if it does not act in the run that a page shows, and acts in another: it does
not run there, or assigns what was there before. A line is for the log if nothing that the function
does to policies and optimizers, or returns to be used for that, needs what it assigns.
"""
import ast
import re

EFFECT = re.compile(r"\.backward\(|optimizer\.|clip_grad_norm_")
BLOCKS = (ast.If, ast.For, ast.With)


def all_lines(statement):
    """-> set"""
    return set(range(statement.lineno, statement.end_lineno + 1))


def bodies(statement):
    """What stands in an if, a loop, a with. -> list of lists of statements"""
    return [statement.body, getattr(statement, "orelse", [])]


def is_text(statement):
    """Whether a statement is a docstring. -> bool"""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def simple(body, heads=()):
    """Statements without a body, each with the ifs and loops around it. Yields pairs"""
    for statement in body:
        if isinstance(statement, BLOCKS):
            for part in bodies(statement):
                yield from simple(part, (*heads, statement))
        elif not is_text(statement):
            yield statement, heads


def leads_to(body, wanted):
    """Whether one of the statements in a body is wanted. -> bool"""
    return any(id(statement) in wanted for statement, _ in simple(body))


def without(body, wanted):
    """The lines of statements that are none of `wanted`, a set of ids, and of each if or loop that
    leads to none. -> set"""
    lines = set()
    for statement in body:
        if is_text(statement):
            continue
        if not isinstance(statement, BLOCKS):
            lines |= set() if id(statement) in wanted else all_lines(statement)
            continue
        first, other = bodies(statement)
        if not leads_to(first + other, wanted):
            lines |= all_lines(statement)
        elif not other or leads_to(other, wanted):
            lines |= without(first, wanted) | without(other, wanted)
        else:                                           # the line of its else, too
            last = first[-1].end_lineno
            lines |= without(first, wanted)
            lines |= {line for line in all_lines(statement) if line > last}
    return lines


def idle(function, acts):
    """The lines of a function that do not act. acts: first lines of statements that do. -> set"""
    return without(function.node.body, {id(s) for s, _ in simple(function.node.body)
                                        if s.lineno in acts})


def for_the_log(function, acts, with_effects):
    """The lines of a function that nothing needs. `with_effects`: names of functions that train, so
    that to call them is an effect. -> set"""
    statements = [(s, heads) for s, heads in simple(function.node.body) if s.lineno in acts]
    needed = {id(s) for s, _ in statements if trains(s, with_effects)}
    asserts = {id(s) for s, _ in statements if isinstance(s, ast.Assert)}
    read = set()
    if not needed:                          # then it is for what it returns, but not in a dict,
        arguments = {part.arg for part in function.node.args.args}     # or writes into arguments
        for statement, _ in statements:
            if isinstance(statement, ast.Return):
                needed.add(id(statement))
                read |= read_besides_dicts(statement)
            elif stored(statement) & arguments and "." in ast.unparse(statement).split("=")[0]:
                needed.add(id(statement))
    while True:
        for statement, heads in statements:
            if id(statement) in needed and not isinstance(statement, ast.Return):
                read |= loaded(statement)
            if id(statement) in needed:
                read |= set().union(*(loaded(condition(head)) for head in heads))
        more = {id(s) for s, _ in statements if stored(s) & read} - needed
        if not more:
            return without(function.node.body, needed | asserts)
        needed |= more


def preparing(function, kinds):
    """The lines for the log which assign what only lines of variants read. kinds: line -> str.
    -> set"""
    readers = {}
    for statement, heads in simple(function.node.body):
        for part in (statement, *heads):
            for name in loaded(part if part is statement else condition(part)):
                readers.setdefault(name, set()).add(kinds.get(part.lineno, ""))
    found = set()
    for statement, _ in simple(function.node.body):
        by = [readers.get(name) for name in stored(statement)]
        if by and all(kinds_of_readers == {"variant"} for kinds_of_readers in by):
            found |= {line for line in all_lines(statement) if kinds.get(line) == "log"}
    return found


def trains(node, with_effects):
    """Whether a statement has an effect on a policy or an optimizer. -> bool"""
    return bool(EFFECT.search(ast.unparse(node))) or bool(called(node) & with_effects)


def with_effects(functions):
    """The names of the functions that train, or call one that does. -> set"""
    found = set()
    while True:
        before = set(found)
        for function in functions:
            if any(trains(statement, found) for statement, _ in simple(function.node.body)):
                found.add(function.name)
        if found == before:
            return found


def read_besides_dicts(statement):
    """The names that a statement reads, but for parts of a returned tuple that have a dict, which
    holds metrics. -> set"""
    if not isinstance(statement, ast.Return):
        return loaded(statement)
    found = set()
    for part in getattr(statement.value, "elts", [statement.value]):
        has_dict = any(isinstance(inner, ast.Dict) for inner in ast.walk(part))
        found |= set() if has_dict else loaded(part)
    return found


def condition(head):
    """What an if tests, a loop goes over, a with enters. -> an AST node"""
    if isinstance(head, ast.With):
        return head.items[0]
    return head.test if isinstance(head, ast.If) else head.iter


def called(node):
    """The names of the functions that are called. -> set"""
    return {part.func.id for part in ast.walk(node)
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)}


def loaded(node):
    """The names that an expression or a statement reads. -> set"""
    return {part.id for part in ast.walk(node)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}


def stored(statement):
    """The names that a statement assigns, x in x[i] and x.y included. -> set"""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AugAssign) else targets
    targets = [statement] if isinstance(statement, ast.FunctionDef) else targets
    names = set()
    for target in targets:
        for part in getattr(target, "elts", [target]):
            while isinstance(part, (ast.Subscript, ast.Attribute)):
                part = part.value
            names.add(getattr(part, "id", None) or part.name)
    return names
