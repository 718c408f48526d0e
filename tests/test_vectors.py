"""Check the scripts and examples against the test vectors of vectors/, in float64 and in float32,
and test the command that does this for everybody's functions, as they are or with an adapter."""
import importlib
import inspect
import re
import signal
import sys

import pytest
import torch
from conftest import ROOT
from small_vectors import OURS

import vectors
from vectors import __main__ as command
from vectors import adapter, contract
from vectors.edits import replace_once

pytestmark = pytest.mark.quick

FILES = {name: vectors.read(name) for name in vectors.files()}
CASES = {f"{name}: {case['id']}": (name, case)
         for name, content in FILES.items() for case in content["cases"]}
# Cases for whose convention there is no function of ours.
NOT_OURS = {"completion_mask: two ends", "advantages: grpo, ddof 0",
            "advantages: grpo, no eps, equal",
            "policy_loss: cispo, lower bound", "adaptive_kl: horizon", "token_advantages: otb"} | {
            name for name, (file, _) in CASES.items() if file == "truncated_logps"}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_our_functions_give_the_right_answers(name, dtype):
    """They have our conventions, except that log rho is cut at 80, and k3 is exact also where
    others may round it below 0."""
    file, case = CASES[name]
    if "absolute" in case.get("tolerance", {}):
        case = case | {"tolerance": case["tolerance"] | {"absolute": 0.0}}
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        functions = [] if name in NOT_OURS else OURS[file](**case["parameters"])
        assert bool(functions) == (name not in NOT_OURS)
        for function in functions:
            outcome = vectors.check_case(
                function, FILES[file], case, dtype=dtype, fixed=case["parameters"])
            assert not outcome.errors, outcome.errors
            assert not outcome.remark.startswith("right "), outcome.remark   # not everywhere
            choice = "log rho is cut at 80, beyond which float32 overflows"
            assert outcome.choice == (choice if name.endswith("clip, far") and not outcome.skipped
                                      else ""), outcome.choice
            assert outcome.skipped == "" or outcome.skipped.startswith("float32: it cannot")
    finally:
        torch.set_default_dtype(torch.float32)


# ---- the files and the command ---------------------------------------------------------------

def test_the_package_has_all_data_and_no_requirements():
    text = (vectors.FOLDER / "pyproject.toml").read_text("utf-8")
    patterns = re.findall(r'"(\S+)"', text.partition("package-data")[2])
    data = {path.name for path in vectors.FOLDER.iterdir() if path.suffix in (".json", ".txt")}
    assert data == {path.name for one in patterns for path in vectors.FOLDER.glob(one)}
    assert "\ndependencies" not in text


