"""How the vectors find what anybody's arguments stand for, part by part."""
import numpy
import pytest
import torch

import vectors
from vectors import ways
from vectors.binding import opened
from vectors.names import method_of
from vectors.unpack import Model

OPTIONS = {"tool": "torch", "dtype": "float64", "tolerance": None, "fixed": {}, "settings": {}}
LOSSES = vectors.read("policy_loss")
CASE = next(one for one in LOSSES["cases"] if one["id"] == "clip")
VALUES = vectors.read("gae")
PAIRS = vectors.read("pair_loss")
TOKENS, PAIR = ["logps", "old_logps", "advantages", "mask"], [
    "chosen", "rejected", "ref_chosen", "ref_rejected", "mask_chosen", "mask_rejected"]

GAE = ["rewards", "values", "mask", "lam"]


@pytest.mark.parametrize("name, inputs, texts", [
    ("padding_mask", TOKENS, ["mask == 0", "1 - mask", "mask"]),
    ("is_pad", TOKENS, ["mask == 0", "1 - mask"]),
    ("prompt_masks", TOKENS, ["mask == 0", "1 - mask"]),
    ("labels", TOKENS, ["-100 * (mask == 0)", "0 * (mask > 0)"]),
    ("labels", ["logits", "tokens"], ["tokens"]), ("target", ["logits", "tokens"], ["tokens"]),
    ("chosen_labels", PAIR, ["-100 * (mask_chosen == 0)"]),
    ("yl_labels", PAIR, ["-100 * (mask_rejected == 0)"]),
    ("sample_mask", TOKENS, ["1.0 + 0 * mask[:, 0]"]),
    ("cu_seqlens", TOKENS, [
        "torch.asarray([0, *(mask > 0).sum(1).cumsum(0).tolist()])",
        "torch.arange(len(mask) + 1) * mask.shape[1]"]),
    ("seq_ids", TOKENS, ["(torch.arange(len(mask))[:, None] + 0 * (mask > 0))[mask > 0]",
                         "(torch.arange(len(mask))[:, None] + 0 * (mask > 0)).reshape(-1)"]),
    ("lengths", TOKENS, ["(mask > 0).sum(1)"]), ("num_items_in_batch", TOKENS, ["mask.sum()"]),
    ("global_batch_size", TOKENS, ["len(mask)"]),
    ("ratio", TOKENS, ["torch.exp(logps - old_logps)"]),
    ("weights", TOKENS, ["mask / mask.sum()", "mask / mask.sum(1)[:, None] / len(mask)"]),
    ("log_ratio", TOKENS, ["logps - old_logps"]), ("ppo_kl", TOKENS, ["old_logps - logps"]),
    ("prox_logp", TOKENS, ["old_logps"]), ("seq_logprobs", TOKENS, ["(logps * mask).sum(1)"]),
    ("entropies", TOKENS, ["0 * logps"]), ("old_values", TOKENS, ["0 * logps"]),
    ("logits", TOKENS, ["torch.stack([logps, torch.log1p(-torch.exp(logps))], -1)"]),
    ("ref_chosen_logits", PAIR, [
        "torch.stack([ref_chosen, torch.log1p(-torch.exp(ref_chosen))], -1)"]),
    ("rejected_logits", PAIR, ["torch.stack([rejected, torch.log1p(-torch.exp(rejected))], -1)"]),
    ("input_ids", TOKENS, ["0 * (mask > 0)"]),
    ("yw_idxs", PAIR, ["torch.arange(len(chosen))"]),
    ("rejected_indices", PAIR, ["torch.arange(len(chosen)) + len(chosen)"]),
    ("loss_mask", PAIR, ["torch.concatenate([mask_chosen, mask_rejected])",
                         "torch.stack([mask_chosen, mask_rejected], 1)"
                         ".reshape(-1, *mask_chosen.shape[1:])"]),
    ("model", TOKENS, [form.format("torch.stack([logps, torch.log1p(-torch.exp(logps))], -1)")
                       for form in ("Model({})", "Model({}).logits")]),
    ("ref_model", ["ref_logps"], [
        form.format("torch.stack([ref_logps, torch.log1p(-torch.exp(ref_logps))], -1)")
        for form in ("Model({})", "Model({}).logits")]),
    ("attention_mask", TOKENS, ["1.0 + 0 * mask", "mask"]),
    ("prompts", ["rewards", "group_ids"], [
        "group_ids.tolist()", "group_ids[:, None] + 0 * group_ids"]),
    ("completion_mask", ["logits", "tokens", "prompt_width"], [
        "1.0 + 0 * tokens[:, prompt_width:]"]),
    ("dones", GAE, [ways.ENDS.replace("np", "torch"), ways.STARTS.replace("np", "torch")]),
    ("next_done", GAE, ["1 + 0 * values[:, 0]"]),
    ("nonterminal", GAE, [f"1 - {ways.ENDS}".replace("np", "torch")]),
    ("last_val", GAE, ["0 * values[:, 0]",
                       "torch.concatenate([values[:, 1:], 0 * values[:, :1]], 1)"]),
    ("num_samples", ["n", "c", "k"], ["n", "torch.asarray([n])"]),
    ("num_correct", ["n", "c", "k"], ["torch.asarray([c])", "c"]),
    ("temperature", TOKENS, []), ("padding_mask", ["rewards"], [])])
