"""Check the scripts and examples against the test vectors of vectors/, in float64 and in float32,
and test the command that does this for everybody's functions."""
import importlib
import inspect
import re
import sys
import textwrap

import pytest
import strangers
import torch
from conftest import ROOT
from small_vectors import OURS

import vectors
from learn.path import rungs
from vectors import __main__ as command
from vectors.edits import parse, replace_once

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

@pytest.mark.parametrize("file", FILES)
def test_the_stored_answers_are_those_of_the_reference_and_flags_have_sentences(file):
    content = FILES[file]
    pytest.importorskip("mpmath")
    fill = importlib.import_module("vectors.fill")
    for case in content["cases"]:
        signs = [*map(vectors.weighted, case["right"].values()),
                 vectors.slope_sign(case.get("gradient", {}))]
        assert fill.signs(content, case, fill.reference) == pytest.approx(signs, 1e-9, 1e-12)
        if len(content["cases"]) < 6:
            assert all(case[key] == x for key, x in fill.filled(file, content, case).items())
    ids = [case["id"] for case in content["cases"]]
    assert len(set(ids)) == len(ids) and content["version"] in (1, 2, 3)
    numbers = [pair for case in content["cases"] for kind in ("flags", "slopes")
               for pair in case[kind].items()]
    shown = {flag for flag, number in numbers if number is not None}
    assert dict(numbers).keys() == shown == content["mistakes"].keys()  # so each can be named


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    """answer(source, function, *words): run the command on a function, or on all, of a module with
    this source. -> code, output"""
    def run(source, function, *words):
        name = f"{tmp_path.name}_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        try:
            code = command.main([f"{name}:{function}" if function else name, *words])
        except SystemExit as end:
            code = end.code
        return code, "".join(capsys.readouterr())
    return run


PAGE = (ROOT / "docs/vectors.md").read_text()
TRL = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]      # the loss of its documentation
RIGHT = """
from torch.nn import functional as F
from torch import exp, min, where

def grpo_loss(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    A = advantages.view(len(mask), -1)
    ratio = exp(where(mask > 0, logps - old_logps.detach(), 0).clamp(max=80))
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -(min(ratio * A, clipped * A) * mask).sum() / mask.sum()
"""
NUMPY = """
import numpy as np
def advantages(rewards, method, eps=0, ddof=1):
    if method != "grpo":
        raise NotImplementedError("only grpo")
    std = rewards.std(1, ddof=DDOF, keepdims=True)
    return (rewards - rewards.mean(1, keepdims=True)) / (eps + std)
"""


def test_the_page_shows_what_the_command_prints(answer):
    right, wrong = re.findall(r"prints:\n\n```\n(.*?)```", PAGE, re.S)
    assert answer(TRL, "grpo_loss", "--recipe", "dapo") == (0, right)
    code, text = answer(TRL.replace("torch.min", "torch.max"), "grpo_loss", "--recipe", "dapo")
    assert code == 1 and all(part in text for part in wrong.split("...\n"))
    assert text.count("likely: ") == 1


@pytest.mark.parametrize("old, new, words", [
    ("mask.sum()", "mask.numel()", "each of the 7 wrong numbers is 0.55 times the right one"),
    ("exp(logps", "exp(logps.detach()", "no gradient arrives there"),
    ("return ", "return 0.1 + ", "its gradient is not wrong"),
    ("-(", "torch.stack([-(", "has the shape (3,), should have ()"),
    ("A = ", "A = nothing", "WRONG  policy_loss, clip: NameError")])
def test_it_is_told_how_a_wrong_loss_differs(old, new, words, answer):
    source = TRL.replace(old, new)
    if "stack" in new:
        source += "] * 3)"
    code, text = answer(source, "grpo_loss", "--recipe", "dapo", "id=clip")
    assert code == 1 and words in text and "policy_loss: right: 0 of 1\n" in text
    assert ("not wrong" in text) == ("not wrong" in words)


def test_a_loss_that_no_mistake_explains_gets_no_names(answer):
    assert answer(RIGHT, "grpo_loss", "--recipe", "dapo")[0] == 0
    other = RIGHT.replace("return ", "return 0.123 + 0.7 * ")
    code, text = answer(other, "grpo_loss", "--recipe", "dapo")
    assert code == 1 and "likely: " not in text


def test_a_recipe_of_few_cases_is_not_passed(answer):
    code, text = answer(RIGHT, "grpo_loss", "--recipe", "dapo", "id=clip, first step")
    assert code == 1 and "they cannot tell if the ratio is not clipped" in text


def test_a_function_gets_float32_if_asked_for(answer):
    source = ("import torch\ndef advantages(rewards):\n    assert rewards.dtype == torch.float32\n"
              "    return rewards - rewards.mean(1, keepdim=True)")
    assert answer(source, "advantages", "--recipe", "dr_grpo", "--float32")[0] == 0


@pytest.mark.parametrize("words, reply", [
    (("nothing", "policy_loss"), "has no function nothing; it has grpo_loss"),
    (("EPS", "policy_loss"), "has no function EPS; it has grpo_loss"),
    (("",), "called like a file of vectors; it has grpo_loss"),
    (("grpo_loss",), "there is no file grpo_loss"),
    (("grpo_loss", "policy_loss", "method=group"), "it has method cispo, clip, clip_cov, dppo_kl"),
    (("broken", "policy_loss"), "ZeroDivisionError")])
def test_what_cannot_be_called_is_told_in_a_line(words, reply, answer):
    code, text = answer(RIGHT + "EPS = 1 / " + "01"["broken" not in words], *words)
    assert code == 2 and reply in text and text.startswith("error: ") and text.count("\n") == 1


@pytest.mark.parametrize("word, reply", [
    ("clip=false", "error: clip=false: must be True or False\n"),
    ("slope=high", "error: slope=high: must be a number\n"),
    ("cap=off", "error: cap=off: must be a number, True, False or None\n")])
def test_a_text_for_a_setting_that_is_none_is_refused(word, reply, answer):
    """Any text counts as true, so clip=false would leave the clip on."""
    source = RIGHT.replace("epsilon_high):", "epsilon_high, clip=True, slope=0.0, cap=None):", 1)
    assert answer(source, "grpo_loss", "policy_loss", "method=clip", word) == (2, reply)
    assert answer(source, "grpo_loss", "policy_loss", "method=clip", "clip=True")[0] == 0


METHOD = TRL.replace("\n    ", "\n        ").replace(
    "def grpo_loss(", "class Loss(torch.nn.Module):\n  def forward(self, ") + "\nloss = Loss()"


@pytest.mark.parametrize("source, function, call", [
    (METHOD.replace("old_logps", "before"), "loss", "loss.forward(logps=logps, before=old_logps,"),
    (METHOD.replace("class Loss(torch.nn.Module):", "class Loss(torch.nn.Module):\n"
                    "  def __init__(self, cfg): self.cfg = cfg").partition("\nloss =")[0], "Loss",
     "Loss(cfg=...).forward(logps=logps, old_logps=old_logps, advantages=advantages, mask=mask,"),
    (TRL.replace("advantages", "before"), "grpo_loss", "old_logps=old_logps, before=advantages, m"),
    (TRL.replace("old_logps", "prior").replace("mask", "keep"), "grpo_loss",
     "prior=old_logps, advantages=advantages, keep=mask"),
    (TRL.replace("old_logps", "prior").replace("mask", "how_many").replace(
        "torch.min", "0.7 * torch.min"), "grpo_loss",
     "prior=..., advantages=advantages, how_many=..."),
    (re.sub("epsilon_(low|high)", r"\1", TRL).replace("logps, old_logps, advantages, mask,",
     "y, x, w, v,").replace("logps - old_logps", "x - y").replace("advantages", "w").replace(
         "mask", "v"), "grpo_loss", "y=old_logps, x=logps, w=advantages, v=mask, low=epsilon_low"),
    (TRL.replace("high)", "high, *, temp)", 1), "grpo_loss", "temp=...)")])
def test_what_does_not_fit_gets_an_adapter_that_is_right_or_has_gaps(
        source, function, call, answer):
    code, text = answer(source, function, "--recipe", "dapo")
    assert code == 2 and "    def adapted(logps, old_logps, advantages, mask, epsilon_low" in text
    assert call in text and ("This adapter is right" in text) == ("..." not in call)
    if "..." not in call:
        code, text = answer(textwrap.dedent(text.partition("\n\n")[2]), "adapted",
                            "--recipe", "dapo")
        assert code == 0, text


@pytest.mark.parametrize("function", ["Loss", "Loss.forward", "loss"])
def test_a_class_is_made_with_the_parameters_that_it_takes(function, answer):
    source = METHOD.replace("class Loss(torch.nn.Module):", "class Loss(torch.nn.Module):\n"
                            "  def __init__(self, clip_high=0.28):\n"
                            "    super().__init__()\n    self.high = clip_high").replace(
        ", epsilon_high)", ")", 1).replace("1 + epsilon_high", "1 + self.high")
    code, text = answer(source, function, "--recipe", "dapo")
    assert code == 0, text
    assert ("checked where epsilon_high is 0.28" in text) == (function == "loss")