@pytest.mark.parametrize("file", FILES)
def test_the_stored_answers_are_those_of_the_reference_and_flags_have_sentences(file):
    content = FILES[file]
    pytest.importorskip("mpmath")
    fill = importlib.import_module("vectors.fill")
    for case in content["cases"]:
        signs = [*map(vectors.weighted, case["right"].values()),
                 vectors.slope_sign(case.get("gradient", {}))]
        assert fill.signs(content, case, fill.reference) == pytest.approx(signs, 1e-9, 1e-12)
        if len(content["cases"]) < 10:
            assert all(case[key] == x for key, x in fill.filled(file, content, case).items())
    ids = [case["id"] for case in content["cases"]]
    assert len(set(ids)) == len(ids) and content["version"] in (1, 2, 3)
    numbers = [pair for case in content["cases"] for kind in ("flags", "slopes")
               for pair in case[kind].items()]
    shown = {flag for flag, number in numbers if number is not None}
    assert dict(numbers).keys() == shown == content["mistakes"].keys()  # so each can be named


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    """answer(source, *words, edits=None): run the command on the function `loss` of a module with
    this source. With edits, pairs of texts, it writes an adapter first, and runs it with these gaps
    filled. -> code, output"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def ended(*argv):
        try:
            code = command.main([*argv])
        except SystemExit as end:
            code = end.code
        return code, "".join(capsys.readouterr())

    def run(source, *words, edits=None, function="loss"):
        name = f"m{tmp_path.name}_{len(list(tmp_path.iterdir()))}".replace("-", "_")
        source = source if re.search("^(import|from) (jax|numpy)", source) else f"{TORCH}{source}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        if edits is None:
            return ended(f"{name}:{function}", *words)
        code, text = ended(f"{name}:{function}", *words, "--adapter")
        assert code == 2 and text.startswith("NOTHING RAN: "), text
        (path,) = tmp_path.glob(f"adapt_{name}_*.py")
        filled = path.read_text()
        for old, new in edits:
            filled = replace_once(filled, old, new)
        path.write_text(filled)
        return ended(str(path), *words)
    return run


# ---- losses ----------------------------------------------------------------------------------

TORCH = "import torch\nimport torch.nn.functional as F\n\n"
CLIP = """def loss(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    ratio = torch.exp(logps - old_logps)
    A = advantages[:, None]
    x = -torch.min(ratio * A, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
    return """
MEAN = "((x * mask).sum(1) / mask.sum(1)).mean()"
POOLED = "(x * mask).sum() / mask.sum()"
CLIPPED = "ratio.clamp(1 - epsilon_low, 1 + epsilon_high)"
VALUE = """def loss(values, old_values, returns, mask, cliprange):
    near = old_values + (values - old_values).clamp(-cliprange, cliprange)
    x = torch.max((values - returns) ** 2, (near - returns) ** 2) / 2
    return (x * mask).sum() / mask.sum()
"""
# Right losses: name -> what the command is told, source
BASES = {
    "grpo": ("--recipe grpo", CLIP + MEAN), "dapo": ("--recipe dapo", CLIP + POOLED),
    "gspo": ("--recipe gspo", CLIP.partition("\n")[0] + """
    s = (((logps - old_logps) * mask).sum(1) / mask.sum(1)).exp()
    A = advantages
    return -torch.min(s * A, s.clamp(1 - epsilon_low, 1 + epsilon_high) * A).mean()
"""),
    "cispo": ("--recipe cispo", """def loss(logps, old_logps, advantages, mask, epsilon_high):
    weight = (logps - old_logps).exp().clamp(max=1 + epsilon_high).detach()
    return -(weight * advantages[:, None] * logps * mask).sum() / mask.sum()
""")}

IN_MASK = "    ratio ="
NO_EOS = "    mask = mask * (mask.cumsum(1) < mask.sum(1, True))\n    ratio ="
MISTAKES = [            # a mistake of the reference, a right loss, a part of it, what replaces it
    ("min_max", "grpo", "torch.min", "torch.max"), ("not_clipped", "grpo", CLIPPED, "ratio"),
    ("inverse", "grpo", "logps - old_logps", "old_logps - logps"),
    ("other_mean", "grpo", MEAN, POOLED), ("no_mask", "grpo", MEAN, "x.mean()"),
    ("detached", "grpo", "torch.exp(logps - old_logps)", "torch.exp(logps - old_logps).detach()"),
    ("no_eos", "grpo", IN_MASK, NO_EOS), ("sum", "dapo", " / mask.sum()", ""),
    ("one_epsilon", "dapo", "1 + epsilon_high", "1 + epsilon_low"),
    ("product", "gspo", " / mask.sum(1)", ""),
    ("weight_grad", "cispo", ".detach()", ""), ("no_log", "cispo", " * logps * mask", " * mask")]


@pytest.mark.parametrize("mistake, name, old, new", MISTAKES)
def test_a_mistake_of_the_reference_is_named(mistake, name, old, new, answer):
    words, source = BASES[name]
    code, text = answer(replace_once(source, old, new), *words.split())
    meant = {one["mistakes"].get(mistake) for one in FILES.values()} - {None}
    assert code == 1 and text.startswith("NOT PASSED: "), text
    assert meant & {*re.findall(r"likely: (.*?) \(this gives all", text)}, text


# ---- forms of losses -------------------------------------------------------------------------

def clipped(new, old, A, mask, low, high, end="(x * m).sum() / m.sum()"):
    """Write the lines of the clipped loss, averaged over all tokens, with other expressions."""
    return f"""
    m = {mask}
    r = torch.exp({new} - {old})
    x = -torch.min(r * {A}, r.clamp(1 - {low}, 1 + {high}) * {A})
    return {end}
"""


PLAIN = clipped("logps", "old_logps", "advantages[:, None]", "mask", "epsilon_low", "epsilon_high")
ARGUMENTS = "logps, old_logps, advantages, mask, epsilon_low, epsilon_high"
BATCH = clipped('b["lp"]', 'b["old"]', 'b["A"][:, None]', 'b["m"]', "cfg.clip.low", "cfg.clip.high")
FILL_BATCH = [("b=...", "b=Bag(lp=logps, old=old_logps, A=advantages, m=mask)"),
              ("cfg=...", "cfg=Bag(clip=Bag(low=epsilon_low, high=epsilon_high))")]
MODEL = """
    x = model(ids)["logits"][:, :-1].log_softmax(-1)
    logps = x.gather(-1, ids[:, 1:, None])[..., 0]
"""
IDS = "ids=mask.new_zeros(len(mask), 1 + mask.shape[1]).long()"
KNOWN = [("m=...", "m=mask"), ("old=...", "old=old_logps"), ("A=advantages", "A=advantages")]
JAX = """import jax.numpy as np

def loss(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    ratio = np.exp(logps - old_logps)
    A = advantages[:, None]
    x = np.minimum(ratio * A, np.clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * A)
    return -(x * mask).sum() / mask.sum()
"""
FORMS = [               # name, source, what the user says, gaps as a person fills them
    ("verl's names and order", "def loss(old_log_prob, log_prob, advantages, response_mask, "
     "cliprange, clip_ratio_c=3.0):" + clipped(
         "log_prob", "old_log_prob", "advantages", "response_mask", "cliprange", "cliprange",
         "(torch.where(advantages < 0, x.minimum(-clip_ratio_c * advantages), x) * m).sum() / "
         "m.sum(), 0.0"), "--advantages BT", None),
    ("TRL's names", "def loss(per_token_logps, old_per_token_logps, advantages, completion_mask, "
     "epsilon_low=0.2, epsilon_high=0.2):" + clipped(
         "per_token_logps", "old_per_token_logps", "advantages.unsqueeze(1)", "completion_mask",
         "epsilon_low", "epsilon_high"), "", None),
    ("losses of tokens", f"def loss({ARGUMENTS}):" + PLAIN.replace("(x * m).sum() / m.sum()", "x"),
     "", None),
    ("a dict", f"def loss({ARGUMENTS}):" + PLAIN.replace(
        "(x * m).sum() / m.sum()", "{'pg_loss': (x * m).sum() / m.sum(), 'ratio': r}"), "", None),
    ("positions alone", "def loss(logps, old_logps, advantages, mask, /, epsilon_low, "
     f"epsilon_high):{PLAIN}", "", None),
    ("a partial", f"import functools\ndef whole({ARGUMENTS}):{PLAIN}"
     "\nloss = functools.partial(whole, epsilon_low=0.2)\n", "", None),
    ("other names", "def loss(new, old, A, m, low, high):" + clipped(
        "new", "old", "A[:, None]", "m", "low", "high"), "",
     [*KNOWN, ("new=...", "new=logps"), ("low=...", "low=epsilon_low"),
      ("high=...", "high=epsilon_high")]),
    ("a model", f"def loss(model, ids, {ARGUMENTS[7:]}):{MODEL}{PLAIN}", "",
     [("model=...", "model=model_of(logps)"), ("ids=...", IDS)]),
    ("a batch and a config", f"def loss(b, cfg):{BATCH}", "", FILL_BATCH),
    ("a class", f"class loss(torch.nn.Module):\n  def __init__(self, high=0.2, agg='token'):\n"
     "    super().__init__()\n    self.high = high\n  def forward(self, "
     f"{ARGUMENTS[:-14]}):" + PLAIN.replace("epsilon_high", "self.high"), "",
     [("high=...", "high=epsilon_high"), ("agg=...,  # 'token' by default", "")]),
    ("an object", f"class Loss(torch.nn.Module):\n  def forward(self, {ARGUMENTS}):{PLAIN}\n"
     "loss = Loss()\n", "", None),
    ("verl's critic, whose values are the old ones", "def loss(vpreds, returns, values, "
     "response_mask, cliprange_value):" + VALUE.partition(":")[2].replace("old_values", "old")
     .replace("values", "vpreds").replace("old", "values").replace("mask", "response_mask")
     .replace("cliprange", "cliprange_value"), "value_loss",
     [("vpreds=...", "vpreds=values"), ("        values=...", "        values=old_values")]),
    ("JAX", JAX, "", None), ("numpy", JAX.replace("jax.numpy", "numpy"), "", None)]
WRONG = [("minimum(ratio", "maximum(ratio"), ("torch.min(", "torch.max("),
         ("torch.max((", "torch.min((")]


@pytest.mark.parametrize("name, source, words, edits", FORMS, ids=[row[0] for row in FORMS])
def test_each_form_passes_if_it_is_right_and_does_not_with_a_mistake(name, source, words, edits,
                                                                     answer):
    if "import jax" in source:
        pytest.importorskip("jax", reason="jax is not installed")
    has_file = words == "value_loss"
    words = words.split() + ["--recipe", "dapo"] * (not has_file)
    if edits:
        assert answer(source, *words)[0] != 0
    code, text = answer(source, *words, edits=edits)
    assert code == 0 and text.startswith("PASSED: "), text
    old, new = next(pair for pair in WRONG if pair[0] in source)
    code, text = answer(source.replace(old, new), *words, edits=edits)
    assert code == 1 and text.startswith("NOT PASSED: "), text


def test_the_page_shows_what_the_command_prints_and_its_adapter_passes(answer):
    page = (ROOT / "docs/vectors.md").read_text("utf-8")
    right, wrong, gaps, filled = re.findall(r":\n\n```\n([^`]*)```", page)[1:]
    grpo_loss, my_loss = re.findall(r"```python\n(.*?)```", page, re.S)
    assert answer(grpo_loss, "--recipe", "dapo", function="grpo_loss") == (0, right)
    code, text = answer(replace_once(grpo_loss, "torch.min", "torch.max"), "--recipe", "dapo",
                        function="grpo_loss")
    assert code == 1 and all(part in text for part in wrong.split("...\n"))
    gaps, filled = (part.partition("my_loss")[2] for part in (gaps, filled))
    code, text = answer(my_loss, "--recipe", "dapo", function="my_loss", edits=[(gaps, filled)])
    assert code == 0 and text.startswith("PASSED: 4 of 15 "), text


# ---- the contract ----------------------------------------------------------------------------

@pytest.mark.parametrize("theirs", contract.ALIASES)
def test_each_name_of_the_table_is_bound_and_its_neighbour_is_not(theirs):
    def function(**_):
        pass
    inputs = set(contract.NAMES) - {"epsilon_low", "epsilon_high", "eps"}
    for name, count in ((theirs, 1), (f"{theirs}2", 0), (f"my_{theirs}", 0)):
        function.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)])
        binding = contract.bind(function, inputs, contract.NAMES.keys() - inputs)
        assert len(binding.names) == count and len(binding.unknown) == 1 - count


OTHER = f"def loss(new, old_logps, A, mask, low=0.2, flag=None):{PLAIN}"


def test_an_adapter_has_a_gap_for_each_argument_that_is_not_known(answer, tmp_path):
    code, text = answer(OTHER, "--recipe", "dapo")
    first, where, how, *_ = text.splitlines()
    assert code == 2 and first == "NOTHING RAN: loss: new: not a name of this project, TRL or verl"
    (path,) = tmp_path.glob("adapt_*.py")
    written = path.read_text()
    assert str(path) in where and written in text and how.partition(": ")[2] in written
    for line in ("new=...,", "low=...,  # 0.2 by default", "flag=...,  # None by default",
                 "A=advantages,  # (B,)", "mask: (B, T)", "epsilon_high: 0.2 or 0.28"):
        assert f"    {line}\n" in written
    assert ", low=0.2, flag=None):" in written
    path.write_text(replace_once(written, "new=...", "new=logps[..., :]"))
    code, text = answer(OTHER, "--recipe", "dapo")                      # another file: another one
    assert len([*tmp_path.glob("adapt_*.py")]) == 2
    assert command.main([path.stem.replace("adapt_", "").removesuffix("_loss") + ":loss",
                         "--recipe", "dapo"]) == 2
    assert "logps[..., :]" in path.read_text()                          # it is not written over
    assert command.main([str(path), "--recipe", "dapo"]) == 2
    _, text = answer(OTHER.replace("low=", "epsilon_high=0.3, low="), "--recipe", "dapo")
    assert ", epsilon_high=0.3, " in text                               # its own default stays


@pytest.mark.parametrize("call, gaps", [
    ("f(..., b=a)", ["an argument without a name"]), ("f(a, b=-...)", ["b"]),
    ("f(*[...])", ["an argument without a name"]), ("f(a, **{'b': ...})", ["**"]),
    ("f(a[..., 0], b=a[:, ...])", []), ("f(g(a, ...), b=(1, ...))", ["b"] + [
        "an argument without a name"] * 2)])
def test_each_gap_of_an_adapter_is_found_and_an_index_is_none(call, gaps, import_text):
    module = import_text(f'def loss(a):\n    """{contract.ADAPTER}f."""\n    return {call}\n')
    assert adapter.gaps_of(module.loss) == gaps


@pytest.mark.parametrize("text, value", [
    ("False", False), ("None", None), ("0.5", 0.5), ("mean", "mean"), ("offset", "offset"),
    *((text, ValueError) for text in ("false", "FALSE", "Off", "NO", "Null", "NaN", "on"))])
def test_a_text_that_means_a_switch_or_a_number_is_no_setting(text, value):
    """It would count as true."""
    if value is ValueError:
        with pytest.raises(ValueError, match=f"a={text}: must be"):
            contract.setting("a", text)
    else:
        assert contract.setting("a", text) == value


@pytest.mark.parametrize("gap, verdict", [
    ("low=epsilon_low", "PASSED: 4 of 15"), ("low=0.2", "NOTHING RAN: 0 of 15"),
    ("low=epsilon_high", "NOTHING RAN: 0 of 15")])
def test_what_an_adapter_does_not_use_is_not_taken(gap, verdict, answer):
    """One epsilon is tested where both bounds are equal; a number of the user has to be stated."""
    source = OTHER.replace("epsilon_low", "low").replace("epsilon_high", "low").replace(
        "(logps", "(new").replace("advantages", "A")
    edits = [("new=...", "new=logps"), ("low=...", gap), ("flag=...,  # None by default", "")]
    code, text = answer(source, "--recipe", "dapo", edits=edits)
    assert text.startswith(verdict), text
    if gap == "low=0.2":
        assert "state them: epsilon_high=0.2|0.28 epsilon_low=0.2" in text
        code, text = answer(source, "--recipe", "dapo", "epsilon_low=0.2", "epsilon_high=0.2",
                            edits=edits)
        assert code == 0 and "11 skipped: they have other constants" not in text, text


@pytest.mark.parametrize("tool", ["torch", "numpy", "jax"])
def test_what_an_adapter_calls_gives_the_log_probs_back_with_their_gradient(tool):
    pytest.importorskip(tool)
    numbers = vectors.module_of(tool)
    case = CASES["policy_loss: clip, second"][1]
    given = vectors.arrays(case["inputs"], (), tool, "float64")
    logps, mask = given["logps"], given["mask"]
    x = adapter.model_of(logps)("anything").logits
    x = x - numbers.log(numbers.exp(x).sum(-1))[..., None]
    assert vectors.flat(x[:, :-1, 0])[1] == pytest.approx(vectors.flat(logps)[1], 1e-12)
    packed = adapter.pack(logps, mask)
    assert [len(row) for row in adapter.rows(logps, mask)] == [2, 2, 2, 2] and len(packed) == 8
    assert vectors.flat(adapter.unpack(packed, mask)) == vectors.flat(logps * mask)
    if tool == "torch":
        logps.requires_grad_()
        slope = torch.autograd.grad(adapter.logits_of(logps).log_softmax(-1)[..., 0].sum(), logps)
        torch.testing.assert_close(slope[0], torch.ones_like(logps))


def test_the_shape_of_advantages_is_said_and_none_is_tried(answer):
    columns = f"def loss({ARGUMENTS}):" + PLAIN.replace("[:, None]", "")
    code, text = answer(columns, "--recipe", "dapo")
    assert code == 1 and "advantages had the shape (B,): if your function takes another" in text
    for shape, words in (("B1", "(B, 1)"), ("BT", "(B, T)")):
        code, text = answer(columns, "--recipe", "dapo", "--advantages", shape)
        assert code == 0 and f"shape {words}, as you say: your trainer has to pass" in text
    assert answer(columns, "--recipe", "ppo")[0] == 0
    assert answer(RIGHT, "--recipe", "dapo", "--advantages", "B1")[0] == 1


# ---- the verdict -----------------------------------------------------------------------------

RIGHT = f"def loss({ARGUMENTS}):{PLAIN}"


@pytest.mark.parametrize("old, new, words, expected", [
    ("m.sum()", "m.numel()", "id=clip", "each of the 7 wrong numbers is 0.55 times the right one"),
    ("exp(logps", "exp(logps.detach()", "id=clip", "no gradient arrives there"),
    ("return ", "return 0.1 + ", "id=clip", "its gradient is not wrong"),
    ("return ", "return torch.ones(3) * ", "id=clip", "has the shape (3,), should have ()"),
    ("m = mask", "m = nothing", "id=clip", "NameError: name 'nothing'"),
    ("m = mask", "raise SystemExit(0)", "", "SystemExit: 0: clip; clip, second; clip-higher"),
    ("m = mask", "mask /= 2\n    m = mask", "", "it changes its argument mask in place"),
    ("m = mask", "advantages *= -1\n    m = mask", "", "its argument advantages in place"),
    ("m = mask", "m = mask\n    old_logps = old_logps.detach()", "id=clip, first step",
     "the cases that ran cannot tell if the ratio is not clipped"),
    ("return ", "return 0.123 + 0.7 * ", "", "also wrong: clip-higher, second"),
    ("    return ", "    return None and ", "", "loss is not returned"),
    ("return ", "return 'x', ", "", "loss is not made of numbers")])
def test_what_is_wrong_is_told(old, new, words, expected, answer):
    code, text = answer(replace_once(RIGHT, old, new), "--recipe", "dapo",
                        *([words] if words else []))
    assert code == 1 and expected in text, text
    assert re.match(r"NOT PASSED: \d+ of 15 core cases of policy_loss ran, ", text), text
    assert "likely: " not in text or "numel" in new or "detach" in new or "torch.ones" in new, text
    assert ("not wrong" in text) == ("not wrong" in expected)


@pytest.mark.parametrize("words, expected", [
    (("--robust",), "WRONG  policy_loss, case clip, overflow"),
    (("--detached",), "likely: old_logps get a gradient")])
def test_robustness_and_data_decide_only_if_asked(words, expected, answer):
    assert answer(RIGHT, "--recipe", "dapo")[0] == 0
    code, text = answer(RIGHT, "--recipe", "dapo", *words)
    assert code == 1 and expected in text, text


def test_what_is_not_implemented_is_skipped_and_what_stays_at_its_default_is_told(answer):
    source = RIGHT.replace("epsilon_high):", "epsilon_high, agg='mean'):\n    if epsilon_low == "
                           "epsilon_high:\n        raise NotImplementedError(REASON)")
    for reason, shown in (("'one bound'", "one bound"), ("", "not implemented")):
        code, text = answer(source.replace("REASON", reason), "--recipe", "dapo")
        assert code == 0 and f"; 4 skipped: {shown}" in text, text
        assert "left as it is, so not checked: agg='mean'" in text


def test_a_file_that_prints_changes_torch_or_does_not_end_gets_a_verdict(answer, monkeypatch):
    prints = RIGHT.replace("m = mask", "print('a line')\n    m = mask") + "\nprint('another')\n"
    changes = f"{RIGHT}\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.half)\n"
    for source in (prints, changes):
        assert answer(source, "--recipe", "dapo") == answer(RIGHT, "--recipe", "dapo")
    timers = []                     # no second passes: the file says when its time has run out
    monkeypatch.setattr(signal, "setitimer", lambda *timer: timers.append(timer))
    ends = "signal.raise_signal(signal.SIGALRM)"
    slow = RIGHT.replace("m = mask", "m = mask\n    CALLS.append(0)\n    "
                         f"if len(CALLS) < 3: {ends}")
    code, text = answer(f"import signal\nCALLS = []\n{slow}", "--recipe", "dapo")
    assert code == 1 and "SystemExit: it takes more than 60 seconds: clip; clip, second\n" in text
    assert timers[:2] == [(signal.ITIMER_REAL, 60, 1), (signal.ITIMER_REAL, 0)]
    code, text = answer(f"import signal\n{RIGHT}\n{ends}\n", "--recipe", "dapo")
    assert code == 2 and "it takes more than 60 seconds" in text


OWN_NAMES = RIGHT.replace("logps", "policy_lp").replace("old_policy_lp", "lp_old")


@pytest.mark.parametrize("words, code, told", [
    ("lp_old=old_logps policy_lp=logps", 0, "called with policy_lp for logps, lp_old for old"),
    ("lp_old=old_logps", 2, "policy_lp: not a name of this project"),
    ("lp_old=logps policy_lp=old_logps", 1, "NOT PASSED"),
    ("lp_old=old_lp", 2, "--map lp_old=old_lp: has to be NAME=WORD"),
    ("old=old_logps", 2, "where NAME is one of policy_lp, lp_old"),
    ("lp_old=logps policy_lp=logps", 2, "WORD, once"), ("lp_old", 2, "--map lp_old: has to be")])
def test_a_user_says_what_an_argument_is(words, code, told, answer):
    pairs = [part for pair in words.split() for part in ("--map", pair)]
    for given in (pairs, ["--map", *words.split()]):
        found, text = answer(OWN_NAMES, "--recipe", "dapo", *given)
        assert found == code and told in text


def test_a_mistake_is_named_only_if_it_gives_all_wrong_answers_and_no_right_one_rules_it_out():
    def outcome(sign, errors, aim=9.0, **flags):
        return vectors.Outcome({"flags": flags, "slopes": {}}, errors, sign=sign, aim=aim)
    first = outcome(1.0, ["loss"], a=1.0, b=1.00001, c=1.0, d=1.001, no_eos="nan")
    second = outcome(3.0, ["loss"], a=7.0, b=3.0, c=3.0)
    assert command.likely([first], True) == ["a", "b", "c"]
    assert command.likely([first, second], True) == ["b", "c"]
    assert command.likely([first, second, outcome(None, [], b=2.0)], True) == ["c"]
    assert command.likely([first, outcome(None, ["Error"])], True) == []
    near = outcome(1.0, ["loss"], aim=1.000001, b=1.00001)      # it is nearer to the right answer
    assert command.likely([near], True) == []
    none = outcome(float("nan"), ["loss"], a=2.0, c="nan", no_eos=2.0)
    assert command.likely([none], True) == ["c"]                # no number shows a missing EOS
    assert command.likely([none, outcome(1.0, ["loss"], no_eos=1.0)], True) == ["no_eos"]


# ---- dtypes, conventions, files --------------------------------------------------------------

def test_a_loss_that_is_right_in_float32_alone_passes_with_a_line(answer):
    rounded = RIGHT.replace("1 + epsilon_high", "torch.tensor(1 + epsilon_high).to(logps)")
    code, text = answer(rounded, "--recipe", "dapo")
    assert code == 0 and "right in float32, but not in float64: clip; clip, second; clip-h" in text
    assert answer(rounded, "--recipe", "dapo", "--tolerance", "1e-12")[0] == 1
    code, text = answer(RIGHT.replace("return ", "return 0.01 + "), "--recipe", "dapo")
    assert code == 1 and "right in float32" not in text


def test_numpy_is_checked_without_gradients_and_conventions_are_listed(answer):
    source = """import numpy as np
def loss(rewards, eps=0, ddof=1):
    std = rewards.std(1, ddof=DDOF, keepdims=True)
    return (rewards - rewards.mean(1, keepdims=True)) / (eps + std)
"""
    code, text = answer(source.replace("DDOF", "1"), "--recipe", "grpo")
    assert code == 0 and "numpy computes no gradients: only values are checked" in text
    assert "conventions of your own: grpo, ddof 0\n" in text
    code, text = answer(source.replace("DDOF", "0"), "--recipe", "grpo")
    assert code == 1 and "each of the 7 wrong numbers is 1.155 times the right one" in text
    assert "the std divides by G instead" in text.partition("likely: ")[2]
    rough = source.replace("DDOF", "ddof + 1e-3")
    for tolerance, expected in (("0.01", 0), ("1e-6", 1)):
        words = ("advantages", "id=grpo", "method=grpo", "--tolerance", tolerance)
        assert answer(rough, *words)[0] == expected


@pytest.mark.parametrize("gamma, is_right", [("1", True), ("beta", True), ("-1", False)])
def test_a_convention_of_others_is_right_and_a_mistake_is_not(gamma, is_right, answer):
    source = "def loss(chosen, rejected, beta, gamma):\n" \
        f"    return F.softplus(gamma * {gamma} - beta * (chosen - rejected))"
    code, text = answer(source, "preference_loss", "method=simpo")
    assert (code == 0) == is_right and ("right if" in text) == (gamma == "beta")


@pytest.mark.parametrize("function, words, reply", [
    ("nothing", ["policy_loss"], "has no function nothing; it has loss"),
    ("EPS", ["policy_loss"], "has no function EPS; it has loss"),
    ("", [], "called like a file of vectors; it has loss"),
    ("loss", [], "there is no file loss"),
    ("loss", ["policy_loss", "method=group"], "it has method cispo, clip, clip_cov, dppo_kl"),
    ("loss", ["policy_loss", "method=clip", "cap=off"], "cap=off: must be a number, True, False"),
    ("exits", ["policy_loss"], 'it exits (SystemExit: 0). Put what it runs under if __name__ == '),
    ("broken", ["policy_loss"], "ZeroDivisionError")])
def test_what_cannot_be_called_is_told_in_a_line(function, words, reply, answer):
    source = RIGHT.replace("epsilon_high):", "epsilon_high, cap=None):", 1)
    end = {"broken": "1 / 0", "exits": "raise SystemExit(0)"}.get(function, "")
    code, text = answer(f"{source}\nEPS = 1\n{end}", *words, function=function)
    assert code == 2 and reply in text and text.startswith("error: ") and text.count("\n") == 1


@pytest.mark.parametrize("target, recipe", [
    ("nano.py:surrogate_loss", "grpo"), ("real.py:surrogate_loss", "grpo"),
    ("grpo.py:policy_loss", "dapo"), ("gspo.py:policy_loss", "gspo"),
    ("reinforce.py:policy_loss", "rloo"), ("dpo.py:dpo_loss", "dpo")])
def test_our_own_losses_pass_the_command(target, recipe, capsys):
    if target.startswith("real"):
        pytest.importorskip("transformers", reason="needs engines/requirements.txt")
    words = ["--recipe", recipe, *["--advantages", "B1"] * target.endswith("surrogate_loss")]
    assert command.main([f"{ROOT}/{target}", *words]) == 0, capsys.readouterr().out
    if not target.endswith(("surrogate_loss", "dpo_loss")):     # whose callers detach
        assert command.main([f"{ROOT}/{target}", *words, "--detached"]) == 0
