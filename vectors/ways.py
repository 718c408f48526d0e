"""Find how anybody's function is called: its shapes, its constants, and arguments with other names,
or that say the same as ours in another form.
"""
import itertools
import math
import re
import warnings

import vectors
from vectors import SHAPES, WAYS, cases_of, check_case, fit, flat, inputs_of, value
from vectors.binding import LOG_P, OFF_TOKENS, opened, parameters_of
from vectors.unpack import Unpacked

TABLES = "advantages of the shape (B, T)"
OUTPUTS_ALONE = "it takes advantages of outputs, (B,), but none of tokens, (B, T)"
OFF = "False", "0.0"    # of a setting that switches something on
COMPUTED = "logps", "old_logps", "ref_logps", "advantages"      # of a batch that holds tokens
LIBRARY = {"np", "len", "Model"}        # names that texts use besides our inputs
MOST_ORDERS = 200       # of arguments with unknown names; the order of the files comes first
# Arguments that say the same as ours in another form: a pattern of their names, in which any way to
# write log p is logp -> texts that make them from our inputs. np is the library.
PAIRS = "np.concatenate([{0}, {1}])", "np.stack([{0}, {1}], 1).reshape(-1, *{0}.shape[1:])"
OF_TWO = "np.stack([{0}, np.log1p(-np.exp({0}))], -1)"          # the logits of two tokens
# What model(input_ids) computes if the next tokens have our log-probs
MODEL = "Model({0})", "Model({0}).logits"
ENDS = "np.concatenate([0 * values[:, 1:], 1 + 0 * values[:, :1]], 1)"  # 1 at the last token
STARTS = "np.concatenate([1 + 0 * values[:, :1], 0 * values[:, 1:]], 1)"
DONES = "(is_)?(dones?|terminat(ed|ions?)|terminals?)"
NOT_DONES = rf"(next_?)?(not|non)_?{DONES}"
CHOSEN, REJECTED = "(chosen|y_?w|win(ner)?|pos(itive)?)", "(rejected|y_?l|los(er|e)|neg(ative)?)"
FORMS = {
    r"(ref(erence)?_?(model|policy|net|lm)|(model|policy)_ref)": [
        text.format(OF_TWO.format("ref_logps")) for text in MODEL],
    r"((policy|actor|lm|train)_?)?(model|policy|net|network|actor|lm)": [
        text.format(OF_TWO.format("logps")) for text in MODEL],
    r"(attention|attn)_?masks?": ("1.0 + 0 * mask", "mask"),
    r".*pad(ding)?_?masks?": ("mask == 0", "1 - mask", "mask"),     # 1 on padding, or on tokens
    OFF_TOKENS.pattern: ("mask == 0", "1 - mask"),
    r"(question|prompt|quer(y|ie))s?(_?(id|str|string|text|key)s?)?": (
        "group_ids.tolist()", "group_ids[:, None] + 0 * group_ids"),
    rf"(next|last|final)_?{DONES}": ("1 + 0 * values[:, 0]",),
    NOT_DONES: (f"1 - {ENDS}",),
    DONES: (ENDS, STARTS),              # after each step, or before it
    r"(next|last|final|bootstrap(ped)?)_?v(al(ue)?s?)?|bootstrap": (
        "0 * values[:, 0]", "np.concatenate([values[:, 1:], 0 * values[:, :1]], 1)"),
    rf".*{CHOSEN}.*labels?": ("-100 * (mask_chosen == 0)",),
    rf".*{REJECTED}.*labels?": ("-100 * (mask_rejected == 0)",),
    r".*labels?": ("-100 * (mask == 0)", "0 * (mask > 0)"),
    r"(.*_)?labels?": [f"-100 * ({text.format('mask_chosen', 'mask_rejected')} == 0)"
                       for text in PAIRS],
    r".*(label|target)s?": ("tokens",),
    r"(sample|seq|sequence|row|example)_?masks?": ("1.0 + 0 * mask[:, 0]",),
    r"(completion|response|answer|action|loss)_?masks?": (      # of tokens behind a prompt
        "1.0 + 0 * tokens[:, prompt_width:]",),
    r"cu_?(seq_?)?len(gth)?s?.*": ("np.asarray([0, *(mask > 0).sum(1).cumsum(0).tolist()])",
                                   "np.arange(len(mask) + 1) * mask.shape[1]"),
    r"(seq|sequence|seg|segment|doc)_?(ids?|idxs?)": [
        f"(np.arange(len(mask))[:, None] + 0 * (mask > 0)){end}" for end in (
            "[mask > 0]", ".reshape(-1)")],
    r"(y_?w|chosen)_(idxs?|indices)": ("np.arange(len(chosen))",),
    r"(y_?l|rejected)_(idxs?|indices)": ("np.arange(len(chosen)) + len(chosen)",),
    r".*len(gth)?s?": ("(mask > 0).sum(1)",),
    r"(num|n)_(samples?|total)": ("n", "np.asarray([n])"),          # for pass@k
    r"(num|n)_(correct|right)": ("np.asarray([c])", "c"),
    r"(num|n|total|global)_(valid_)?(item|token|tok)s.*|.*token_count": ("mask.sum()",),
    r"(num|n|total|global)_(valid_)?(seq|sequence|sample)s|.*batch_size": ("len(mask)",),
    r"(importance_|is_|prob_)?ratios?|(importance|is)_weights?": ("np.exp(logps - old_logps)",),
    r".*weights": ("mask / mask.sum()", "mask / mask.sum(1)[:, None] / len(mask)"),
    r"log_?ratios?|negative_approx_kl": ("logps - old_logps",),
    r"ppo_kl": ("old_logps - logps",),
    r"prox.*logp.*|.*(data|batch)_logp": ("old_logps",),
    r"log_likelihoods?|(seq|sequence|total|sum).*logp.*": ("(logps * mask).sum(1)",),
    r"entrop(y|ies)": ("0 * logps",),
    r".*(values?|returns?|vpreds?)": ("0 * logps",),            # so the error of a critic is 0
    rf".*ref.*{CHOSEN}.*logits": (OF_TWO.format("ref_chosen"),),
    rf".*ref.*{REJECTED}.*logits": (OF_TWO.format("ref_rejected"),),
    rf".*{CHOSEN}.*logits": (OF_TWO.format("chosen"),),
    rf".*{REJECTED}.*logits": (OF_TWO.format("rejected"),),
    r".*logits": (OF_TWO.format("logps"),),
    r".*ref.*_logits": [OF_TWO.format(text.format("ref_chosen", "ref_rejected"))
                        for text in PAIRS],
    r"(.*_)?logits": [OF_TWO.format(text.format("chosen", "rejected")) for text in PAIRS],
    r".*(ids|tokens|actions)": ("0 * (mask > 0)",),
    r".*mask": [text.format("mask_chosen", "mask_rejected") for text in PAIRS],
    r".*ref.*logp.*": [text.format("ref_chosen", "ref_rejected") for text in PAIRS],
    r".*logp.*": [text.format("chosen", "rejected") for text in PAIRS]}
