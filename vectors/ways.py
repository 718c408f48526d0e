"""Find how anybody's function is called: its shapes, its constants, and arguments with other names.
"""
import itertools
import math
import warnings

from vectors import SHAPES, WAYS, call, cases_of, check_case, fit, flat, inputs_of, value
from vectors.binding import opened, parameters_of
from vectors.unpack import Unpacked

TABLES = "advantages of the shape (B, T)"
OUTPUTS_ALONE = "it takes advantages of outputs, (B,), but none of tokens, (B, T)"
MOST_ORDERS = 200       # of arguments with unknown names; the order of the files comes first


def of_class(name, found, part):
    """Find a method of a class. An object is made with those arguments of the class that the method
    does not have. -> name, function whose parameters are those of both"""
    first, rest = opened(found), opened(getattr(found, part))

    def made(**given):
        own = first(**{key: x for key, x in given.items()
                       if key in first.parameters and key not in rest.parameters})
        method = opened(getattr(own, part))
        return method(**{key: x for key, x in given.items() if key in rest.parameters})
    made.parts = [first, rest]
    return f"{name}.{part}", Unpacked(made, {
        key: one.replace(kind=one.KEYWORD_ONLY)
        for key, one in (first.parameters | rest.parameters).items()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and key != "self"}, [])


def check(function, content, cases, decides, options):
    """Check a function on cases. Only if a case that decides is wrong, other ways to call it are
    tried, of which one is taken if more such cases are right. -> outcomes, key of WAYS, outcomes
    of the first way"""
    found = {}

    def right(way):
        return sum(not one.errors and not one.skipped and decides(one.case) for one in found[way])
    for way in WAYS:
        with warnings.catch_warnings():
            if way:                     # a way that may not be meant
                warnings.simplefilter("ignore")
            found[way] = [check_case(function, content, case, way=way, **options)
                          for case in cases]
        if not any(one.errors for one in found[way] if decides(one.case)):
            break
    way = max(found, key=right)
    if not right(way):                  # then what comes nearest shows the mistake
        way = min(found, key=lambda way: sum(one.raised for one in found[way]))
    if is_of_outputs(function, content, found, way, decides, options):
        found[way] = [one._replace(errors=[], skipped=OUTPUTS_ALONE)
                      if one.case.get("grade") == "tokens" else one for one in found[way]]
    return found[way], way, found[""]


def is_of_outputs(function, content, found, way, decides, options):
    """Tell whether a function is right for all advantages of outputs, and takes none of tokens: if
    the same are given for each token, it raises, or it is wrong only because PyTorch repeats all
    outputs for each, which a batch of one output does not show."""
    outputs = [n for n, one in enumerate(found[way]) if decides(one.case) and not one.skipped
               and one.case.get("grade") != "tokens" and "advantages" in one.case["inputs"]]
    tables = found.get(TABLES, [])
    return bool(outputs and tables) and all(
        not found[way][n].errors and tables[n].errors and (
            tables[n].raised or is_alike(function, content, tables[n].case, options))
        for n in outputs)


def is_alike(function, content, case, options):
    """Tell whether each output alone gets the same results with advantages of the shapes (B,) and
    (B, T)."""
    for row in range(len(case["inputs"]["mask"])):
        try:
            found = results_of(
                function, content, case, slice(row, row + 1), ("", TABLES), options)
        except Exception:               # it takes no batch of one
            return False
        if not all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(*found)):
            return False
    return True


def results_of(function, content, case, rows, ways, options, columns=slice(None)):
    """Call a function in some ways with some rows and columns of a case. -> list of the results of
    each way"""
    names = {"fixed", "settings", "names"}
    fitted = fit(function, content, case, **{key: options[key] for key in names & options.keys()})
    part = case | {"inputs": {name: [x[columns] if isinstance(x, list) else x for x in values[rows]]
                              for name, values in case["inputs"].items()}}
    found = []
    for way in ways:
        results, _ = call(function, part, content, options["tool"], options["dtype"], fitted, way,
                          options.get("settings", ()))
        found.append(flat([*results.values()])[1])
    return found


def is_silent(function, content, case, way, options):
    """Tell whether a function that is right in one way returns something else in the first way, if
    there are as many outputs as tokens."""
    first = slice(min(len(case["inputs"]["mask"]), len(case["inputs"]["mask"][0])))
    try:
        found = results_of(function, content, case, first, ("", way), options, first)
    except Exception:               # then it is not silent
        return False
    return not all(abs(a - b) <= 1e-9 for a, b in zip(*found))