def test_without_a_function_all_that_are_called_like_a_file_are_checked(answer):
    source = RIGHT.replace("grpo_loss", "policy_loss") + \
        "def has_signal(rewards):\n    return (rewards != rewards[:, :1]).any(1, keepdim=True)\n"
    code, text = answer(source, "")
    assert code == 0 and "has_signal: right: " in text
    assert "checked where how is token_mean, method is clip, as in the function" in text
    code, text = answer(source + "def preferences(rewards):\n    return 0 * rewards\n", "")
    assert code == 1 and "preferences: right: 0 of 2" in text


def test_a_loss_without_a_method_is_that_of_which_all_cases_are_right(answer):
    code, told = answer(RIGHT, "grpo_loss", "policy_loss", "how=token_mean")
    assert code == 0 and "checked where method is clip" in told, told
    decoupled = RIGHT.replace("old_logps, ", "old_logps, proximal_logps, ", 1).replace(
        "old_logps.detach()", "proximal_logps.detach()").replace(
        "-(min(", "-((proximal_logps - old_logps).exp() * min(")
    code, told = answer(decoupled, "grpo_loss", "policy_loss", "how=token_mean")
    assert code == 2 and "This adapter is right" in told and "method=clip" in told, told
    words = told.partition("adapter.py:adapted ")[2].partition("\n")[0].split()
    code, again = answer(textwrap.dedent(told.partition("\n\n")[2]), "adapted", *words)
    assert code == 0, again
    code, told = answer(RIGHT.replace("min(", "0.7 * min("), "grpo_loss", "policy_loss",
                        "how=token_mean")
    assert code == 1 and "choose one, which the function need not take: method=" in told, told


def test_without_a_file_the_files_of_vectors_are_listed(capsys):
    assert command.main([]) == command.main(["method=clip"]) == 0
    assert capsys.readouterr().out.count("Compute the loss of tokens with given") == 2


def test_a_function_may_change_its_inputs_and_free_what_it_keeps(answer):
    source = """
import torch
class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tokens):
        logps = x.log_softmax(dim=-1)
        ctx.save_for_backward(logps.exp(), tokens.clone())
        return logps.gather(-1, tokens[..., None])[..., 0], -(logps.exp() * logps).sum(dim=-1)
    @staticmethod
    def backward(ctx, slope, slope_entropy):
        p, tokens = ctx.saved_tensors
        H = -(p * p.log()).sum(dim=-1, keepdim=True)
        moved = slope[..., None] * (torch.nn.functional.one_hot(tokens, p.shape[-1]) - p)
        moved -= slope_entropy[..., None] * p * (p.log() + H)
        p.zero_()
        return moved, None
def logprobs(logits, tokens, temperature):
    found = Kept.apply(logits / temperature, tokens)
    tokens.zero_()
    return found
"""
    code, text = answer(source, "logprobs")
    assert code == 0 and "logprobs: right: 1 of 1; not robust: impossible tokens" in text
    text = answer(source.replace("return logps", "return 2 * logps"), "logprobs")[1]
    assert re.search(r"made from logits \[[^[]*\], tokens", text)      # of one token


@pytest.mark.parametrize("gamma, is_right", [("1", True), ("beta", True), ("-1", False)])
def test_a_convention_of_others_is_right_and_a_mistake_is_not(gamma, is_right, answer):
    source = "import torch\ndef preference_loss(chosen, rejected, beta, gamma, method):\n" \
        f"    return torch.nn.functional.softplus(gamma * {gamma} - beta * (chosen - rejected))"
    code, text = answer(source, "preference_loss", "method=simpo")
    assert (code == 0) == is_right and ("right if" in text) == (gamma == "beta")


def test_numpy_is_checked_without_gradients_and_a_convention_is_listed(answer):
    assert answer(NUMPY.replace("DDOF", "ddof"), "advantages", "--float32", "id=mean")[0] == 1
    code, text = answer(NUMPY.replace("DDOF", "ddof"), "advantages", "id=grpo")
    assert code == 0 and text.startswith("advantages: right: 1 of 1\nnumpy computes no gradients")
    code, text = answer(NUMPY.replace("DDOF", "0"), "advantages")
    assert code == 1 and "each of the 7 wrong numbers is 1.155 times the right one" in text
    assert "the std divides by G instead" in text.partition("likely: ")[2]
    assert "skipped: only grpo" in text and "sq_grad_norms" not in text
    text = answer(NUMPY.replace("DDOF", "1"), "advantages", "--recipe", "grpo")[1]
    assert "advantages: right: 7 of 7; conventions of your own: ddof 0" in text
    rough = NUMPY.replace("DDOF", "ddof + 1e-3")
    for tolerance, expected in (("0.01", 0), ("1e-6", 1)):
        code, _ = answer(rough, "advantages", "--tolerance", tolerance, "id=grpo")
        assert code == expected


def test_a_std_that_divides_by_all_is_a_convention_of_a_function_that_is_not_told(answer):
    """Reports of GRPO do not say which; numpy's std divides by G."""
    source = NUMPY.replace("ddof=DDOF, ", "").replace(", ddof=1", "")
    code, told = answer(source, "advantages", "--recipe", "grpo")
    assert code == 0 and "right if the std divides by G, as numpy's does" in told, told
    code, told = answer(source.replace("rewards.std(", "rewards.var("), "advantages", "--recipe",
                        "grpo")
    assert code == 1, told


def test_what_is_not_implemented_is_counted_apart_even_without_a_message(answer):
    source = NUMPY.replace("DDOF", "ddof")
    code, text = answer(source, "advantages")
    bare = source.replace('NotImplementedError("only grpo")', "NotImplementedError")
    assert "only grpo" in text
    assert answer(bare, "advantages") == (code, text.replace("only grpo", "not implemented"))


def test_a_file_is_imported_even_if_a_module_of_python_has_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text("def mine(): ...")
    module, found = command.loaded(f"{tmp_path}/colorsys.py:mine")
    del sys.modules["colorsys"]
    assert module.__file__ == str(tmp_path / "colorsys.py") and [*found] == ["mine"]


@pytest.mark.parametrize("value, words", [
    ('{"ratio": 1.0, "clip_frac": 7.0}', "there is no loss in what it returned: the keys ratio, c"),
    ("()", "there is no loss in what it returned: 0 values"),
    ("None", "there is no loss in what it returned: None"),
    ('{"policy_loss": torch.tensor(123.0), "loss_std": 0}', "loss is 123, should be"),
    ('{"kl_loss": torch.tensor(0.5)}', "there is no loss in what it returned: the keys kl_loss")])
def test_a_loss_that_is_not_returned_is_wrong(value, words, answer):
    code, text = answer(TRL.replace("return ", f"return {value}\n    "), "grpo_loss",
                        "--recipe", "dapo")
    assert code == 1 and words in text and "policy_loss: right: 0 of 5" in text


def test_results_that_are_not_returned_are_listed(answer):
    source = ("import torch\ndef completion_mask(tokens, eos):\n    end = torch.isin(tokens, eos)\n"
              "    return {'mask': end.cumsum(1) - end.int() < 1}")
    code, text = answer(source, "completion_mask", "--tolerance", "0")
    assert code == 0 and "not returned, so not checked: truncated: one end, two ends" in text


COLUMNS = TRL.replace(".unsqueeze(1)", "")


def test_the_first_line_tells_which_shape_is_right_and_what_happens_with_the_other(answer):
    for words in (("--recipe", "dapo"), ("policy_loss", "method=clip", "how=token_mean")):
        code, text = answer(COLUMNS, "grpo_loss", *words)
        assert code == 0 and text.startswith(
            "more cases are right with advantages of the shape (B, 1); with the shape (B,), "
            "RuntimeError: The size of tensor a (5) must match the size of tensor b (4)")
        assert text.partition("\n")[0].endswith("and if B = T, it is wrong without an error")
    guarded = COLUMNS.replace("    A =", "    assert advantages.ndim == 2\n    A =")
    code, text = answer(guarded, "grpo_loss", "--recipe", "dapo")
    assert code == 0 and "with the shape (B,), AssertionError: assert 1 == 2\n" in text
    wrong = COLUMNS.replace("torch.min", "torch.max")
    code, text = answer(wrong, "grpo_loss", "--recipe", "dapo")
    assert code == 1 and text.startswith("more cases") and "likely: the clip takes the max" in text
    code, text = answer(COLUMNS.replace("return -", "return 0.5 + -"), "grpo_loss", "id=clip",
                        "--recipe", "dapo")
    assert code == 1 and not text.startswith("more cases")


def test_a_loss_that_is_right_in_float32_alone_passes_with_a_line(answer):
    rounded = TRL.replace("1 + epsilon_high", "torch.tensor(1 + epsilon_high).to(logps)")
    code, text = answer(rounded, "grpo_loss", "--recipe", "dapo")
    assert code == 0 and "right in float32, but not in float64: clip, clip, second, clip-h" in text
    assert answer(rounded, "grpo_loss", "--recipe", "dapo", "--tolerance", "1e-12")[0] == 1
    code, text = answer(TRL.replace("return -", "return 1e-4 + -"), "grpo_loss", "--recipe", "dapo")
    assert code == 1 and "right in float32" not in text


def test_a_bare_notimplementederror_skips_a_case(answer):
    lacks = TRL.replace("    A =", "    if epsilon_low == epsilon_high:\n"
                        "        raise NotImplementedError\n    A =")
    code, text = answer(lacks, "grpo_loss", "--recipe", "dapo")
    assert code == 0 and "  7 skipped: not implemented" in text


# ---- what strangers write --------------------------------------------------------------------

LOSSES = [name for name, one in vars(strangers).items() if hasattr(one, "recipe")]