# Tokens without padding: one array for each output, or all in a row.
LISTS = "[x[m > 0] for x, m in zip({}, mask)]"
ROW = "{}[mask > 0]"
FLAT = "{}.reshape(-1)"                         # with all slots, which a mask tells apart
OF_TOKENS = "({}.reshape(len(mask), -1) + 0 * mask)[mask > 0]"  # advantages of tokens, in a row
# With one more slot, which a function cuts off: in front, as of the prompt; of logits, at the end.
LATER = "np.concatenate([values, 0 * values[:, :1]], 1)"        # with V after the end
FRONT = "np.concatenate([0 * ({0})[:, :1], {0}], 1)"
BACK = "np.concatenate([{0}, ({0})[:, -1:]], 1)"
TABLE = "{}.reshape(len(mask), -1) + 0 * mask"              # advantages of tokens, (B, T)
# An argument that may be the mask: an adapter does not leave it out, even if its default is None.
MASK_LIKE = re.compile(r"(?!.*(attention|attn|causal)).*(mask|pad|keep|valid).*")
# How an estimator takes tables (B, T), numbers of outputs, (B,), and values with one step more, and
# how its results become tables again: its first axis is time, or it takes one row of all outputs,
# and has to stop at their ends.
TURNS = ("{}.T", "{}", f"({LATER}).T", ".T"),
ROWS = [(f"{{}}{shape}", f"{{}}{first}", "np.concatenate([values.reshape(-1), 0 * values[0, :1]])"
         + shape, ".reshape(values.shape)")
        for shape, first in ((".reshape(-1, 1)", "[:1]"), (".reshape(1, -1)", "[:1]"),
                             (".reshape(-1)", "[0]"))]