def told_way(function, content, way, first, decides, options):
    """Write which way to call a function is right, and what happens in the first way. -> line"""
    wrong = [one for one in first if one.errors and decides(one.case)]
    error = wrong[0].errors[0].partition("\n")[0]
    line = f"more cases are right with {way}"
    shape = way.removesuffix(" and a boolean mask")
    if shape not in SHAPES or not shape:
        usual = "rewards of the shape (P, G)" if "rewards" in shape else "a mask of numbers"
        return f"{line}; with {usual}, {error}"
    line += f"; with the shape (B,), {error}"
    if is_silent(function, content, wrong[0].case, way, options):
        line += "; and if B = T, it is wrong without an error"
    return line


def constants(function, content, cases, decides, options, likely):
    """Find values of the parameters that a function lacks: those that its own constants must have,
    because all its cases are right by them, or because one mistake gives all that are wrong.
    likely(outcomes): lists such mistakes. -> {parameter: value}, or {}"""
    lost = min((fit(function, content, case, options["fixed"], options["settings"]).missing
                for case in cases if decides(case)), key=len, default=())
    found = []
    mistaken = {}
    for case in cases:
        values = {name: value(case, name) for name in sorted(lost)}
        if decides(case) and "None" not in values.values() and values not in found:
            found.append(values)
    for values in found if lost and "method" not in lost else ():
        outcomes, _, _ = check(function, content, cases_of({"cases": cases}, values), decides,
                               options | {"fixed": options["fixed"] | values})
        ran = [one for one in outcomes if decides(one.case) and not one.skipped]
        if ran and not any(one.errors for one in ran):
            return values
        if not mistaken and ran and likely(ran):
            mistaken = values
    return mistaken


def arranged(function, content, cases, decides, options):
    """Find which of our names those arguments stand for whose names are unknown, by trying all.
    -> {our name: its name} by which all cases that decide are right, or {}"""
    cases = [case for case in cases if decides(case)]
    own = fit(function, content, cases[0], options["fixed"], options["settings"])
    bound = {} if own.binding.by_position else own.binding.names
    gaps = [name for name, one in parameters_of(function).items() if name not in bound.values()
            and (one.default is None or name in own.needed or own.binding.by_position)]
    free = [name for name in (*inputs_of(content, cases[0]), *cases[0]["parameters"])
            if name not in bound and name not in options["fixed"]]
    for chosen in itertools.islice(itertools.permutations(free, len(gaps)), MOST_ORDERS):
        names = dict(zip(chosen, gaps))
        for some in (cases[:1], cases):
            found, _, _ = check(function, content, some, decides, options | {"names": names})
            ran = [one for one in found if not one.skipped]
            if not ran or any(one.errors for one in ran):
                break
        else:
            return names
    return {}


def adapter(module, name, function, case, inputs, fitted, names, fixed):
    """Write a function that has our names and calls `function`. Gaps are left for arguments that
    are neither bound nor in `names`. inputs: those that matter. -> text"""
    ours = [*dict.fromkeys((*inputs, *case["parameters"], *fitted.parameters))]
    ours = [one for one in ours if one not in fixed]
    theirs = {other: our for our, other in (fitted.binding.names | names).items() if our in ours}
    theirs |= {other: our for other, our in fitted.binding.twins.items() if our in ours}
    ours = [one for one in ours if one in inputs or one in theirs.values()]
    if "epsilon_high" not in ours:      # one epsilon is for both sides
        shown = {"epsilon_low": "epsilon"}
        ours = [shown.get(one, one) for one in ours]
        theirs = {other: shown.get(our, our) for other, our in theirs.items()}
    parts = getattr(function.function, "parts", [function])
    calls = [part.written({one: theirs.get(one, "...") for one in part.parameters
                           if one in theirs or one in fitted.needed}) for part in parts]
    made = f"{name}({calls[-1]})"
    if len(parts) > 1 or "self" in parts[0].own:
        of_class = calls[0] if len(parts) > 1 else ""
        made = name.replace(".", f"({of_class or '...'}).", 1) + f"({calls[-1]})"
    return (f"    from {module.__name__} import {name.split('.')[0]}\n"
            + "    from vectors.unpack import Bag\n" * ("Bag(" in made) +
            f"    def adapted({', '.join(ours)}):\n"
            f"        return {made}")