@pytest.mark.parametrize("name", LOSSES)
def test_a_right_loss_of_a_stranger_passes(name, capsys):
    words = [f"{ROOT}/tests/strangers.py:{name}", "--recipe", getattr(strangers, name).recipe]
    assert command.main(words) == 0
    assert "likely: " not in capsys.readouterr().out


@pytest.mark.parametrize("mistake, function, old, new", strangers.MISTAKES)
def test_the_mistake_of_a_stranger_is_named(mistake, function, old, new, answer):
    _, _, source = inspect.getsource(function).partition("\n")          # without its decorator
    source = ("import torch\nimport torch.nn.functional as F\n"
              "from strangers import of_tokens, with_kl\n" + replace_once(source, old, new))
    code, text = answer(source, function.__name__, "--recipe", function.recipe)
    names = re.findall(r"likely: (.*?) \(this gives all", text)
    meant = {one["mistakes"].get(mistake) for one in FILES.values()}
    assert code == 1 and meant & {*names}, text


@pytest.mark.parametrize("target, recipe", [
    ("nano.py:surrogate_loss", "grpo"), ("real.py:surrogate_loss", "grpo"),
    ("grpo.py:policy_loss", "grpo"), ("grpo.py:policy_loss", "dapo"),
    ("grpo.py:policy_loss", "dr_grpo"), ("gspo.py:policy_loss", "gspo"),
    ("ppo.py:policy_loss", "ppo"), ("reinforce.py:policy_loss", "rloo"),
    ("grpo.py:advantages", "grpo"), ("dpo.py:dpo_loss", "dpo")])
def test_our_own_losses_pass_the_command(target, recipe, capsys):
    if target.startswith("real"):
        pytest.importorskip("transformers", reason="needs engines/requirements.txt")
    assert command.main([f"{ROOT}/{target}", "--recipe", recipe]) == 0, capsys.readouterr().out
    if not target.endswith(("surrogate_loss", "dpo_loss")):     # whose callers detach
        assert command.main([f"{ROOT}/{target}", "--recipe", recipe, "--detached"]) == 0


NANO = (ROOT / "nano.py").read_text("utf-8")
SOLUTIONS = [
    one.apply(NANO) for one in parse((ROOT / "tests/solutions.txt").read_text("utf-8"))
    if one.file == "nano.py" and one.words == "right" and "clamp" in one.hunks[0][0]]


@pytest.mark.parametrize("source, recipe", [
    (rungs.script("mean"), "grpo"), (rungs.script("gspo"), "gspo"),
    *((source, "grpo") for source in SOLUTIONS)], ids=range(2 + len(SOLUTIONS)))
def test_the_rungs_of_the_path_and_right_solutions_pass_the_command(source, recipe, answer):
    code, text = answer(source, "surrogate_loss", "--recipe", recipe)
    assert code == 0, text


JAX = """
import jax.numpy as np

def grpo_loss(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    ratio = np.exp(logps - old_logps)
    A = advantages[:, None]
    x = np.minimum(ratio * A, np.clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * A)
    return -((x * mask).sum(1) / mask.sum(1)).mean()
"""


def test_a_loss_in_jax_is_checked_with_its_gradient(answer):
    pytest.importorskip("jax", reason="jax is not installed")
    assert answer(JAX, "grpo_loss", "--recipe", "grpo")[0] == 0
    code, text = answer(JAX.replace("minimum", "maximum"), "grpo_loss", "--recipe", "grpo")
    assert code == 1 and "likely: the clip takes the max" in text


@pytest.mark.parametrize("flag, words", [
    ("--robust", "WRONG  policy_loss, case clip, overflow"),
    ("--detached", "likely: old_logps get a gradient")])
def test_robustness_and_data_decide_only_if_asked(flag, words, answer):
    assert answer(TRL, "grpo_loss", "--recipe", "dapo")[0] == 0
    code, text = answer(TRL, "grpo_loss", "--recipe", "dapo", flag)
    assert code == 1 and words in text


def test_the_word_detach_in_a_text_decides_nothing(answer):
    metric = TRL.replace("    return ", "    kl = (logps - old_logps).detach().mean()\n    return ")
    code, text = answer(metric, "grpo_loss", "--recipe", "dapo")
    assert code == 0 and "old_logps: your caller has to detach" in text


def test_a_loss_is_told_for_which_other_recipe_it_is_right(answer):
    outputs = RIGHT.replace("return -(min", "return -((min").replace(
        ".sum() / mask.sum()", ".sum(1) / mask.sum(1)).mean()")
    for recipe, other in (("dapo", "grpo"), ("gspo", "grpo")):
        code, text = answer(outputs, "grpo_loss", "--recipe", recipe)
        assert code == 1 and f"or it is meant as the loss of {other} (--recipe {other} is" in text


def test_one_epsilon_serves_for_equal_bounds_alone_and_too_few_numbers_are_wrong(answer):
    one = TRL.replace("epsilon_low, epsilon_high):", "clip_eps):").replace(
        "1 - epsilon_low, 1 + epsilon_high", "1 - clip_eps, 1 + clip_eps")
    code, text = answer(one, "grpo_loss", "--recipe", "dapo")
    assert code == 0 and "called with clip_eps for epsilon_low" in text
    assert "2 skipped: the function does not take epsilon_high" in text
    few = "import torch\ndef advantages(rewards):\n    return rewards[:1] - rewards[:1].mean()"
    code, text = answer(few, "advantages", "--recipe", "dr_grpo")
    assert code == 1 and "advantages has the shape (1, 4), should have (3, 4)" in text


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


# ---- losses of strangers that the command once misread ---------------------------------------

ROW = """
    ratio = torch.exp({new} - {old})
    A = {A}[:, None]
    x = -torch.min(ratio * A, ratio.clamp(1 - {low}, 1 + {high}) * A)
"""
BOXED = f"""
import types
import torch
def loss(logps, old_logps, advantages, mask, clip_low, clip_high):{ROW.format(
    new="logps", old="old_logps", A="advantages", low="clip_low", high="clip_high")}
    return types.SimpleNamespace(policy_loss=(x * mask).sum() / mask.sum(), entropy=None)
"""
IN_KWARGS = f"""
import torch
def loss(logps, **batch):{ROW.format(
    new="logps", old='batch["old_logps"]', A='batch["advantages"]', low='batch["epsilon_low"]',
    high='batch["epsilon_high"]')}
    if "beta" in batch:
        d = batch["ref_logps"] - logps
        x = x + batch["beta"] * (d.exp() - d - 1)
    mask = batch["mask"]
    return ((x * mask).sum(1) / mask.sum(1)).mean()
"""
GROUPS = """
def advantages_of(group_rewards, eps):
    std = group_rewards.std(dim=1, keepdim=True)
    return (group_rewards - group_rewards.mean(dim=1, keepdim=True)) / (std + eps)
"""
CRITIC = """
import torch
def critic(vpreds, returns, values, response_mask, cliprange_value):
    cut = torch.max(torch.min(vpreds, values + cliprange_value), values - cliprange_value)
    x = torch.max((vpreds - returns) ** 2, (cut - returns) ** 2)
    return 0.5 * (x * response_mask).sum() / response_mask.sum()
"""
OWN_EPS = f"""
import torch
def step(rewards, logps, old_logps, mask, eps_low, eps_high):
    centered = rewards - rewards.mean(1, keepdim=True)
    advantages = (centered / (rewards.std(1, keepdim=True) + 1e-4)).flatten(){ROW.format(
    new="logps", old="old_logps", A="advantages", low="eps_low", high="eps_high")}
    return ((x * mask).sum(1) / mask.sum(1)).mean()
"""


@pytest.mark.parametrize("source, function, words", [
    (BOXED, "loss", ["--recipe", "dapo"]), (IN_KWARGS, "loss", ["--recipe", "grpo"]),
    (GROUPS, "advantages_of", ["--recipe", "grpo"]), (CRITIC, "critic", ["value_loss"]),
    (OWN_EPS, "step", ["--recipe", "grpo"])],
    ids=["an object", "kwargs", "group_rewards", "values of the rollout", "own eps"])
def test_a_right_loss_passes_whatever_its_words_and_its_results(source, function, words, answer):
    code, told = answer(source, function, *words)
    assert code == 0, told


@pytest.mark.parametrize("eps", ["1e-6", "1e-8"])
@pytest.mark.parametrize("high", ["eps_high", "eps_low"])
def test_a_step_may_have_its_own_small_number_beside_the_std(eps, high, answer):
    source = OWN_EPS.replace("1e-4", eps).replace("1 + eps_high", f"1 + {high}")
    source = source.replace(", eps_high", "" if high == "eps_low" else ", eps_high")
    code, told = answer(source, "step", "--recipe", "grpo")
    assert code == 0 and f"checked where eps is {float(eps)}" in told, told


def test_a_loss_with_bounds_that_no_case_has_is_told_which_the_cases_have(answer):
    source = form(arguments="logprobs, old_logprobs, advantages, mask").replace(
        "1 - clip_eps, 1 + clip_eps", "1 - LOW, 1 + HIGH")
    of_outputs = source.replace("logprobs - old_logprobs", "((logprobs - old_logprobs) * mask).sum("
                                "1, keepdim=True) / mask.sum(1, keepdim=True)")
    code, told = answer(f"LOW, HIGH = 3e-4, 4e-4{of_outputs}", "loss", "--recipe", "gspo")
    assert code == 0 and "right: 2 of 2" in told, told
    code, told = answer(f"LOW, HIGH = 0.2, 0.25{source}", "loss", "--recipe", "grpo")
    assert code == 2 and "The cases have epsilon_high 0.2, 0.28; epsilon_low 0.2, and it is" in told
    assert "adapter" not in told