RETURNED = "found{0}", "tuple(x{0} for x in found)", "{{name: x{0} for name, x in found.items()}}"
# The masked slots of each output behind the others.
ALIGNED = "np.stack([np.concatenate([x[m > 0], x[m == 0]]) for x, m in zip({}, mask)])"


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
        results, _ = vectors.call(function, part, content, options["tool"], options["dtype"],
                                  fitted, way, options.get("settings", ()))
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


def values_of_missing(function, content, cases, decides, options):
    """List the values that the parameters which a function lacks have in the cases that decide, but
    not those whose cases catch less than half as many mistakes as others: a function that has such
    values of its own would be right by chance. -> list of {parameter: value}"""
    lost = min((fit(function, content, case, options["fixed"], options["settings"]).missing
                for case in cases if decides(case)), key=len, default=())
    found = []
    for case in cases if lost else ():
        values = {name: value(case, name) for name in sorted(lost)}
        if decides(case) and "None" not in values.values() and values not in found:
            found.append(values)

    def caught(values):
        """Count the mistakes that the cases with these values catch."""
        return len({flag for case in cases_of({"cases": cases}, values) if decides(case)
                    for kind in ("flags", "slopes") for flag in case[kind]})
    most = {}                           # of the values of each method
    for values in found:
        method = values.get("method")
        most[method] = max(most.get(method, 0), caught(values))
    return [values for values in found if 2 * caught(values) >= most[values.get("method")]]


def constants(function, content, cases, decides, options, likely):
    """Find values of the parameters that a function lacks: those that its own constants must have,
    because all its cases are right by them, or because one mistake gives all that are wrong.
    likely(outcomes): lists such mistakes. -> {parameter: value}, or {}"""
    rough, mistaken, most = {}, {}, -1
    for values in values_of_missing(function, content, cases, decides, options):
        outcomes, _, _ = check(function, content, cases_of({"cases": cases}, values), decides,
                               options | {"fixed": options["fixed"] | values})
        ran = [one for one in outcomes if decides(one.case) and not one.skipped]
        count = sum(not one.errors and "float32" not in one.remark for one in ran)
        if ran and count == len(ran):
            return values
        if ran and not any(one.errors for one in ran):
            rough = rough or values
        elif count > most and likely(ran):
            mistaken, most = values, count
    return rough or mistaken


def forms_of(name, inputs, tool):
    """List the texts by which an argument may be made from some of our inputs. -> texts"""
    plain = LOG_P.sub("logp", name.lower())
    for pattern, texts in FORMS.items():
        if re.fullmatch(pattern, plain) and vectors.used(texts[0]) - LIBRARY <= {*inputs}:
            return [in_library(text, tool) for text in texts]
    return []