def test_an_argument_is_made_from_our_inputs_as_its_name_says(name, inputs, texts):
    assert ways.forms_of(name, inputs, "torch") == texts


def test_two_masks_are_of_one_kind_before_they_may_differ():
    made = {"pad": ["mask == 0", "1 - mask", "mask"], "value_pad": ["mask == 0", "1 - mask",
            "mask"], "values": ["0 * logps"]}
    found = [*ways.guesses([*made], ["mask"], made, [], set())]
    assert [(one["pad"], one["value_pad"]) for one in found[:4]] == [
        ("mask == 0", "mask == 0"), ("1 - mask", "1 - mask"), ("mask", "mask"),
        ("mask == 0", "1 - mask")]
    assert all(one["values"] == "0 * logps" for one in found) and len(found) == 9


def test_arguments_with_unknown_names_are_tried_in_each_order_and_settings_as_off():
    assert [*ways.guesses(["a", "b"], ["logps", "mask"], {}, [], set())] == [
        {"a": "logps", "b": "mask"}, {"a": "mask", "b": "logps"}]
    packed = {"x": "logps[mask > 0]"}
    found = [*ways.guesses(["use_kl"], ["mask"], {}, [packed], {"use_kl"})]
    assert found == [{"use_kl": "mask"}, packed | {"use_kl": "mask"}, {"use_kl": "False"},
                     {"use_kl": "0.0"}, packed | {"use_kl": "False"}, packed | {"use_kl": "0.0"}]
    assert {"use_kl": "False"} not in ways.guesses(["use_kl"], ["mask"], {}, [], set())


def test_a_batch_may_have_a_slot_more_in_front_and_logits_one_at_the_end():
    """The slot in front is the last token of the prompt, whose logits begin the output."""
    logits = ways.OF_TWO.format("logps").replace("np", "torch")
    names = {"logits": logits, "labels": "-100 * (mask == 0)", "coef": "0.0"}
    bound = {"logps": "new", "old_logps": "old", "advantages": "A", "mask": "keep"}
    found = ways.shifted(names, bound, {"old", "A", "keep", "coef"}, LOSSES, CASE, "torch")
    front, back, both, of_ids = found
    known = vectors.arrays(CASE["inputs"], LOSSES["integers"], "torch", "float64")
    library = {"torch": torch}
    assert front["logits"] == back["coef"] == logits or back["coef"] == "0.0"
    assert {*front} == {*names, "old", "A", "keep"} and {*back} == {*names}
    assert of_ids == {name: text for name, text in both.items() if name not in ("old", "A")}
    assert both == front | {name: back[name] for name in ("logits", "labels")}
    for name, plain in (("old", known["old_logps"]), ("keep", known["mask"]),
                        ("A", known["advantages"][:, None] + 0 * known["mask"])):
        longer = eval(front[name], library | known)
        assert torch.equal(longer[:, 1:], plain) and not longer[:, 0].any(), name
    longer = eval(back["logits"], library | known)
    assert torch.equal(longer[:, :-1], eval(logits, library | known))
    labels = eval(back["labels"], library | known)
    assert torch.equal(labels[:, 1:], -100 * (known["mask"] == 0))
    assert ways.shifted({"coef": "0.0"}, bound, set(), LOSSES, CASE, "torch") == []
    assert ways.shifted({}, {"rewards": "r"}, {"r"}, vectors.read("advantages"),
                        vectors.read("advantages")["cases"][0], "torch") == []