def test_a_mistake_is_named_although_a_constant_is_not_a_parameter(answer):
    """The eps of the advantages is 1e-4 in the function, and the rewards are transposed."""
    code, told = answer(replace_once(OWN_EPS, ".flatten()", ".t().flatten()"), "step",
                        "--recipe", "grpo")
    assert code == 1 and "likely: advantages are given to other outputs" in told, told
    assert "checked where eps is 0.0001" in told, told


def test_a_mistake_is_named_of_a_ppo_that_takes_advantages_of_outputs_alone(answer):
    source = replace_once(BOXED, "torch.min(", "torch.max(")
    code, told = answer(source, "loss", "--recipe", "ppo")
    assert code == 1 and "takes the max instead of the min" in told, told


# ---- arguments in another form ---------------------------------------------------------------

FORM = """
import torch
def loss({arguments}):
    {mask}
    ratio = torch.exp({log_ratio})
    A = advantages.view(-1, 1)
    x = -torch.min(ratio * A, ratio.clamp(1 - clip_eps, 1 + clip_eps) * A)
    return ((x * mask).sum(1) / mask.sum(1)).mean()
"""
PLAIN = {"arguments": "logprobs, old_logprobs, advantages, mask, clip_eps", "mask": "",
         "log_ratio": "logprobs - old_logprobs"}


def form(mask="", name="mask", **parts):
    """Write FORM with another mask or another argument."""
    arguments = PLAIN["arguments"].replace("mask", name)
    return FORM.format(**PLAIN | {"arguments": arguments, "mask": mask} | parts)


ROWS = """
import torch
def loss(logprobs, old_logprobs, advantages, cu_seqlens, clip_eps):
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    A = torch.repeat_interleave(advantages, lengths)
    ratio = torch.exp(logprobs - old_logprobs)
    x = -torch.min(ratio * A, ratio.clamp(1 - clip_eps, 1 + clip_eps) * A)
    return torch.stack([x.mean() for x in x.split(lengths.tolist())]).mean()
"""
SLOTS = """
import torch
def loss(logprobs, old_logprobs, advantages, loss_mask, cu_seqlens, clip_eps):
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    A = torch.cat([A.expand(n) for A, n in zip(advantages, lengths)])
    ratio = torch.exp(logprobs - old_logprobs)
    x = -torch.min(ratio * A, ratio.clamp(1 - clip_eps, 1 + clip_eps) * A) * loss_mask
    return torch.stack([x.sum() / mask.sum() for x, mask in zip(
        x.split(lengths), loss_mask.split(lengths))]).mean()
"""
TOKENS = """
import torch
def loss(newlogprob, mb_logprobs, mb_advantages, args):
    A = mb_advantages
    if args.norm_adv:
        A = (A - A.mean()) / (A.std() + 1e-8)
    ratio = (newlogprob - mb_logprobs).exp()
    return torch.max(-A * ratio, -A * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
"""
SEGMENTS = """
import torch
def loss(tok_logps, seq_ids, seq_adv):
    sums = torch.zeros_like(seq_adv).index_add(0, seq_ids, tok_logps)
    return -(seq_adv * sums).mean()
"""
BATCHES = """
import torch
def loss(policy_inputs, reference_inputs, beta):
    w = policy_inputs.chosen_logps - reference_inputs.chosen_logps
    margin = w - policy_inputs.rejected_logps + reference_inputs.rejected_logps
    return torch.nn.functional.softplus(-beta * margin).mean()
"""
CONFIG = """
import dataclasses, typing, torch
@dataclasses.dataclass
class Config:
    low: float = 0.2
    loss_type: str = "grpo"
    use_kl: bool = False
    kl_coef: float = 0.001
class Clip(typing.NamedTuple):
    low: float = 0.2
    high: float = 0.2
def loss(logps, batch, cfg: typing.Optional[Config] = None, clip: Clip = Clip()):
    cfg = Config() if cfg is None else cfg
    ratio = (logps - batch["old_logps"]).exp()
    A, mask = batch["advantages"][:, None], batch["mask"]
    x = -torch.min(ratio * A, ratio.clamp(1 - clip.low, 1 + clip.high) * A)
    if cfg.use_kl:
        d = batch["ref_logps"] - logps
        x = x + cfg.kl_coef * (d.exp() - d - 1)
    if cfg.loss_type == "grpo":
        return ((x * mask).sum(1) / mask.sum(1)).mean()
    return (x * mask).sum() / mask.sum()
"""
PLACES = """
import torch
def loss(pi_logps, ref_logps, yw_idxs, yl_idxs, beta):
    margin = pi_logps[yw_idxs] - pi_logps[yl_idxs] - ref_logps[yw_idxs] + ref_logps[yl_idxs]
    return torch.nn.functional.softplus(-beta * margin)
"""
STEP = """
import torch
def loss(policy_logps, behavior_logps, rewards, is_pad, n_rollouts, eps_l=0.2, eps_r=0.2):
    r = rewards.view(-1, n_rollouts)
    A = (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)
    ratio, A = (policy_logps - behavior_logps).exp(), A.view(-1, 1)
    x = -torch.min(ratio * A, ratio.clamp(1 - eps_l, 1 + eps_r) * A).masked_fill(is_pad, 0)
    return (x.sum(1) / (~is_pad).sum(1)).mean()
"""
OUTPUTS = """
import torch
def loss(logprobs, old_logprobs, advantages, clip_eps):
    x = []
    for new, old, A in zip(logprobs, old_logprobs, advantages):
        ratio = torch.exp(new - old)
        x.append(-torch.min(ratio * A, ratio.clamp(1 - clip_eps, 1 + clip_eps) * A).mean())
    return torch.stack(x).mean()
"""
HALVES = """
import torch
def loss(all_logps, all_ref_logps, beta):
    new, ref = all_logps.chunk(2), all_ref_logps.chunk(2)
    margin = new[0] - ref[0] - new[1] + ref[1]
    return torch.nn.functional.softplus(-beta * margin).mean()
"""
TURNS = """
import torch
def loss(next_token_logprobs, reference_logprobs, token_mask, beta):
    x = ((next_token_logprobs - reference_logprobs) * token_mask).sum(1)
    return torch.nn.functional.softplus(-beta * (x[::2] - x[1::2])).mean()
"""
FROM_LOGITS = form(
    "mask = labels != -100", arguments="logits, labels, old_logprobs, advantages, clip_eps",
    log_ratio="torch.where(mask, logits.log_softmax(-1).gather(-1, (labels * mask)[..., None])"
              "[..., 0] - old_logprobs, 0)")
IN_NUMPY = """
import numpy as np
def loss(logprobs, old_logprobs, advantages, mask, width):
    ratio = np.exp(logprobs - old_logprobs)
    A = advantages[:, None]
    x = -np.minimum(ratio * A, ratio.clip(1 - width, 1 + width) * A)
    return ((x * mask).sum(1) / np.maximum(mask.sum(1), 1)).mean()
"""
SUMS = """
def loss(advantage, log_likelihood):
    return -(advantage * log_likelihood).mean()
"""
OF_PAIR_LOGITS = """
import torch
def sum_of(logits, labels):
    labels = labels[:, 1:]
    mask = labels != -100
    logps = logits[:, :-1].log_softmax(-1).gather(-1, (labels * mask)[..., None])[..., 0]
    return (logps * mask).sum(1)
def loss(chosen_logits, rejected_logits, ref_chosen_logits, ref_rejected_logits, chosen_labels,
         rejected_labels, beta):
    good = sum_of(chosen_logits, chosen_labels) - sum_of(ref_chosen_logits, chosen_labels)
    bad = sum_of(rejected_logits, rejected_labels) - sum_of(ref_rejected_logits, rejected_labels)
    return torch.nn.functional.softplus(-beta * (good - bad)).mean()
"""
BESIDE_LOGITS = form(
    'advantages, mask = batch["advantages"], batch["loss_mask"]',
    arguments="logits, batch, clip_eps",
    log_ratio='logits.log_softmax(-1).gather(-1, batch["input_ids"].roll(-1, 1)[..., None])[..., 0]'
              ' - batch["logprobs"]')
WITH_PROMPT = """
import torch
def loss(logprobs, batch, cfg):
    old, A, mask = batch["prev_logprobs"][:, 1:], batch["advantages"][:, 1:], batch["mask"][:, 1:]
    d = batch["reference_logprobs"][:, 1:] - logprobs
    ratio = (logprobs - old).exp()
    x = -torch.min(ratio * A, ratio.clamp(1 - cfg["clip_low"], 1 + cfg["clip_high"]) * A)
    x = x + cfg["kl_penalty"] * (d.exp() - d - 1)
    if cfg["token_level"]:
        return (x * mask).sum() / mask.sum()
    means = (x * mask).sum(1) / mask.sum(1)
    return (means * batch["sample_mask"]).sum() / batch["sample_mask"].sum()
"""
WRONG = {"torch.min(": "torch.max(", "torch.max(": "torch.min(",
         "np.minimum(": "np.maximum(", "-beta": "beta", "-(adv": "(adv", "-(seq": "(seq"}