def unpadded(case, bound, made, tool):
    """List the ways to give a function that takes no mask the tokens without padding, or with all
    of it at the end; or all slots in a row, if it takes a mask, too. bound: {our name: its name};
    made: {its name: texts}. -> list of {its name: text}"""
    if "mask" not in case["inputs"]:
        return []
    shape = flat(case["inputs"]["mask"])[0]
    tokens = {its: our for our, its in bound.items()
              if our in case["inputs"] and flat(case["inputs"][our])[0] == shape}
    outputs = {its: our for our, its in bound.items() if our == "advantages"}
    ends = [texts[0] for texts in made.values() if "(mask > 0).sum(1)" in texts[0]
            or texts[0].endswith("[mask > 0]")]
    if "mask" in bound:
        flats = {its: in_library(FLAT.format(our), tool) for its, our in tokens.items()}
        return [flats] if any("[" in text for text in ends) else []
    rows = {its: ROW.format(our) for its, our in tokens.items()}
    rows |= {its: OF_TOKENS.format(our) for its, our in outputs.items()}
    packs = [{its: in_library(form.format(our), tool) for its, our in some.items()}
             for form in ((ROW, ALIGNED) if ends else (LISTS,))
             for some in (tokens, tokens | outputs)]
    return packs if ends else [rows, *packs]


def in_library(text, tool):
    """Replace np in a text by the name of the library."""
    return re.sub(r"\bnp\b", vectors.ALIASES[tool], text)


def guesses(gaps, free, made, packs, inner):
    """Guess what arguments with unknown names stand for. gaps: these arguments; free: our names
    that may be meant; made and packs: see above; inner: those that are looked up in a config or a
    batch, and may be settings. -> {its name: text} each"""
    made = {name: texts for name, texts in made.items() if name in gaps}
    rest = [name for name in gaps if name not in made]
    alike = zip(*(texts if len(texts) > 1 else texts * MOST_ORDERS for texts in made.values()))
    products = [*alike, *itertools.product(*made.values())]     # two masks are of the same kind
    for pack in [{}, *packs]:
        for texts in dict.fromkeys(products):
            for chosen in itertools.permutations(free, len(rest)):
                yield pack | dict(zip(made, texts)) | dict(zip(rest, chosen))
    off = {(name, "mask") for name in gaps if OFF_TOKENS.fullmatch(name)}
    for chosen in itertools.permutations(free, len(gaps)) if made else ():
        if off.isdisjoint(zip(gaps, chosen)):
            yield dict(zip(gaps, chosen))
    first = {name: texts[0] for name, texts in made.items()}
    for pack in [{}, *packs] if rest and {*rest} <= inner else ():
        for chosen in itertools.product(OFF, repeat=len(rest)):
            yield pack | first | dict(zip(rest, chosen))


def shifted(names, bound, inner, content, case, tool):
    """List the same arguments with one more slot for each output, of all that a function looks up
    in a batch, or of logits and labels. bound, inner: see above; names: of `guesses`.
    -> list of {its name: text}"""
    masks = [flat(x)[0] for name, x in case["inputs"].items() if name.startswith("mask")]
    masks += [(2 * N, T) for N, T in masks if len(masks) == 2]          # of chosen and rejected

    def longer(its, text):
        """Make a table (B, T + 1), or (B, T + 1, 2) of logits. -> text, "" of what is no table"""
        text = TABLE.format(text) if text == "advantages" and its in inner else text
        if "Model(" in text:
            return text
        form = BACK if "logits" in its.lower() else FRONT
        is_table = shape_of(text, content, case, tool)[:2] in masks
        return in_library(form.format(text), tool) if is_table else ""
    has_logits = any("Model(" in text or "logits" in its.lower() for its, text in names.items())
    given = {its: our for our, its in bound.items() if its in inner or has_logits} | names
    rows = {its: text for its in given if masks and (text := longer(its, given[its]))}

    def some(is_meant):
        return {its: text for its, text in rows.items() if is_meant(its)}
    of_batch = some(inner.__contains__)
    made = some(lambda its: has_logits and not given[its].isidentifier())
    of_ids = some(lambda its: given[its] not in COMPUTED and (has_logits or its in inner))
    found = [names | rest for rest in (of_batch, made, of_batch | made, of_ids) if rest]
    return [one for n, one in enumerate(found) if one not in found[:n]]


def shape_of(text, content, case, tool):
    """Compute the shape of what a text makes of the inputs of a case. -> tuple, () of a setting,
    or of what the case lacks"""
    known = vectors.arrays(case["inputs"], content["integers"], tool, "float64")
    try:
        return tuple(eval(text, {vectors.ALIASES[tool]: vectors.module_of(tool)} | known).shape)
    except Exception:
        return ()