def test_a_model_gives_the_log_probs_of_the_tokens_at_the_places_before_them():
    """Behind a prompt of two tokens; without one, the first token has no place before it."""
    given = torch.randn(2, 3, 4)
    model = Model(given)
    logits = model(input_ids=torch.zeros(2, 5)).logits
    assert logits.shape == (2, 5, 4) and torch.equal(logits[:, 1:-1], given)
    assert torch.equal(model.logits(torch.zeros(2, 5), logits_to_keep=4)[:, :-1], given)
    assert torch.equal(model(torch.zeros(2, 3)).logits[:, :-1], given[:, 1:])


def right_gae(function, **names):
    """Check a function on the case of GAE without masked slots. -> whether it is right"""
    options = OPTIONS | {"names": names}
    found = [vectors.check_case(opened(function), VALUES, case, **options)
             for case in VALUES["cases"][:2]]
    assert found[1].skipped == "the function does not take mask"
    return not found[0].errors


def estimate(rewards, values, dones, last, gamma, lam, is_before=False, stops=True):
    """GAE whose first axis is time. -> (T, B)"""
    A, found, V = 0 * last, [], last
    for t in reversed(range(len(rewards))):
        goes_on = 1 - (dones[t + 1] if is_before and t + 1 < len(dones) else is_before or dones[t])
        delta = rewards[t] + gamma * V * goes_on - values[t]
        A = delta + gamma * lam * (goes_on if stops else 1) * A
        found.append(A)
        V = values[t]
    return torch.stack(found[::-1])


@pytest.mark.parametrize("is_before", [False, True])
def test_an_estimator_that_is_told_the_ends_gets_all_outputs_in_one_row(is_before):
    """So one that does not stop at an end inside of a row is wrong, and is not called right."""
    def after(rewards, values, dones, last, gamma, lam):
        return estimate(rewards, values, dones, last, gamma, lam, is_before)

    def endless(rewards, values, dones, last, gamma, lam):
        return estimate(rewards, values, dones, last, gamma, lam, is_before, stops=False)
    bound = {name: name for name in ("rewards", "values", "gamma", "lam")}
    ends = {"dones": (ways.STARTS if is_before else ways.ENDS).replace("np", "torch"),
            "last": "0 * values[:, 0]"}
    found = ways.turned(ends, bound, VALUES, VALUES["cases"][0], "torch")
    assert all("return" in names for names in found)
    assert [right_gae(after, **names) for names in found[:1]] == [True]
    assert not any(right_gae(endless, **names) for names in found)


def test_time_may_be_the_first_axis_and_values_may_go_on_after_the_end():
    def by_time(rewards, values, gamma, lam):
        return estimate(rewards, values, 0 * rewards, values[len(rewards)], gamma, lam)
    bound = {name: name for name in ("rewards", "values", "gamma", "lam")}
    found = ways.turned({}, bound, VALUES, VALUES["cases"][0], "torch")
    assert found[0] == {} and "return" not in found[1]
    right = [names for names in found if right_gae(by_time, **names)]
    assert right == [{"rewards": "rewards.T", "values": f"({ways.LATER}).T".replace("np", "torch"),
                      "return": "found.T"}]


# ---- one case ----------------------------------------------------------------------------------

def plain(logps, old_logps, advantages, mask):
    ratio, A = (logps - old_logps).exp(), advantages[:, None]
    return (-torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A) * mask).sum() / mask.sum()


