"""Check the scripts and examples against the test vectors of vectors/, in float64 and in float32,
and test the command that does this for everybody's functions."""
import importlib
import re

import pytest
import torch
from conftest import ROOT
from small_vectors import OURS

import vectors
from vectors import __main__ as command

pytestmark = pytest.mark.quick

FILES = {name: vectors.read(name) for name in vectors.files()}
CASES = {f"{name}: {case['id']}": (name, case)
         for name, content in FILES.items() for case in content["cases"]}
# Cases for whose convention there is no function of ours.
NOT_OURS = {"completion_mask: two ends", "advantages: grpo, ddof 0",
            "policy_loss: cispo, lower bound", "adaptive_kl: horizon"}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_our_functions_give_the_right_answers(name, dtype):
    file, case = CASES[name]
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        functions = [] if name in NOT_OURS else OURS[file](**case["parameters"])
        assert bool(functions) == (name not in NOT_OURS)
        for function in functions:
            outcome = vectors.check_case(
                function, FILES[file], case, dtype=dtype, fixed=case["parameters"])
            assert not outcome.errors, outcome.errors
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
        assert fill.answer(content, case) == {
            name: case[name] for name in ("right", "gradient") if name in case}
    ids = [case["id"] for case in content["cases"]]
    assert len(set(ids)) == len(ids) and content["version"] == 1
    flags = {flag for case in content["cases"] for flag in case["flags"]}
    assert flags == content["mistakes"].keys() and all(case["flags"] for case in content["cases"])


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    """answer(source, *words): run the command on a module with this source. -> code, output"""
    def run(source, *words):
        name = f"{tmp_path.name}_{len(list(tmp_path.iterdir()))}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        code = command.main([name + words[0], *words[1:]])
        return code, capsys.readouterr().out
    return run


PAGE = (ROOT / "docs/vectors.md").read_text()
TRL = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]      # the loss of its documentation


def test_a_loss_is_told_its_first_wrong_number_and_the_mistakes_that_explain_it(answer):
    words = (":grpo_loss", "policy_loss", "method=clip", "how=token_mean")
    code, text = answer(TRL, *words)
    assert code == 1 and "  2 skipped: the function does not take delta" in text
    shown = PAGE.partition("WRONG")[2].partition("```")[0]
    assert all(line in text for line in shown.splitlines() if line.strip() != "...")
    likely = text.partition("most likely")[2]
    assert "old_logps get a gradient" in likely and "the max instead of the min" not in likely
    text = answer(TRL.replace("mask.sum()", "mask.numel()"), *words, "id=clip")[1]
    assert "each of the 6 wrong numbers is 0.625 times the right one" in text
    assert "0 right, 1 wrong, 0 skipped" in text
    text = answer(TRL.replace("exp(logps", "exp(logps.detach()"), *words)[1]
    assert "no gradient arrives there" in text
    text = answer(TRL.replace(".sum() / mask.sum()", ""), *words)[1]
    assert "has the shape (4, 4), should have ()" in text
    text = TRL.replace("logps - old_logps", "torch.where(mask > 0, logps - old_logps.detach(), 0)")
    code, text = answer(text.replace(" * mask)", "[mask > 0])"), *words, "id=clip, wild")
    assert code == 0 and "1 right, 0 wrong" in text


def test_a_convention_is_explained_and_what_a_function_lacks_is_skipped(answer):
    numpy = "import numpy as np\ndef advantages(rewards, method, eps=0, ddof=1):\n" \
        "    if method != 'grpo': raise NotImplementedError('only grpo')\n" \
        "    return (rewards - rewards.mean(1, keepdims=True)) / (eps + rewards.std(" \
        "1, ddof=DDOF, keepdims=True))"
    code, text = answer(numpy.replace("DDOF", "ddof"), "", "id=grpo")
    assert (code, text) == (0, "advantages: 1 right, 0 wrong, 0 skipped\n")
    code, text = answer(numpy.replace("DDOF", "0"), "")
    assert code == 1 and "each of the 7 wrong numbers is 1.155 times the right one" in text
    assert "the std divides by G instead" in text.partition("most likely")[2]
    assert "skipped: only grpo" in text and "sq_grad_norms" not in text
    text = answer(numpy.replace("DDOF", "1"), "")[1]
    assert "a matter of convention: TRL and verl use torch.std" in text
    assert answer(numpy.replace("DDOF", "ddof"), "", "--float32", "id=mean")[0] == 1
    assert answer(numpy, ":advantages", "no_file")[0] == 2
    code, text = answer(numpy.replace("DDOF", "ddof") + " * 1.001", "", "--tolerance", "0.01",
                        "id=grpo")
    assert code == 0