def turned(names, bound, content, case, tool):
    """List the same arguments of an estimator of advantages, as TURNS says, or as ROWS says if it
    is told the ends of outputs. names: of `guesses`; bound: {our name: its name}.
    -> list of {its name: text}, with a text that turns what is returned"""
    given = {its: our for our, its in bound.items() if our in case["inputs"]} | names
    sizes = {its: len(shape_of(text, content, case, tool)) for its, text in given.items()}
    values = bound["values"]
    is_told = any(re.fullmatch(f"{DONES}|{NOT_DONES}", name) for name in names)
    found = [] if is_told else [names, names | {values: in_library(LATER, tool)}]
    for table, vector, later, back in ROWS if is_told else TURNS:
        forms = {1: vector, 2: table}
        made = {its: forms[sizes[its]].format(text if text.isidentifier() else f"({text})")
                for its, text in given.items() if sizes[its]}
        found += [names | some | {"return": text.format(back)}
                  for some in (made, made | {values: in_library(later, tool)}) for text in RETURNED]
    return found


def arranged(function, content, cases, decides, options, likely):
    """Find what those arguments stand for whose names are unknown, also if the function has
    constants of its own. likely(outcomes): lists the mistakes that explain wrong ones.
    -> {its name: one of our names, or a text that makes it from our inputs}, the values of these
    constants, whether all cases that decide are right by both, and else a mistake that explains all
    that are wrong, or "", with which what the names alone say is returned"""
    names, is_right, mistake = tried(function, content, cases, decides, options, likely)
    own = {}
    for values in values_of_missing(function, content, cases, decides, options):
        if is_right or values.get("method", "clip") != "clip":      # others have to be chosen
            continue
        fixed = options["fixed"] | values
        found, is_right, flag = tried(function, content, cases_of({"cases": cases}, values),
                                      decides, options | {"fixed": fixed}, likely)
        if is_right or flag and not mistake:
            names, own, mistake = found, values, flag
    return names, own, is_right, mistake


def weights_of(fitted, settings):
    """List what may be the weight of a KL in a function that takes a reference, but no weight whose
    name is known: other numbers, and what has to be given. -> names"""
    names = fitted.binding.names
    if "ref_logps" not in names or "beta" in names:
        return []
    return [name for name, one in fitted.binding.settings.items() if name not in settings and (
        name in fitted.needed or type(one.default) in (int, float))]