def found(function, **options):
    fixed = {name: str(x) for name, x in CASE["parameters"].items()}
    given = OPTIONS | {"fixed": fixed, "way": "", "detached": False} | options
    return vectors.check_case(opened(function), LOSSES, CASE, **given)


def test_a_rough_answer_is_right_in_float32_alone_and_not_with_a_tolerance_or_in_float32():
    def rough(logps, old_logps, advantages, mask):
        return plain(logps, old_logps, advantages, mask) * (1 + 4e-7)
    assert not found(plain).errors and not found(plain).remark
    assert found(rough).remark == "right in float32, but not in float64"
    assert not found(rough).errors
    assert found(rough, tolerance=1e-9).errors and not found(rough, tolerance=1e-5).errors
    assert not found(rough, dtype="float32").errors and not found(rough, dtype="float32").remark


def test_a_method_that_a_function_does_not_know_is_skipped_and_other_errors_are_not():
    def of_method(error):
        def function(logps, old_logps, advantages, mask, method, epsilon_low):
            raise error
        return function
    known = {"how": "token_mean", "epsilon_high": "0.2"}
    skipped = found(of_method(ValueError("unknown: clip")), fixed=known).skipped
    assert skipped == "the function does not know clip"
    assert found(of_method(KeyError("clip")), fixed=known).skipped
    for error in (TypeError("clip"), ValueError("0.2 clipped"), KeyError("x")):
        outcome = found(of_method(error), fixed=known)
        assert outcome.raised and not outcome.skipped, error


def test_two_values_may_be_a_sum_and_a_number_or_a_baseline_and_advantages():
    tokens = sum(map(sum, CASE["inputs"]["mask"]))
    case = CASE | {"parameters": CASE["parameters"] | {"how": "token_mean"}}
    two = torch.tensor(6.0), torch.tensor(tokens)
    results, remark = vectors.other_reading(two, LOSSES, case, "torch", True)
    assert results["loss"] == 6 / tokens and "divides it by the second value" in remark
    for other in ((torch.tensor(6.0), torch.tensor(tokens + 1)), torch.tensor(6.0),
                  (torch.tensor(6.0),), [torch.tensor(6.0), torch.tensor(tokens)]):
        assert vectors.other_reading(other, LOSSES, case, "torch", True) == ({}, "")
    case = CASE | {"parameters": CASE["parameters"] | {"how": "sequence_mean"}}
    two = torch.tensor(6.0), torch.tensor(tokens)
    assert vectors.other_reading(two, LOSSES, case, "torch", True) == ({}, "")
    content = vectors.read("advantages")
    [case, *_] = content["cases"]
    right = torch.tensor(case["right"]["advantages"])
    results, remark = vectors.other_reading((0 * right, right), content, case, "torch", True)
    assert results["advantages"] is right and remark == "right if the second value is meant"
    for second in (right[0], None, {}, right.tolist()):
        assert vectors.other_reading((right, second), content, case, "torch", True) == ({}, "")


def test_a_sum_over_tokens_may_be_divided_by_the_largest_length_later():
    case = next(one for one in LOSSES["cases"] if one["id"] == "clip, constant, second")
    [row, *_] = case["inputs"]["mask"]
    sum_of_tokens = torch.tensor(case["right"]["loss"] * len(row))
    results, remark = vectors.other_reading(sum_of_tokens, LOSSES, case, "torch", False)
    torch.testing.assert_close(results["loss"], torch.tensor(case["right"]["loss"]))
    assert "largest length" in remark
    assert vectors.other_reading(sum_of_tokens, LOSSES, case, "torch", True) == ({}, "")


def test_log_probs_may_be_sums_over_tokens_but_advantages_may_not():
    content = vectors.read("sequence_logps")
    [case] = content["cases"]
    sums = torch.tensor(case["right"]["logps"]).sum(1)
    assert vectors.with_sums(case, {"logps": sums})["right"]["logps"] == pytest.approx(
        sums.tolist(), abs=1e-6)
    assert vectors.with_sums(case, {"logps": torch.zeros(3)}) == case
    content = vectors.read("advantages")
    case = content["cases"][0]
    zeros = torch.zeros(len(case["inputs"]["rewards"]))
    assert vectors.with_sums(case, {"advantages": zeros}) == case