FORMS = {
    "a padding mask": (form("mask = ~padding_mask", "padding_mask"), "padding_mask=mask == 0"),
    "a padding mask of numbers": (form("mask = 1 - pad_mask", "pad_mask"), "pad_mask=1 - mask"),
    "labels": (form("mask = labels != -100", "labels"), "labels=-100 * (mask == 0)"),
    "lengths": (form("mask = torch.arange(logprobs.shape[1]) < lengths[:, None]", "lengths"),
                "lengths=(mask > 0).sum(1)"),
    "the mask of prompts": (form("mask = 1 - prompt_mask", "prompt_mask"), "prompt_mask=1 - mask"),
    "weights": (form("mask = weights.sign()", "weights").replace(
        "((x * mask).sum(1) / mask.sum(1)).mean()", "(x * weights).sum()"),
        "weights=mask / mask.sum(1)[:, None] / len(mask)"),
    "a ratio": (form(arguments="ratio, advantages, mask, clip_eps", log_ratio="torch.log(ratio)"),
                "ratio=torch.exp(logps - old_logps)"),
    "a negative KL": (form(arguments="ppo_kl, advantages, mask, clip_eps", log_ratio="-ppo_kl"),
                      "ppo_kl=old_logps - logps"),
    "two old policies": (
        form(arguments="logprobs, proximal_logprobs, old_logprobs, advantages, mask, clip_eps",
             log_ratio="logprobs - proximal_logprobs"), "proximal_logprobs=old_logps"),
    "an entropy": (form(name="entropy, mask"), "entropy=0 * logps"),
    "logits": (FROM_LOGITS, "log1p(-torch.exp(logps))"),
    "logits of pairs": (OF_PAIR_LOGITS, "(torch.stack([ref_rejected, "),
    "old ones beside logits": (BESIDE_LOGITS, "'logprobs': old_logps"),
    "a slot of the prompt": (WITH_PROMPT, "'sample_mask': 1.0 + 0 * mask[:, 0]"),
    "the values of a critic": (form(name="values, returns, mask").replace(
        "mean()", "mean() + 0.5 * ((values - returns) ** 2 * mask).sum() / mask.sum()"),
        "returns=0 * logps"),
    "packed": (ROWS, "old_logprobs=old_logps[mask > 0]"),
    "a row of all slots": (SLOTS, "loss_mask=mask.reshape(-1)"),
    "tokens without a mask": (TOKENS, "'norm_adv': False"),
    "segments": (SEGMENTS, "tok_logps=logps[mask > 0]"),
    "places of pairs": (PLACES, "yl_idxs=torch.arange(len(chosen)) + len(chosen)"),
    "a step with its own constant": (STEP, "n_rollouts=num_generations"),
    "lists": (OUTPUTS, "old_logprobs=[x[m > 0] for x, m in zip(old_logps, mask)]"),
    "numpy": (IN_NUMPY, "import numpy as np"),
    "sums": (SUMS, "log_likelihood=(logps * mask).sum(1)"),
    "halves": (HALVES, "all_logps=torch.concatenate([chosen, rejected])"),
    "turns": (TURNS, "token_mask=torch.stack([mask_chosen, mask_rejected], 1)")}


RECIPES_OF = {"sums": "rloo", "halves": "dpo", "turns": "dpo", "places of pairs": "dpo",
              "tokens without a mask": "ppo", "segments": "rloo", "logits of pairs": "dpo"}


@pytest.mark.parametrize("name", FORMS)
def test_an_argument_in_another_form_gets_an_adapter_that_is_right(name, answer):
    source, part = FORMS[name]
    recipe = RECIPES_OF.get(name, "grpo")
    code, told = answer(source, "loss", "--recipe", recipe)
    assert code == 2 and "This adapter is right" in told and part in told, told
    code, again = answer(textwrap.dedent(told.partition("\n\n")[2]), "adapted", "--recipe", recipe)
    assert code == 0, told + again


@pytest.mark.parametrize("name", FORMS)
def test_a_wrong_loss_gets_no_adapter_that_is_right(name, answer):
    source, _ = FORMS[name]
    old = next(old for old in WRONG if old in source)
    recipe = RECIPES_OF.get(name, "grpo")
    code, told = answer(replace_once(source, old, WRONG[old]), "loss", "--recipe", recipe)
    assert code != 0 and "adapter is right" not in told, told


def test_a_wrong_loss_is_named_by_its_adapter(answer):
    source = replace_once(FORMS["labels"][0], "torch.min(", "torch.max(")
    code, told = answer(source, "loss", "--recipe", "grpo")
    assert code == 1 and "Likely, the clip takes the max instead of the min" in told, told
    code, again = answer(textwrap.dedent(told.partition("\n\n")[2]), "adapted", "--recipe", "grpo")
    assert code == 1 and "likely: the clip takes the max instead of the min" in again, told + again


@pytest.mark.parametrize("name", ["padding_masks", "keep"])
def test_an_argument_that_may_be_the_mask_is_not_left_out(name, answer):
    """Without it, tokens without padding would be right, and hide a mistake."""
    source = form(f"mask = 1 if {name} is None else {name}", f"{name}=None").replace(
        f"{name}=None, clip_eps", f"clip_eps, {name}=None").replace(
        "((x * mask).sum(1) / mask.sum(1)).mean()", "(x * mask).sum() / torch.sum(mask)")
    code, told = answer(source, "loss", "--recipe", "dapo", "clip_eps=0.2")
    assert code == 2 and "This adapter is right" in told and f"{name}=mask" in told, told
    code, told = answer(source.replace("(x * mask).sum() / torch.sum(mask)", "(x * mask).mean()"),
                        "loss", "--recipe", "dapo")
    assert code == 1 and "divided by the number of slots" in told, told


def test_what_an_adapter_leaves_out_and_where_the_logits_are_is_told(answer):
    source = form(name="padding_mask", mask="mask = ~padding_mask").replace(
        "clip_eps):", "clip_eps, dual=None):")
    _, told = answer(source, "loss", "--recipe", "grpo")
    assert "It leaves out dual, so what the function does with that is not checked." in told, told
    _, told = answer(FROM_LOGITS, "loss", "--recipe", "grpo")
    assert "The logits at t are for the token at t" in told, told
    _, told = answer(FORMS["labels"][0], "loss", "--recipe", "grpo")
    assert "This adapter is right" in told and "leaves out" not in told and "logits" not in told
    _, told = answer(OF_PAIR_LOGITS, "loss", "--recipe", "dpo")
    assert "This adapter is right" in told and "The logits at t" not in told, told


def test_with_detached_nobody_is_told_to_detach(answer):
    code, told = answer(TRL, "grpo_loss", "--recipe", "dapo")
    assert code == 0 and "old_logps: your caller has to detach what is data" in told, told
    code, told = answer(TRL, "grpo_loss", "--recipe", "dapo", "--detached")
    assert code == 1 and "your caller has to detach" not in told, told


def test_an_adapter_is_printed_with_the_command_that_checks_it(answer):
    _, told = answer(FORMS["labels"][0], "loss", "policy_loss", "method=clip", "how=sequence_mean")
    command = told.partition("\n\n")[0].rpartition("and run: python -m vectors ")[2]
    assert command.endswith("adapter.py:adapted policy_loss method=clip how=sequence_mean"), told


def test_an_adapter_gives_what_a_key_fixed_and_is_not_called_like_the_function(answer):
    source = form(arguments="ppo_kl, advantages, clip_eps", log_ratio="-ppo_kl").replace(
        "return ((x * mask).sum(1) / mask.sum(1)).mean()", "return x")
    words = ["policy_loss", "method=clip", "clip_eps=0.2"]
    code, told = answer(source.replace("def loss", "def adapted"), "adapted", *words)
    assert code == 2 and "This adapter is right" in told and "clip_eps=0.2" in told, told
    words = told.partition("adapter.py:adapter ")[2].partition("\n")[0].split()
    code, again = answer(textwrap.dedent(told.partition("\n\n")[2]), "adapter", *words)
    assert code == 0, told + again


def test_a_sum_may_come_with_the_number_of_tokens_that_divides_it(answer):
    """As in Megatron, whose trainer divides the one by the other."""
    source = form(arguments="logprobs, old_logprobs, advantages, mask, clip_eps").replace(
        "((x * mask).sum(1) / mask.sum(1)).mean()", "(x * mask).sum(), mask.sum().int(), {}")
    code, told = answer(source, "loss", "--recipe", "dapo")
    assert code == 0 and "right if your trainer divides it by the second value" in told, told
    code, told = answer(source.replace(".int()", ".int() + 1"), "loss", "--recipe", "dapo")
    assert code == 1 and "right if your trainer" not in told, told


def test_advantages_may_come_behind_their_baseline(answer):
    source = ("def advantages_of(rewards):\n    b = rewards.mean(1, keepdim=True) + 0 * rewards\n"
              "    return b, rewards - b\n")
    code, told = answer(source, "advantages_of", "--recipe", "dr_grpo")
    assert code == 0 and "right if the second value is meant" in told, told
    code, told = answer(source.replace("rewards - b", "b - rewards"), "advantages_of", "--recipe",
                        "dr_grpo")
    assert code == 1, told