def tried(function, content, cases, decides, options, likely):
    """Try what those arguments stand for whose names are unknown. -> as `arranged`, but no values
    of constants"""
    fits = {case["id"]: fit(function, content, case, options["fixed"], options["settings"])
            for case in cases if decides(case)}
    # one that fits comes first, and one whose bounds are equal, for functions with one epsilon
    cases = sorted((case for case in cases if decides(case)), key=lambda case: (
        len(fits[case["id"]].missing), len({*map(str, case["parameters"].values())})))
    own = fits[cases[0]["id"]]
    inputs = inputs_of(content, cases[0])
    inputs += ["group_ids"] * (content["function"] == "advantages")
    bound = {our: its for our, its in own.binding.names.items()
             if not own.binding.by_position or our not in inputs}
    gaps = [name for name, one in parameters_of(function).items() if name not in bound.values()
            and (one.default is None or name in own.needed or own.binding.by_position)]
    free = [name for name in (*inputs, *cases[0]["parameters"])
            if name not in bound and name not in options["fixed"]]
    known = content, cases[0], options["tool"]
    given = [*inputs, *cases[0]["parameters"]]
    made = {name: texts for name in gaps if (texts := forms_of(name, given, options["tool"]))}
    packs = unpadded(cases[0], bound, made, options["tool"])
    if "old_logps" in free and "logps" in bound and any("logits" in name.lower() for name in made):
        packs.append({bound["logps"]: "old_logps"})         # what is given beside logits is old
    needed = [name for name in gaps if parameters_of(function)[name].default is not None
              or "mask" not in bound and MASK_LIKE.fullmatch(name)]
    parts = getattr(function.function, "parts", [function])
    inner = {one.name for part in parts for fields in part.fields.values() for one in fields}
    weights = [{name: "beta"} for name in weights_of(own, options["settings"])]
    orders = [needed, gaps] if needed != gaps else [gaps]
    tries = (weight | names for weight in [*weights, {}] for some in orders
             for plain in guesses([name for name in some if name not in weight], free, {
                 name: texts for name, texts in made.items() if name not in weight}, packs, inner)
             for names in (turned(plain, bound, *known) if {"values", "rewards"} <= {*bound} else
                           (plain, *shifted(plain, bound, inner, *known))))
    mistaken = {name: texts[0] for name, texts in made.items()}
    left = [[name for name in needed if name not in made],
            [one for one in inputs if one in free and one != "group_ids"]]
    if all(len(some) == 1 for some in left):
        mistaken |= {left[0][0]: left[1][0]}            # it can be nothing else
    mistake = ""
    for names in itertools.islice(tries, MOST_ORDERS):
        for some in (cases[:1], cases):
            found, _, _ = check(function, content, some, decides, options | {"names": names})
            ran = [one for one in found if not one.skipped]
            is_wrong = any(one.errors for one in ran)
            has_raised = any(one.raised for one in ran)
            is_new = is_wrong and not mistake and not has_raised and "return" not in names
            if "return" in names and "return" not in mistaken and not mistake and (
                    gaps and ran and not has_raised):
                mistaken = names
            flags = likely(ran) if is_new else []
            if not ran or is_wrong and not flags:
                break
        else:
            if not is_wrong:
                return names, True, ""
            mistaken, mistake = names, flags[0]
    return mistaken, False, mistake


def adapter(called, module, name, function, case, inputs, fitted, names, fixed, tool):
    """Write a function that is `called` so, has our names, and calls `function`. It gives what is
    fixed itself. Gaps are left for arguments that are neither bound nor in `names`. inputs: those
    that matter. -> text"""
    ours = [*dict.fromkeys((*inputs, *case["parameters"], *fitted.parameters))]
    ours = [one for one in ours if one not in fixed]
    theirs = {other: our for our, other in fitted.binding.names.items() if our in ours}
    theirs |= {other: our for other, our in fitted.binding.twins.items() if our in ours} | names
    theirs |= {other: repr(fitted.parameters[our]) for our, other in fitted.binding.names.items()
               if our in fixed and our in fitted.parameters}
    given = set().union(*map(vectors.used, theirs.values()))
    ours = [one for one in dict.fromkeys((*ours, "group_ids", "beta"))
            if one in inputs or one in given]
    if "epsilon_high" not in ours:      # one epsilon is for both sides
        shown = {"epsilon_low": "epsilon"}
        ours = [shown.get(one, one) for one in ours]
        theirs = {other: shown.get(our, our) for other, our in theirs.items()}
    parts = getattr(function.function, "parts", [function])
    calls = [part.written({one: theirs.get(one, "...") for one in part.parameters
                           if one in theirs or one in fitted.needed}) for part in parts]
    made = f"{name}({calls[-1]})"
    if len(parts) > 1 or "self" in parts[0].own:
        of_class = calls[0] if len(parts) > 1 else "..."
        made = name.replace(".", f"({of_class}).", 1) + f"({calls[-1]})"
    made = names.get("return", "found").replace("found", made)
    if "..." not in made:               # all gaps are filled, so what else there is does not matter
        ours = [one for one in ours if one in vectors.used(made)]
    library = {"torch": "import torch", "jax": "import jax.numpy as jnp",
               "numpy": "import numpy as np"}[tool]         # by it, the command knows the arrays
    return (f"    from {module.__name__} import {name.split('.')[0]}\n"
            + "".join(f"    from vectors.unpack import {one}\n" for one in ("Bag", "Model")
                      if f"{one}(" in made)
            + f"    {library}\n" * (tool != "torch" or "torch." in made) +
            f"    def {called}({', '.join(ours)}):\n"
            f"        return {made}")