def test_a_constant_that_nearly_no_mistake_can_tell_is_not_a_functions_own():
    """With mu = pi_old and a cap of 1, all weights are 1, so the inverse is right, too."""
    content = vectors.read("importance_weights")

    def inverse(old_logps, sampler_logps, mask):
        return (sampler_logps - old_logps).exp().clamp(max=2) * mask
    cases = content["cases"]
    found = ways.values_of_missing(opened(inverse), content, cases, bool, OPTIONS)
    assert {"cap": "1.4", "mode": "truncate"} in found
    assert {"cap": "1.0", "mode": "mask"} not in found


def test_what_a_function_hands_on_with_its_kwargs_stays_whole():
    def inner(mask, logps=None, **rest):
        return mask, logps, rest

    def outer(mask, **given):
        return inner(mask, **given)
    outer.__globals__["inner"] = inner
    try:
        assert {*opened(outer).parameters} == {"mask", "given"}
    finally:
        del outer.__globals__["inner"]


@pytest.mark.parametrize("name, method", [
    ("vanilla", "clip"), ("dual_clip", "clip"), ("dr_grpo", "clip"), ("geo_mean", "gmpo"),
    ("sapo", "sapo"), ("unknown", None), (None, None), ("", None)])
def test_a_method_has_the_names_of_others(name, method):
    assert method_of(name) == method


def test_numbers_in_a_row_are_weighted_like_the_table_that_they_should_be():
    table = [[1.0, 2.0], [3.0, 4.0]]
    assert vectors.weighted(table) == 30 and vectors.weighted([1.0, 2.0, 3.0, 4.0]) == 10
    assert vectors.weighted(numpy.array([1.0, 2.0, 3.0, 4.0]), table) == 30
    assert vectors.weighted(table, [1.0, 2.0, 3.0, 4.0]) == 10


# ---- what a loss with one mistake shows ------------------------------------------------------

def arranged(function, likely=lambda ran: []):
    fixed = {name: str(x) for name, x in CASE["parameters"].items()}
    return ways.arranged(opened(function), LOSSES, [CASE], lambda case: True, OPTIONS | {
        "fixed": fixed, "detached": False}, likely)


def test_the_first_guess_that_is_right_wins_over_one_that_shows_a_mistake():
    def loss(logps, old_logps, advantages, keep):
        return plain(logps, old_logps, advantages, keep)
    assert arranged(loss, lambda ran: ["any"]) == ({"keep": "mask"}, {}, True, "")


def test_without_a_right_guess_the_first_one_that_shows_a_mistake_is_kept():
    def wrong(logps, old_logps, advantages, padding_mask):
        return -plain(logps, old_logps, advantages, 1 - padding_mask)

    def likely(ran):
        return ["sign"] if "0.0774912" in ran[0].errors[0] else []
    names, own, is_right, mistake = arranged(wrong, likely)
    assert names == {"padding_mask": "1 - mask"} and not is_right and mistake == "sign"
    names, own, is_right, mistake = arranged(wrong)
    assert names == {"padding_mask": "mask == 0"} and not is_right and mistake == ""


def test_an_argument_that_may_be_the_mask_has_to_be_given():
    def loss(logps, old_logps, advantages, keep=None, attention_mask=None):
        return plain(logps, old_logps, advantages, torch.ones_like(logps) if keep is None else keep)
    names, _, is_right, _ = arranged(loss)
    assert is_right and names == {"keep": "mask"}

    def wrong(logps, old_logps, advantages, keep=None):
        x = plain(logps, old_logps, advantages, torch.ones_like(logps))
        return x if keep is None else x / 2
    assert not arranged(wrong)[2]


def test_what_is_given_beside_logits_is_old():
    def loss(logits, logps, advantages, mask):
        return plain(logits.log_softmax(-1)[..., 0], logps, advantages, mask)
    names, _, is_right, _ = arranged(loss)
    assert is_right and names["logps"] == "old_logps"