def test_a_key_under_the_name_of_an_argument_chooses_cases_and_another_is_an_error(answer):
    source = form(name="mask").replace("(1) / mask.sum(1)).mean()", "() / mask.sum())")
    code, told = answer(source, "loss", "policy_loss", "method=clip", "how=token_mean",
                        "clip_eps=0.2")
    assert code == 0 and "right: 3 of 3" in told, told
    kl = "def penalty(log_probs, log_probs_base, kl_estimator='k1'):\n" + (
        "    d = log_probs_base - log_probs\n    return {'k1': -d, 'k2': d * d / 2, "
        "'k3': d.exp() - d - 1}[kl_estimator]\n")
    code, told = answer(kl, "penalty", "kl")
    assert code == 0 and "right: 3 of 3" in told, told
    assert "1 skipped: the function does not know k3_ratio" in told
    code, told = answer(kl, "penalty", "kl", "method=k3")
    assert code == 2 and "kl has no such case; it has estimator k1, k2, k3" in told, told


def test_no_convention_excuses_a_mistake_that_is_named(answer):
    """The baseline contains the output's own reward; TRL's clip of this recipe has nothing to do
    with it."""
    source = ("def step(logps, rewards, mask, num_generations):\n"
              "    r = rewards.view(-1, num_generations)\n"
              "    A = (r - (r.sum(1, keepdim=True) - r) / (num_generations - 1)).view(-1, 1)\n"
              "    return -(A * logps * mask).sum(1).mean()\n")
    assert answer(source, "step", "--recipe", "rloo")[0] == 0
    wrong = replace_once(source, "(r.sum(1, keepdim=True) - r) / (num_generations - 1)",
                         "r.mean(1, keepdim=True)")
    code, told = answer(wrong, "step", "--recipe", "rloo")
    assert code == 1 and "likely: the baseline contains the output's own reward" in told, told
    assert "a matter of convention" not in told


def test_a_lambda_for_all_outputs_is_enough(answer):
    source = """
import torch
def gae(rewards, values, mask, gamma, lam):
    A = torch.zeros_like(rewards)
    for i in range(len(mask)):
        last = following = 0
        for t in reversed(range(mask.shape[1])):
            if mask[i, t] > 0:
                last = rewards[i, t] + gamma * following - values[i, t] + gamma * float(lam) * last
                A[i, t], following = last, values[i, t]
    return A, (A + values) * mask
"""
    code, told = answer(source, "gae", "gae")
    assert code == 0 and "right: 2 of 2; not robust: a lambda for each output" in told, told


def test_mistakes_of_advantages_are_named_if_they_are_in_one_row(answer):
    source = ("def advantages_of(rewards, num_generations, eps=1e-4):\n"
              "    r = rewards.view(-1, num_generations)\n"
              "    return ((r - r.mean()) / (r.std() + eps)).view(-1)\n")
    code, told = answer(source, "advantages_of", "--recipe", "grpo")
    assert code == 1 and "likely: mean and std are those of the whole batch" in told, told


def test_what_a_config_holds_by_default_is_given_and_what_needs_a_switch_turns_it_on(answer):
    code, told = answer(CONFIG, "loss", "--recipe", "grpo")
    assert code == 0 and "right: 7 of 7" in told, told
    assert answer(CONFIG.replace('"grpo"\n', '"dapo"\n'), "loss", "--recipe", "grpo")[0] == 1
    code, told = answer(CONFIG.replace("(d.exp() - d - 1)", "-d"), "loss", "--recipe", "grpo")
    assert code == 1 and "likely: the KL is estimated by k1" in told, told


def test_a_capped_weight_may_have_no_lower_bound(answer):
    source = """
def loss(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    w = (logps - old_logps).exp().clamp(max=1 + epsilon_high).detach()
    return -(w * advantages[:, None] * logps * mask).sum() / mask.sum()
"""
    code, told = answer(source, "loss", "--recipe", "cispo")
    assert code == 0 and "cispo, lower bound is right if there is no lower bound" in told, told
    assert answer(source.replace("max=1 +", "max="), "loss", "--recipe", "cispo")[0] == 1


def test_an_advantage_may_be_computed_from_lists_and_returned_as_lists(answer):
    source = """
def advantages(rewards):
    if hasattr(rewards, "tolist"):
        rewards = rewards.tolist()
    return [[x - sum(group) / len(group) for x in group] for group in rewards]
"""
    assert answer(source, "advantages", "--recipe", "dr_grpo")[0] == 0


def test_two_batches_may_use_the_same_names(answer):
    """As in torchtune, where one batch is of the reference."""
    assert answer(BATCHES, "loss", "--recipe", "dpo")[0] == 0
    code, told = answer(BATCHES.replace("-beta", "beta"), "loss", "--recipe", "dpo")
    assert code == 1 and "reference_inputs_chosen_logps for ref_chosen" in told, told


STEP = """
import torch
def step(model, batch, clip_eps):
    ids = batch["input_ids"]
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits
    log_p = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0]
    ratio, A = (log_p - batch["old_logps"]).exp(), batch["advantages"][:, None]
    x = -torch.min(ratio * A, ratio.clamp(1 - clip_eps, 1 + clip_eps) * A)
    mask = batch["loss_mask"][:, 1:].float()
    return (x * mask).sum() / mask.sum()
"""


OF_LOGITS = """
import torch
def summed(logits, labels):
    labels = labels[:, 1:].clone()
    is_kept = labels != -100
    labels[~is_kept] = 0
    log_p = torch.log_softmax(logits[:, :-1], -1).gather(2, labels[..., None])[..., 0]
    return (log_p * is_kept).sum(-1)
def of_logits(policy_logits, reference_logits, labels, beta):
    n = len(labels) // 2
    gain = summed(policy_logits, labels) - summed(reference_logits, labels)
    return -torch.nn.functional.logsigmoid(beta * (gain[:n] - gain[n:])).mean()
"""


def test_a_step_may_keep_its_groups_apart(answer):
    """Tokens of the shape (P, G, T), as rewards have the shape (P, G)."""
    source = """
def step(logps, mask, rewards):
    others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return -((rewards - others) * (logps * mask).sum(-1)).sum() / rewards.numel()
"""
    code, told = answer(source, "step", "--recipe", "rloo")
    assert code == 0 and "more cases are right with tokens of the shape (P, G, T)" in told, told
    assert answer(source.replace(" - 1)", ")"), "step", "--recipe", "rloo")[0] == 1


def test_a_step_whose_logits_are_not_those_before_its_tokens_gets_no_adapter_that_is_right(answer):
    code, told = answer(STEP.replace("[:, :-1]", "[:, 1:]"), "step", "--recipe", "dapo")
    assert code and "adapter is right" not in told, told


@pytest.mark.parametrize("function, recipe, call, source", [
    ("loss", "grpo", "loss(logps, old_logps, advantages, mask, eps=(",     # a function with places
     "import torch\ndef loss(*args, eps=(0.2, 0.2)):\n    x, old, A, keep = args\n"
     "    lo, hi = eps\n    ratio, A = (x - old).exp(), A[:, None]\n"
     "    y = -torch.min(ratio * A, ratio.clamp(1 - lo, 1 + hi) * A) * keep\n"
     "    return (y.sum(1) / keep.sum(1)).mean()"),
    ("Sums.loss", "rloo", "Sums().loss(",                   # an object whose class has defaults
     "class Sums:\n    def __init__(self, scale=1.0):\n        self.scale = scale\n"
     "    def loss(self, advantage, log_likelihood):\n"
     "        return -self.scale * (advantage * log_likelihood).mean()"),
    ("step", "dapo", "model=Model(", STEP),                 # a step that calls the model
    ("of_logits", "dpo", "policy_logits=torch.concatenate", OF_LOGITS),
    ("of_lists", "grpo", "logps_list=[x[m > 0] for x, m in zip(logps, mask)]",
     "import torch\ndef of_lists(logps_list, old_logps_list, advs, eps):\n    total = 0.0\n"
     "    for x, old, A in zip(logps_list, old_logps_list, advs):\n        r = (x - old).exp()\n"
     "        total = total - torch.min(r * A, r.clamp(1 - eps, 1 + eps) * A).mean()\n"
     "    return total / len(advs)"),
    ("by_prompt", "grpo", "prompts=group_ids.tolist()",     # groups of equal prompts
     "import torch\ndef by_prompt(rewards, prompts, eps):\n    found = torch.zeros_like(rewards)\n"
     "    for one in dict.fromkeys(prompts):\n"
     "        rows = [n for n, prompt in enumerate(prompts) if prompt == one]\n"
     "        r = rewards[rows]\n        found[rows] = (r - r.mean()) / (r.std() + eps)\n"
     "    return found")])
def test_an_adapter_that_is_right_works_as_printed(function, recipe, call, source, answer):
    code, told = answer(source, function, "--recipe", recipe)
    assert code == 2 and "This adapter is right" in told and call in told, told
    code, again = answer(textwrap.dedent(told.partition("\n\n")[2]), "adapted", "--recipe", recipe)
    assert code == 0, again


def test_the_only_input_that_is_left_fills_the_only_gap_of_a_wrong_loss(answer):
    source = TRL.replace("old_logps", "prior").replace("torch.min", "0.7 * torch.min")
    code, told = answer(source, "grpo_loss", "--recipe", "dapo")
    assert code == 2 and "This adapter is wrong, and its check shows how" in told
    code, told = answer(textwrap.dedent(told.partition("\n\n")[2]), "adapted", "--recipe", "dapo")
    assert code == 1 and "WRONG" in told, told


