"""Find what a function looks up in its arguments, such as batch["mask"], cfg.clip_eps or args[0],
and make each of these a parameter, so that they are bound like the arguments of other functions.

The source is read, also that of functions of the same module to which an argument is handed on.
What is looked up in a branch of an `if`, or with a default, need not be given.
"""
import ast
import contextlib
import dataclasses
import functools
import inspect
import re
import textwrap
from typing import NamedTuple

OF_ARRAYS = {"shape", "dtype", "device", "ndim", "T", "grad", "requires_grad", "tolist", "item",
             "numpy", "detach"}
# Words of settings, which no array has as attributes
OF_SETTINGS = re.compile("((clip|eps|epsilon|ratio|range|low|lower|lo|high|upper|hi|coef|coeff|"
                         "beta|weight)_?)+(?<!clip)")
EMPTY = inspect.Parameter.empty
MARKS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class Bag(dict):
    """A dict whose keys are attributes, too."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Model:
    """A language model whose last T inputs, which are 0, have given logits (B, T, V), each at the
    place before."""

    def __init__(self, given):
        self.given = given

    def logits(self, input_ids=None, *_, logits_to_keep=None, **__):
        T = self.given.shape[1]
        W = input_ids.shape[1]
        places = [min(max(w + 1 + T - W, 0), T - 1) for w in range(W)]
        places = places[-(logits_to_keep or W):]
        return self.given[:, places]

    def __call__(self, *inputs, **others):
        return Bag(logits=self.logits(*inputs, **others))


class Field(NamedTuple):
    path: tuple         # the parameter, with its stars, and keys; a place in a tuple is an int
    name: str
    default: object     # EMPTY if it has to be given
    switch: object = None       # the path of what has to be true, so that it is looked up
    is_usual: bool = False      # whether the default is that of an object, such as a config


class Lookups(ast.NodeVisitor):
    """Collect what is looked up in the parameters of a function.

    places: {variable: path}; is_known(name) tells whether a name has a meaning, and so no parts;
    scope: {name: function} of those that may be called; usual: {parameter: object that it is by
    default}, which has parts."""

    def __init__(self, places, is_known, scope, usual):
        self.places = places
        self.is_known = is_known
        self.scope = scope
        self.usual = usual
        self.fields = {}                # path -> Field
        self.leaves = {}                # {variable: path} of what has a meaning
        self.optional = set()           # paths of what may be missing
        self.whole = set()              # parameters that are used in other ways
        self.followed = set()
        self.is_guarded = False
        self.switch = None              # the path of a condition

    def part(self, base, key, by_key):
        """Find the path of base.key or base["key"]. The attributes of what has a meaning are no
        parts, except those of a setting, such as cfg.clip.low. -> tuple, or None"""
        path = self.path_of(base)
        if isinstance(base, ast.Name):
            path = path or self.leaves.get(base.id)
        if not path or not isinstance(key, str):
            return None
        is_part = by_key or OF_SETTINGS.fullmatch(key) and self.is_known(f"{path[-1]}_{key}")
        is_leaf = self.is_known(path[-1]) and not is_part and path[0] not in self.usual
        return None if is_leaf else (*path, key)

    def path_of(self, node):
        """Find the path of an expression. -> tuple, or None"""
        if isinstance(node, ast.Name):
            return self.places.get(node.id)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):    # cfg or Config()
            return self.path_of(node.values[0])
        if isinstance(node, ast.IfExp):                 # Config() if cfg is None else cfg
            return self.path_of(node.body) or self.path_of(node.orelse)
        if isinstance(node, ast.Attribute):
            own = self.places.get(ast.unparse(node))        # self.cfg
            return own or (None if node.attr in OF_ARRAYS
                           else self.part(node.value, node.attr, False))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self.part(node.value, node.slice.value, True)
        if isinstance(node, ast.Call) and looked_up(node):
            base, key, _ = looked_up(node)
            is_of_array = isinstance(node.func, ast.Name) and key in OF_ARRAYS
            return None if is_of_array else self.part(base, key, True)
        return None

    def record(self, path, default=EMPTY, name=""):
        if self.is_guarded and default is EMPTY:
            default = None
        if path not in self.fields or default is EMPTY:
            self.fields[path] = Field(path, name or path[-1], default, self.switch)

    def visit(self, node):
        path = self.path_of(node)
        if path and len(path) > 1:
            default = EMPTY
            if isinstance(node, ast.Call):
                _, _, default = looked_up(node)
            if default is not EMPTY:
                self.optional.add(path)
            self.record(path, default)
        elif path:
            self.whole.add(path[0])
        else:
            super().visit(node)

    def visit_Compare(self, node):
        path = self.path_of(node.comparators[0])
        if path and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            key = getattr(node.left, "value", None)         # "mask" in batch
            self.optional.add((*path, key))
        else:
            self.generic_visit(node)

    def visit_If(self, node):
        self.visit(node.test)
        outside = self.is_guarded, self.switch
        self.is_guarded = True
        for branch, switch in ((node.body, self.path_of(node.test)), (node.orelse, None)):
            self.switch = switch or outside[1]
            for one in branch if isinstance(branch, list) else [branch]:
                self.visit(one)
        self.is_guarded, self.switch = outside

    visit_IfExp = visit_If

    def visit_Assign(self, node):
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, given in zip(target.elts, value.elts):
                self.assign(one, given)
        else:
            self.assign(target, value)

    def assign(self, target, value):
        path = self.path_of(value)
        name = ast.unparse(target)
        place = getattr(getattr(value, "slice", None), "value", None)
        if isinstance(target, ast.Tuple) and path and isinstance(value, ast.Name):
            for n, one in enumerate(target.elts):           # a, b = batch
                self.record((*path, n), name=ast.unparse(one))
        elif type(place) is int and (self.path_of(value.value) or " ")[0].startswith("*"):
            self.record((*self.path_of(value.value), place), name=name)     # a = args[0]
        elif path and not self.is_known(path[-1]) and not isinstance(value, ast.Call):
            self.places[name] = path                        # data = proto.batch
        else:
            if path:
                self.leaves[name] = path                    # clip = cfg["clip"]
            self.visit(value)

    def visit_Call(self, node):
        """Follow arguments into the functions of the module."""
        function = self.scope.get(getattr(node.func, "id", None))
        takes = dict(inspect.signature(function).parameters) if (
            inspect.isfunction(function)) else {}
        places = [name for name, one in takes.items() if one.kind not in MARKS]
        given = dict(zip(places, node.args)) | {one.arg: one.value for one in node.keywords}
        parts = {name: self.path_of(one) for name, one in given.items() if name in takes}
        parts = {name: path for name, path in parts.items()
                 if path and (len(path) == 1 or not self.is_known(path[-1]))}
        rest = self.path_of(given.pop(None, None))          # f(**batch)
        if rest and any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            self.whole.add(rest[0])                         # it hands on what it does not name
        for name, one in takes.items() if rest else ():
            if name not in given and one.kind not in MARKS:
                self.record((*rest, name), one.default)
        if parts and function not in self.followed:
            self.followed.add(function)
            outside = self.places, self.scope
            self.places, self.scope = parts, function.__globals__
            self.generic_visit(tree_of(function))
            self.places, self.scope = outside
        self.visit(getattr(node.func, "value", node.func))  # the name of a method is no key
        for one in (*node.args, *(one.value for one in node.keywords)):
            if self.path_of(one) not in (*parts.values(), rest) or self.path_of(one) is None:
                self.visit(one)


def looked_up(call):
    """Read x.get("key"), getattr(x, "key") and hasattr(x, "key"). A default that is computed is
    None. -> x, key, default, or None"""
    name = getattr(call.func, "id", "")
    if name in ("getattr", "hasattr") and len(call.args) > 1:
        base, key, *default = call.args
    elif getattr(call.func, "attr", "") == "get" and call.args:
        base, key, *default = call.func.value, *call.args
    else:
        return None
    if name == "getattr" and not default:
        return base, getattr(key, "value", None), EMPTY
    is_constant = default and isinstance(default[0], ast.Constant)
    return base, getattr(key, "value", None), default[0].value if is_constant else None


def tree_of(function):
    """Parse the source of a function or a class. OSError or TypeError if there is none."""
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def objects_of(parameters):
    """Find the objects that parameters are by default, such as a config: those of the signature, or
    those that their class makes without arguments. -> {parameter: object}"""
    found = {}
    for name, one in parameters.items():
        kinds = [one.annotation, *getattr(one.annotation, "__args__", ())]      # Optional[Config]
        kinds = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        if isinstance(one.default, dict) or hasattr(one.default, "_fields") or (
                type(one.default).__module__ not in ("builtins", "inspect")):
            found[name] = one.default
        elif one.default in (None, EMPTY) and len(kinds) == 1:
            with contextlib.suppress(Exception, SystemExit):    # it may refuse its defaults
                found[name] = kinds[0]()
    return found


def dug(found, keys):
    """Look up what lies in an object under some keys, if it is a number, a text or None. -> value,
    or EMPTY"""
    for key in keys:
        if isinstance(found, dict):
            found = found.get(key, EMPTY)
        else:
            found = getattr(found, str(key), EMPTY)
    return found if found is None or isinstance(found, (bool, int, float, str)) else EMPTY


def fields_of(function, parameters, is_known):
    """List what a function, or a class, looks up in its parameters. -> list of Field"""
    tree = tree_of(function)
    scope = getattr(function, "__globals__", {})
    objects = objects_of(parameters)
    lookups = Lookups({name: (MARKS.get(one.kind, "") + name,) for name, one in parameters.items()
                       if name != "self"}, is_known, scope, objects)
    if isinstance(tree, ast.ClassDef):          # what __init__ keeps, other methods look up
        for one in sorted(tree.body, key=lambda one: getattr(one, "name", "") != "__init__"):
            lookups.generic_visit(one)
            lookups.places = {name: path for name, path in lookups.places.items()
                              if name.startswith("self.")}
    elif isinstance(tree, ast.FunctionDef):
        lookups.generic_visit(tree)
    inner = {path[:n] for path in lookups.fields for n in range(1, len(path))}
    found = [one._replace(default=None) if path in lookups.optional and one.default is EMPTY
             else one for path, one in lookups.fields.items() if path not in inner]
    names = [one.name for one in found]
    alone = parameters.keys() - {one.path[0].strip("*") for one in found}

    def needs_path(one):
        """batch["logps"] next to an argument logps is another: the old one. Of two batches, one may
        be of the reference."""
        is_twin = names.count(one.name) > 1
        return (one.name in alone and is_known(f"old_{one.name}")
                or is_twin and is_known(f"ref_{one.name}")
                or is_twin and is_known("_".join(map(str, one.path))))

    def named(one):
        """In clip.low and cfg.clip.low, low alone says nothing, but clip_low does."""
        whole = ["_".join(map(str, one.path[n:])) for n in range(len(one.path))]
        if needs_path(one):
            return one._replace(name=whole[0])
        ends = [] if is_known(one.name) else [end for end in whole if is_known(end)]
        return one._replace(name=ends[-1]) if ends else one
    found = [named(one) for one in found]
    found = [one._replace(default=usual, is_usual=True)
             if one.path[0] in objects and (usual := dug(objects[one.path[0]], one.path[1:])
                                            ) is not EMPTY else one for one in found]
    return [one for one in found if one.path[0] not in lookups.whole or one.path[0][:2] != "**"]


def signature_of(function):
    """List the parameters of a function, also of one that torch.jit has compiled. ValueError if
    Python does not know them. -> {name: inspect.Parameter}"""
    first = getattr(function, "args", ()) if isinstance(function, functools.partial) else ()
    given = getattr(function, "keywords", {}) if isinstance(function, functools.partial) else {}
    compiled = function.func if given or first else function
    if not hasattr(compiled, "schema"):
        return dict(inspect.signature(function).parameters)
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    own = [one for one in compiled.schema.arguments if one.name != "self"][len(first):]
    defaults = {one.name: one.default_value for one in own if one.has_default_value()} | given
    return {one.name: inspect.Parameter(
        one.name, kinds[one.kwarg_only or one.name in given],
        default=defaults.get(one.name, inspect.Parameter.empty)) for one in own}


class Unpacked:
    """A function whose parameters are those of another one, or what it looks up in them. It is
    called with names alone."""

    def __init__(self, function, own, fields):
        self.function = function
        self.own = own
        self.fields = {name: [one for one in fields if one.path[0].strip("*") == name]
                       for name in own}
        self.usual = {one.name: one.default for one in fields if one.is_usual}
        name_of = {one.path: one.name for one in fields}
        self.switches = {one.name: name_of[one.switch] for one in fields
                         if self.usual.get(name_of.get(one.switch)) is False}
        self.parameters = {}
        for name, one in own.items():
            for field in self.fields[name]:
                is_place = type(field.path[-1]) is int
                self.parameters.setdefault(field.name, inspect.Parameter(
                    field.name, one.POSITIONAL_OR_KEYWORD if is_place else one.KEYWORD_ONLY,
                    default=field.default))
            if not self.fields[name]:
                self.parameters[name] = one

    def packed(self, values):
        """Pack {name: value} as the function takes them. -> list, dict"""
        rest = {name: x for name, x in values.items() if name not in self.parameters}
        places = [one for one in self.own.values() if one.kind is one.POSITIONAL_ONLY]
        last = []
        for name, one in self.own.items():
            bag = nested(self.fields[name], values)
            if not self.fields[name]:
                rest |= {name: values[name]} if name in values else {}
            elif one.kind is one.VAR_POSITIONAL:
                last = [*bag]
                places = [one for key, one in self.own.items() if key != "self" and one.kind in (
                    one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
            else:
                rest |= bag if one.kind is one.VAR_KEYWORD else {name: bag}
        while places and places[-1].name not in rest and not last:
            places.pop()                        # they have defaults, as all that precede them
        return [rest.pop(one.name, one.default) for one in places] + last, rest

    def __call__(self, **values):
        first, rest = self.packed(self.usual | self.on(values) | values)
        return self.function(*first, **rest)

    def on(self, values):
        """List the switches of a config, off by default, that what is given needs. -> dict"""
        return {switch: True for name, switch in self.switches.items() if name in values}

    def written(self, texts):
        """Write the arguments of a call. texts: {parameter: text} -> text"""
        usual = {name: repr(one) for name, one in (self.usual | self.on(texts)).items()}
        first, rest = self.packed(usual | texts)
        return ", ".join([*map(written, first),
                          *(f"{name}={written(x)}" for name, x in rest.items())])


def nested(fields, values, depth=1):
    """Nest those values of {name: value} that a parameter gets by its fields. -> Bag, or a tuple if
    the keys are places"""
    if any(type(one.path[depth]) is int for one in fields):
        return tuple(values[one.name] for one in sorted(fields) if one.name in values)
    bag = Bag()
    for key in dict.fromkeys(one.path[depth] for one in fields):
        inside = [one for one in fields if one.path[depth] == key]
        if len(inside[0].path) > depth + 1:
            bag[key] = nested(inside, values, depth + 1)
        elif inside[0].name in values:
            bag[key] = values[inside[0].name]
    return bag


def written(x):
    """Write packed values whose leaves are texts. -> text"""
    if isinstance(x, Bag):
        return f"Bag({{{', '.join(f'{key!r}: {written(one)}' for key, one in x.items())}}})"
    return f"({', '.join(map(written, x))},)" if isinstance(x, tuple) else x


def unpacked(function, is_known):
    """Make parameters of what a function looks up in its own. -> Unpacked"""
    inner = function.func if isinstance(function, functools.partial) else function
    if not inspect.isroutine(inner) and not inspect.isclass(inner):
        inner = type(inner).__call__
    own = signature_of(function)
    try:
        fields = fields_of(inspect.unwrap(inner), own, is_known)
    except (OSError, SyntaxError, TypeError):   # there is no source
        fields = []
    return Unpacked(function, own, fields)
