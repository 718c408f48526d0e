"""How the vectors find what anybody's arguments stand for, part by part."""
import numpy
import pytest
import torch

import vectors
from vectors import ways
from vectors.binding import opened

OPTIONS = {"tool": "torch", "dtype": "float64", "tolerance": None, "fixed": {}, "settings": {}}
LOSSES = vectors.read("policy_loss")
CASE = next(one for one in LOSSES["cases"] if one["id"] == "clip")
PAIRS = vectors.read("pair_loss")
TOKENS, PAIR = ["logps", "old_logps", "advantages", "mask"], [
    "chosen", "rejected", "ref_chosen", "ref_rejected", "mask_chosen", "mask_rejected"]


@pytest.mark.parametrize("name, inputs, texts", [
    ("padding_mask", TOKENS, ["mask == 0", "1 - mask", "mask"]),
    ("is_pad", TOKENS, ["mask == 0", "1 - mask", "mask"]),
    ("prompt_masks", TOKENS, ["mask == 0", "1 - mask", "mask"]),
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
    front, back, both = found
    known = vectors.arrays(CASE["inputs"], LOSSES["integers"], "torch", "float64")
    library = {"torch": torch}
    assert front["logits"] == back["coef"] == logits or back["coef"] == "0.0"
    assert {*front} == {*names, "old", "A", "keep"} and {*back} == {*names}
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
    results, remark = vectors.other_reading(two, LOSSES, case)
    assert results["loss"] == 6 / tokens and "divides it by the second value" in remark
    for other in ((torch.tensor(6.0), torch.tensor(tokens + 1)), torch.tensor(6.0),
                  (torch.tensor(6.0),), [torch.tensor(6.0), torch.tensor(tokens)]):
        assert vectors.other_reading(other, LOSSES, case) == ({}, "")
    case = CASE | {"parameters": CASE["parameters"] | {"how": "sequence_mean"}}
    two = torch.tensor(6.0), torch.tensor(tokens)
    assert vectors.other_reading(two, LOSSES, case) == ({}, "")
    content = vectors.read("advantages")
    [case, *_] = content["cases"]
    right = torch.tensor(case["right"]["advantages"])
    results, remark = vectors.other_reading((0 * right, right), content, case)
    assert results["advantages"] is right and remark == "right if the second value is meant"
    for second in (right[0], None, {}, right.tolist()):
        assert vectors.other_reading((right, second), content, case) == ({}, "")


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