def test_a_wrong_estimator_without_a_mask_is_named_and_gets_no_adapter(answer):
    """It takes tables (B, T), and leaves out lambda."""
    source = """
import torch
def gae(rewards, values, gamma, lam):
    A, found, V = 0.0, [], 0.0
    for t in reversed(range(rewards.shape[1])):
        A = rewards[:, t] + gamma * V - values[:, t] + gamma * A
        found.append(A)
        V = values[:, t]
    return torch.stack(found[::-1], 1)
"""
    code, told = answer(source, "gae", "gae")
    assert code == 1 and "adapter" not in told and "likely: lambda is left out" in told, told
    assert answer(source.replace("gamma * A", "gamma * lam * A"), "gae", "gae")[0] == 0
    source = "def adv(rewards, eps):\n    return rewards / (rewards.std(1, keepdim=True) + eps)\n"
    assert "group_ids" not in answer(source, "adv", "--recipe", "dr_grpo")[1]


def test_a_setting_is_in_the_adapter(answer):
    source = form(name="mask, is_on, padding_mask").replace("ratio * A,", "ratio * A * is_on,")
    code, told = answer(source, "loss", "--recipe", "grpo", "is_on=True")
    assert code == 2 and "This adapter is right" in told and "is_on=True" in told, told


def test_a_coefficient_that_a_setting_turns_on_is_looked_up_without_a_kl_too(answer):
    source = form(arguments="logprobs, ratio, ref_logprobs, advantages, mask, config",
                  log_ratio="torch.log(ratio)").replace("clip_eps", "config.clip_eps")
    source = replace_once(source, "    return", "    if config.has_kl:\n        d = ref_logprobs - "
                          "logprobs\n        x = x + config.beta * (d.exp() - d - 1)\n    return")
    code, told = answer(source, "loss", "--recipe", "grpo", "has_kl=True")
    assert code == 2 and "This adapter is right" in told and "'has_kl': True" in told, told
    code, again = answer(textwrap.dedent(told.partition("\n\n")[2]), "adapted", "--recipe", "grpo")
    assert code == 0 and "right: 3 of 3" in again, again


def test_new_old_and_ref_are_log_probabilities(answer):
    source = form(log_ratio="new - old",
                  arguments="ref, new, old, advantages, mask, beta, clip_eps")
    kl = replace_once(source, "    return",
                      "    d = ref - new\n    x = x + beta * (d.exp() - d - 1)\n    return")
    assert answer(kl, "loss", "--recipe", "grpo")[0] == 0
    code, told = answer(source, "loss", "--recipe", "grpo")
    assert code == 1 and "likely: the KL is left out" in told, told


def test_a_batch_may_call_its_old_log_probabilities_as_the_new_ones(answer):
    """As in PureJaxRL and AReaL; of the three policies, those before the update have one name."""
    for arguments, old in (("log_prob, traj, advantages, mask, clip_eps", "traj.log_prob"),
                           ("logps, data, advantages, mask, clip_eps", 'data["logps"]')):
        new = arguments.partition(",")[0]
        code, told = answer(form(arguments=arguments, log_ratio=f"{new} - {old}"), "loss",
                            "--recipe", "grpo")
        assert code == 2 and "This adapter is right" in told, told
        assert f"Bag({{'{new}': old_logps}})" in told
    batch = form(arguments="logps, batch, advantages, mask, clip_eps",
                 log_ratio='logps - batch["logps"]')
    code, told = answer(batch, "loss", "--recipe", "grpo")
    assert code == 0 and "batch_logps for old_logps" in told, told


def test_a_reference_that_is_added_is_not_taken_for_the_other_ones(answer):
    source = ("from torch.nn.functional import logsigmoid\n"
              "def loss(prefered_logprob, disprefered_logprob, ref_prefered_logprob,\n"
              "         ref_disprefered_logprob, beta):\n"
              "    x = prefered_logprob - ref_prefered_logprob\n"
              "    return -logsigmoid(beta * (x - disprefered_logprob + ref_disprefered_logprob))")
    assert answer(source, "loss", "--recipe", "dpo")[0] == 0
    wrong = source.replace("- ref", "+ ref").replace("+ ref_dis", "- ref_dis")
    code, told = answer(wrong, "loss", "--recipe", "dpo")
    assert code == 1 and "likely: the reference is added" in told, told


def test_names_of_advantages_their_eps_and_their_rewards_are_known(answer):
    named = form("advantages = gae", arguments=PLAIN["arguments"].replace("advantages", "gae"))
    assert answer(named.replace("clip_eps", "clip_param"), "loss", "--recipe", "grpo")[0] == 0
    source = ("def advantages_of(raw_rewards, advantage_eps):\n"
              "    x = raw_rewards - raw_rewards.mean(1, keepdim=True)\n"
              "    return x / (raw_rewards.std(1, keepdim=True) + advantage_eps)\n")
    assert answer(source, "advantages_of", "--recipe", "grpo")[0] == 0
    wrong = replace_once(source, "mean(1, keepdim=True)", "mean()").replace("raw_rewards", "xs")
    code, told = answer(wrong, "advantages_of", "--recipe", "grpo")
    assert code == 1 and "likely: " in told, told


GAE = """
import torch
def gae(rewards, values, mask, gamma, lam):
    carry = following = 0.0
    found = []
    for t in reversed(range(rewards.shape[1])):
        m = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]
        carry = m * (delta + gamma * lam * carry) + (1 - m) * carry
        following = m * values[:, t] + (1 - m) * following
        found.append(carry)
    advantages = torch.stack(found[::-1], 1)
    return advantages, advantages + values
"""


def test_what_is_in_masked_slots_does_not_matter_but_is_told(answer):
    code, told = answer(GAE, "gae")
    assert code == 0 and "right where the mask is 1, so use it with the mask" in told, told
    code, told = answer(GAE.replace("gamma * lam", "lam"), "gae")
    assert code == 1, told


# ---- what a function must not do -------------------------------------------------------------

BASE = """
import torch
def loss(logps, old_logps, advantages, mask, epsilon_low, epsilon_high):
    r = torch.exp(logps - old_logps)
    A = advantages[:, None]
    l = -torch.min(r * A, r.clamp(1 - epsilon_low, 1 + epsilon_high) * A)
    return ((l * mask).sum(1) / mask.sum(1)).mean()
"""


@pytest.mark.parametrize("name, old, new", [
    ("mask", "return ((l * mask).sum(1) / mask.sum(1)).mean()",
     "mask /= mask.sum(1, keepdim=True)\n    return (l * mask).sum(1).mean()"),
    ("advantages", "A = advantages[:, None]\n    l = -torch.min(",
     "advantages *= -1\n    A = advantages[:, None]\n    l = torch.max("),
    ("advantages", "A = advantages[:, None]", "A = advantages.unsqueeze_(1)"),
    ("old_logps", "r = torch.exp(logps - old_logps)",
     "r = torch.exp(logps - old_logps.detach().clone())\n"
     "    with torch.no_grad(): old_logps.copy_(logps)")])
def test_a_function_that_changes_its_arguments_is_wrong(name, old, new, answer):
    """The caller uses them again, in the next epoch or for a metric."""
    assert answer(BASE, "loss", "--recipe", "grpo")[0] == 0
    code, text = answer(replace_once(BASE, old, new), "loss", "--recipe", "grpo")
    assert code == 1 and f"it changes its argument {name} in place" in text, text


def test_a_loss_with_constants_that_changes_its_arguments_is_told_so(answer):
    source = BASE.replace(", epsilon_low, epsilon_high)", ")").replace(
        "    r =", "    epsilon_low = epsilon_high = 0.2\n    mask /= mask.sum()\n    r =")
    code, text = answer(source, "loss", "--recipe", "grpo")
    assert code == 2 and "it changes its argument mask in place" in text, text


def test_an_argument_in_another_form_must_not_be_changed_either(answer):
    source = BASE.replace("mask, ", "padding_mask, ").replace(
        "    r =", "    mask = 1 - padding_mask.double()\n    r =").replace(
        "    return", "    padding_mask.zero_()\n    return")
    code, text = answer(source, "loss", "--recipe", "grpo")
    assert code and "adapter is right" not in text, text


@pytest.mark.parametrize("words", [[], ["--robust"], ["--float32"]])
def test_a_group_of_equal_rewards_must_not_give_nan_without_eps_either(words, answer):
    """It is the most common nan of GRPO. A function that takes eps is not called with eps = 0."""
    source = """
import torch
def advantages(rewards):
    A = rewards - rewards.mean(1, keepdim=True)
    return A / rewards.std(1, keepdim=True)
"""
    code, text = answer(source, "advantages", "--recipe", "grpo", *words)
    assert code == 1 and "likely: a group of equal rewards gives nan or inf (0 / 0) (" in text, text
    std = "rewards.std(1, keepdim=True)"
    for old, new in ((f"A / {std}", f"torch.where({std} > 0, A / {std}, 0)"),
                     (std, f"({std} + 1e-6)"), (std, f"({std} + 1e-8)"), (std, f"({std} + 1e-4)")):
        code, text = answer(source.replace(old, new), "advantages", "--recipe", "grpo", *words)
        assert code == 0, text


@pytest.mark.parametrize("start", ["import sys\nsys.exit(0)", "import argparse\n"
                                   "parser = argparse.ArgumentParser()\n"
                                   "parser.add_argument('data')\nparser.parse_args([])"])
def test_a_file_that_exits_while_it_is_imported_is_told_in_a_line(start, answer):
    code, text = answer(start + BASE, "loss", "--recipe", "grpo")
    assert code == 2 and text.startswith("error: cannot import ") and text.count("\n") == 1, text
    assert 'SystemExit' in text and 'under if __name__ == "__main__"' in text


def test_a_loss_that_exits_is_wrong(answer):
    source = BASE.replace("    r =", "    raise SystemExit(0)\n    r =")
    code, text = answer(source, "loss", "--recipe", "grpo")
    assert code == 1 and "SystemExit: 0" in text, text


def test_what_an_adapter_gives_as_0_is_told(answer):
    source = BASE.replace("epsilon_low, ", "values, returns, entropy, epsilon_low, ", 1).replace(
        "    return ", "    l = l - 0.5 * (values - returns) ** 2 + 0.01 * entropy\n    return ")
    _, text = answer(source, "loss", "--recipe", "grpo")
    assert "This adapter is right" in text and (
        "It gives values, returns, entropy as 0, so what the function does with them is not "
        "checked.") in text, text


@pytest.mark.parametrize("name", ["padding", "prompt_mask", "ignore_mask", "is_pad"])
def test_a_mask_of_padding_is_not_a_mask_of_tokens(name, answer):
    wrong = BASE.replace("mask", name)
    assert "adapter is right" not in answer(wrong, "loss", "--recipe", "grpo")[1]
    start, _, rest = BASE.partition("    r =")
    right = start.replace("mask", name) + f"    mask = 1.0 - {name}.double()\n    r =" + rest
    code, text = answer(right, "loss", "--recipe", "grpo")
    assert "This adapter is right" in text and f"{name}=mask == 0" in text, text
    unnamed = re.sub(r"\bold_logps\b", "y", re.sub(r"\blogps\b", "x", wrong))
    unnamed = unnamed.replace("advantages", "z")
    code, text = answer(unnamed, "loss", "--recipe", "grpo")
    assert code and "adapter is right" not in text, text


def with_weight(name, default="0.04"):
    """Write a loss with a KL, whose weight has this name, of an argument or in a config."""
    source = BASE.replace("epsilon_low, ", "ref_logps, epsilon_low, ", 1).replace(
        "    return ", "    d = ref_logps - logps\n"
        f"    l = l + {name} * (d.exp() - d - 1)\n    return ")
    parameter = "cfg" if name.startswith("cfg") else name + default
    return source.replace("epsilon_high):", f"epsilon_high, {parameter}):")


@pytest.mark.parametrize("name", [
    "kl_alpha", "kl_ctl", "kl_lambda", "lambda_kl", "kl_scale", "init_kl_coef", "cfg.kl_alpha"])
def test_names_of_the_weight_of_a_kl_are_known(name, answer):
    source = with_weight(name, "=0.04")
    code, text = answer(source, "loss", "--recipe", "grpo")
    assert code == 0 and "does not take beta" not in text, text
    wrong = replace_once(source, "- d - 1", "- 1")
    assert answer(wrong, "loss", "--recipe", "grpo")[0] == 1


@pytest.mark.parametrize("name, default", [
    ("kl", "=0.04"), ("alpha", "=0.04"), ("strength", "=0.04"), ("strength", ""), ("cfg.kl", ""),
    ("cfg.strength", "")])
def test_another_name_of_the_weight_of_a_kl_gets_an_adapter(name, default, answer):
    """Without it, the KL to a reference is wrong in all cases, and the loss need not be."""
    source = with_weight(name, default)
    code, text = answer(source, "loss", "--recipe", "grpo")
    assert code == 2 and "This adapter is right" in text, text
    assert re.search(f"{name.removeprefix('cfg.')}'?[=:] ?beta", text), text
    code, text = answer(textwrap.dedent(text.partition("\n\n")[2]), "adapted", "--recipe", "grpo")
    assert code == 0 and "does not take beta" not in text, text
    wrong = replace_once(source, "torch.min(", "torch.max(")
    code, text = answer(wrong, "loss", "--recipe", "grpo")
    assert code == 1 and "the clip takes the max instead of the min" in text, text


def test_a_loss_with_a_kl_of_unknown_weight_is_not_judged(answer):
    source = with_weight("strength", "=0.04").replace("strength * (", "(strength + 0.01) * (")
    code, text = answer(source, "loss", "--recipe", "grpo")
    assert code == 2 and text.startswith("error: loss takes ref_logps, but "), text
    assert "strength" in text and text.count("\n") == 1, text


@pytest.mark.parametrize("arguments", ["eps=1e-8, clip_eps=0.2", "clip_eps=0.2, eps=1e-8",
                                       "epsilon=1e-6, clip_range=0.2"])
def test_a_small_number_beside_a_clip_range_is_not_it(arguments, answer):
    small, clip = sorted(re.findall(r"(\w+)=", arguments), key=lambda name: "clip" in name)
    source = BASE.replace("epsilon_low, epsilon_high", arguments).replace(
        "epsilon_low", clip).replace("epsilon_high", clip).replace(
        "mask.sum(1)).", f"(mask.sum(1) + {small})).")
    code, text = answer(source, "loss", "--recipe", "grpo", "--tolerance", "1e-5")
    assert code == 0 and f"{clip} for epsilon_low" in text, text


WRAPPED = """
def logged(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner
@logged
def loss("""


def test_a_decorator_without_wraps_hides_the_arguments(answer):
    hidden = BASE.replace("\ndef loss(", WRAPPED)
    for source in (hidden, hidden.replace("old_logps", "behind")):
        code, text = answer(source, "loss", "--recipe", "grpo")
        assert (code, text) == (2, "error: loss takes only *args and **kwargs; add functools.wraps "
                                   "to its decorator, so that its arguments are known\n")
    seen = "import functools\n" + hidden.replace("    def inner", "    @functools.wraps(function)\n"
                                                 "    def inner")
    assert answer(seen, "loss", "--recipe", "grpo")[0] == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")         # of numpy, for log pi of -inf
def test_a_torch_loss_may_import_numpy_too(answer, tmp_path):
    one = BASE.replace("import torch", "import numpy as np, torch")
    assert answer(one, "loss", "--recipe", "grpo")[0] == 0
    (tmp_path / "inner_of_torch.py").write_text(BASE)
    start = "import numpy as np\nimport inner_of_torch\ndef loss(logps, old_logps, advantages, mask"
    call = "    return inner_of_torch.loss(logps, old_logps, advantages, mask, "
    outer = f"{start}, epsilon_low, epsilon_high):\n{call}epsilon_low, epsilon_high)\n"
    for source in (outer, f"{start}):\n{call}0.2, 0.2)\n"):
        code, text = answer(source, "loss", "--recipe", "grpo")
        assert code == 0 and "numpy computes no" not in text, text
    (tmp_path / "inner_of_torch_2.py").write_text(BASE.replace("torch.min(", "torch.max("))
    code, text = answer(outer.replace("of_torch", "of_torch_2"), "loss", "--recipe", "grpo")
    assert code == 1 and "likely: the clip takes the max" in text, text


@pytest.mark.parametrize("returned, words", [
    ("A[std.squeeze(1) > 9]", "has the shape (0,)"), ("torch.zeros(0, 4)", "has the shape (0,)"),
    ('{"reward_mean": 1.0}, A', "advantages is not made of numbers: there is a dict"),
    ("[None, A]", ""), ("[[None, 1.0]]", "there is a NoneType"), ("'high'", "there is a str"),
    ("A + 0j", "there is a complex"), ("A.to_sparse()", ""), ("A.to('meta')", ""),
    ("[A, 'high']", ""), ("(A.to('meta'), A.to('meta'))", ""), ("(None, A.to('meta'))", "")])
def test_what_is_no_array_of_numbers_is_wrong_without_a_traceback(returned, words, answer):
    source = f"""
import torch
def advantages(rewards, eps):
    std = rewards.std(1, keepdim=True)
    A = (rewards - rewards.mean(1, keepdim=True)) / (std + eps)
    return {returned}
"""
    code, text = answer(source, "advantages", "--recipe", "grpo")
    assert code == 1 and words in text and "right: 0 of 7" in text, text


@pytest.mark.parametrize("returned", [
    "None", "'low'", "(l * mask).to('meta')", "l.to_sparse()", "l.mean() + 0j", "[None, l.mean()]",
    "l[:0]", "(l.mean(), l.to('meta'))", "{'loss': {'mean': l.mean()}}", "(l.mean(), {'kl': 1})"])
def test_a_loss_that_is_no_number_is_wrong_without_a_traceback(returned, answer):
    source = BASE.partition("    return ")[0] + f"    return {returned}\n"
    code, text = answer(source, "loss", "--recipe", "grpo")
    assert code == 1 and "WRONG" in text, text


@pytest.mark.parametrize("check", ["assert self.clip > 0", "raise ValueError('clip')",
                                   "raise SystemExit(0)"])
def test_a_config_may_refuse_its_defaults(check, answer):
    source = BASE.replace("epsilon_low, epsilon_high)", "cfg: Config)").replace(
        "epsilon_low", "cfg.clip").replace("epsilon_high", "cfg.clip").replace("\ndef loss", f"""
from dataclasses import dataclass
@dataclass
class Config:
    clip: float = 0.0
    def __post_init__(self):
        {check}
def loss""")
    code, text = answer(source, "loss", "--recipe", "grpo")
    assert code == 0 and "right: " in text, text
