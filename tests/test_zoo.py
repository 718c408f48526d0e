"""Test examples/zoo.py: losses and advantages against numbers worked out on paper, the losses that
they equal at the ends of their ranges, and a run. Test that docs/zoo.md is up to date."""
import importlib
import itertools
import json
from math import exp, log
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, close, f64, gradient
from small_runs import SMALL, arguments

import common
import gspo
from lab import zoo as pictures
from report.logs import read_log

zoo = importlib.import_module("examples.zoo")
OLD = f64([[0.5, 0.5, 0.9], [0.1, 0.4, 0.5]])
NEW = f64([[0.7, 0.6, 0.1], [0.2, 0.1, 0.5]])           # rho is 1.4, 1.2; and 2, 1/4, 1
MASK = f64([[1, 1, 0], [1, 1, 1]])
A = f64([2, -1])
FREE = {"epsilon": 1.0, "epsilon_high": 99.0}           # a range that clips nothing


def settings(cfg):
    """The arguments that grpo.py passes to a loss."""
    return cfg.loss_type, cfg.epsilon, cfg.epsilon_high, cfg.delta


def ask(loss_type, new=NEW, old=OLD, mask=MASK, A=A, **flags):
    """Compute L_t and its weight: the gradient of the sum with respect to log pi, divided by -A.
    -> (B, T) each"""
    cfg = zoo.Config(device="cpu", loss_type=loss_type, **flags)
    logps = new.log().requires_grad_()
    loss = zoo.policy_loss(cfg, logps, old.log(), A, mask, *settings(cfg))
    gradient, = torch.autograd.grad(loss.sum(), logps)
    return loss.detach(), -gradient / A[:, None]


# ---- losses ----------------------------------------------------------------------------------

@pytest.mark.quick
@pytest.mark.parametrize("name, flags, logps, old_logps, A", [
    ("dppo_tv", {}, [[-0.01]], [[-100.01]], [1]),
    ("off_policy_mask", {}, [[-1, -500]], [[-101, -1]], [-1]),          # the second token is stale
    ("clip_cov", {"clip_cov_ratio": 1}, [[-3], [-0.5]], [[-103], [-0.5]], [-1, 1])])    # c_t: 1.25
def test_a_token_without_a_loss_has_no_gradient_even_if_its_ratio_is_inf(
        name, flags, logps, old_logps, A):
    logps = torch.tensor(logps, dtype=torch.float32, requires_grad=True)
    cfg = zoo.Config(device="cpu", loss_type=name, **flags)
    loss = zoo.policy_loss(cfg, logps, torch.tensor(old_logps, dtype=torch.float32),
                           torch.tensor(A), torch.ones_like(logps), *settings(cfg))
    assert loss[0, 0] == 0 == gradient(loss, logps)[0, 0]


@pytest.mark.quick
@pytest.mark.parametrize("name, flags, expected", [
    ("dppo_tv", {}, [[0, 1.2, 0], [2, 0, 1]]),          # |p - p_old|: 0.2, 0.1; 0.1, 0.3, 0
    ("dppo_tv", {"dppo_tv_delta": 0.05}, [[0, 0, 0], [2, 0, 1]]),       # ratio 2 goes against A
    ("dppo_kl", {}, [[0, 1.2, 0], [2, 0, 1]]),          # D_t: 0.087, 0.020; 0.037, 0.311, 0
    ("dppo_kl", {"dppo_kl_delta": 0.1}, [[1.4, 1.2, 0], [2, 0, 1]]),
    ("gmpo", {}, [[1.68 ** 0.5] * 2 + [0], [(2 * exp(-0.4)) ** (1 / 3) * x for x in (1, 0, 1)]]),
    ("vespo", {}, [[1.68 ** 2 * exp(3 * -0.68)] * 2 + [0], [0.5 ** 3 * exp(2 * 0.5)] * 3]),
    ("off_policy_mask", {"off_policy_mask_threshold": 0.2}, [[0, 1.2, 0], [0, 0, 0]]),  # 0.231
    ("clip_cov", {}, [[0, 0, 0], [2, 0, 1]]),           # c_t: 1.33, 1.05; 0.62, 1.45, -0.48
    ("clip_cov", {"clip_cov_lb": 1.1}, [[0, 1.2, 0], [2, 0, 1]]),
    ("kl_cov", {"kl_cov_ratio": 0.4}, [[1.4 - 1 / 2, 1.2, 0], [2, 0.25 - 1, 1]]),
    ("dro", {}, [[1 - log(1.4) / 2, 1 - log(1.2) / 2, 0], [1 + log(2), 1 - log(4), 1]])])
def test_the_weight_of_a_token_is_that_of_the_equation(name, flags, expected):
    for new in (NEW, torch.where(MASK > 0, NEW, 1e-30)):        # whatever a masked slot holds
        loss, weight = ask(name, new=new, **flags)
        close(weight, f64(expected))
        assert (loss[MASK == 0] == 0).all()


@pytest.mark.quick
def test_what_is_done_to_good_outputs_is_not_done_to_bad_ones():
    shrunk = (0.25 * exp(0.4)) ** (1 / 3)
    for name, flags, expected in (
            ("gmpo", {}, [[1.68 ** 0.5] * 2 + [0], [0, shrunk, shrunk]]),
            ("vespo", {}, [[1.68 ** 3 * exp(2 * -0.68)] * 2 + [0], [0.5 ** 2 * exp(3 * 0.5)] * 3]),
            ("off_policy_mask", {"off_policy_mask_threshold": 0.2}, [[1.4, 1.2, 0], [0, 0.25, 1]])):
        close(ask(name, A=-A, **flags)[1], f64(expected))


@pytest.mark.quick
def test_all_are_reinforce_where_the_policy_has_not_moved():
    for name in zoo.LOSS_TYPES:
        flags = {"clip_cov_lb": 4.0} if name == "clip_cov" else {}      # no token is a candidate
        close(ask(name, new=OLD, **flags)[1], MASK)


@pytest.mark.quick
def test_at_the_end_of_a_range_they_are_losses_of_the_scripts():
    close(ask("dppo_tv", dppo_tv_delta=1.0), ask("dapo", **FREE))
    close(ask("kl_cov", kl_cov_coef=1e-300), ask("dapo", **FREE))
    close(ask("clip_cov", clip_cov_lb=4.0), ask("dapo"))
    close(ask("off_policy_mask"), ask("grpo"))          # log(2) / 3 = 0.231 nats per token
    close(ask("off_policy_mask", delta=1.5), ask("grpo", delta=1.5))
    one = {"new": NEW[:, :1], "old": OLD[:, :1], "mask": MASK[:, :1]}       # outputs of one token
    close(ask("gmpo", gmpo_epsilon=9.0, **one), ask("dapo", **FREE, **one))
    wide = gspo.policy_loss(NEW.log(), OLD.log(), A, MASK, "grpo", 1.0, 99.0)
    close(ask("gmpo", gmpo_epsilon=9.0)[0], wide)       # without a clip, it is GSPO
    close(ask("dro", dro_beta=1e-300)[1], MASK)


@pytest.mark.quick
def test_a_share_of_the_candidates_is_drawn_anew_for_other_numbers():
    old = OLD.repeat(8, 4)[:, :8]
    mask = torch.ones(16, 8).double()
    mask[:, 6:] = 0
    cfg = zoo.Config(device="cpu", loss_type="clip_cov", clip_cov_ratio=0.1, clip_cov_lb=0.01)
    chosen = []
    for shift in (0.0, 0.0, 1e-6):
        logps = old.log() - shift * torch.arange(128).view(16, 8)
        loss = zoo.clip_cov(logps, old.log(), A.repeat(8)[:, None].expand(16, 8), mask, cfg)
        chosen.append((loss == 0) & (mask > 0))
    assert chosen[0].sum() == 9 and chosen[2].sum() == 9                # int(0.1 * 96)
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0], chosen[2])


# ---- advantages ------------------------------------------------------------------------------

R = f64([[1, 0, 0, 1], [0, 0, 0.5, 0], [1, 1, 1, 1]])
LENGTHS = f64([[1, 2, 3, 2], [1, 1, 2, 4], [1, 2, 3, 4]])
SLOTS = (torch.arange(4) < LENGTHS.view(12, 1)).double()


@pytest.mark.quick
def test_advantages_are_those_worked_out_by_hand():
    close(zoo.passk(R), f64([[0] * 4, [0, 0, 0.5, 0], [0] * 4]))
    close(zoo.opo(R, LENGTHS), R - f64([[3 / 8], [1 / 8], [1]]))
    close(zoo.opo(R, torch.ones(3, 4)), R - R.mean(dim=1, keepdim=True))        # equal lengths
    x = zoo.grpo.advantages(R) + zoo.grpo.advantages(LENGTHS)
    close(zoo.gdpo([R, 99 * LENGTHS]), (x - x.mean()) / x.std(), atol=1e-3, rtol=0)
    x = (R - (LENGTHS * R).sum() / 26).view(12, 1) * SLOTS              # there are 26 tokens
    close(zoo.rpp(R, SLOTS), x / (x.square().sum() / 25 + 1e-8).sqrt())
    centred = R - R.mean(dim=1, keepdim=True)
    close(zoo.rpp(R, SLOTS, has_baseline=True), zoo.rpp(centred, SLOTS))


@pytest.mark.quick
def test_the_baseline_of_a_place_weighs_rewards_by_the_gradients_so_far():
    norms = torch.cat([LENGTHS.view(12, 1), torch.ones(12, 3)], dim=1)      # W: |o|, |o| + 1, ...
    found = zoo.otb(R, norms, SLOTS)
    close(found[0], f64([1 - 3 / 8, 0, 0, 0]))
    close(found[2], f64([-3 / 8, -3 / 10, 0, 0]))       # only this row has a third token
    assert (found[8:] == 0).all()


@pytest.mark.quick
def test_rewards_that_are_equal_give_exactly_nothing():
    """In float32, the mean of many times 0.7 is not 0.7, and whitening enlarges the difference."""
    mask = (torch.arange(4) < torch.tensor([1, 2, 3] * 12)[:, None]).float()
    rewards = torch.tensor([[0.7], [1.1], [0.3]]).repeat(1, 12)
    assert (zoo.rpp(rewards, mask, has_baseline=True) == 0).all()
    for reward in (0.7, 1.1):
        assert (zoo.rpp(torch.full((3, 12), reward), mask) == 0).all()
    assert zoo.rpp(rewards, mask).abs().max() > 1


@pytest.mark.quick
@pytest.mark.parametrize("name", zoo.ADVANTAGES)
def test_groups_of_equal_rewards_are_replaced_only_where_they_would_give_nothing(name, monkeypatch):
    """The terms of the first group differ, although their sums are equal."""
    terms = torch.tensor([[[0, 0, 1], [0.5] * 3, [1, 0, 0]], [[0, 1, 0], [0.1] * 3, [0] * 3],
                          [[0.7, -0.3, -0.3], [0.1] * 3, [0] * 3]])
    mask = (torch.arange(4) < torch.tensor([1, 2, 3] * 3)[:, None]).float()
    monkeypatch.setattr(zoo, "gradient_norms", lambda *_: mask)
    monkeypatch.setattr(zoo, "greedy_rewards", lambda *_: torch.zeros(3, 1))
    task = SimpleNamespace(rows=lambda *_: dict(enumerate(terms)))
    batch = SimpleNamespace(rewards=terms.sum(dim=0), mask=mask)    # two groups of 0.7, then 1 0 0
    cfg = zoo.Config(device="cpu", advantage=name, reward="accuracy+format+length",
                     dynamic_sampling=1)
    A = zoo.advantages(None, task, batch, cfg, 0)
    is_refused = any("--dynamic_sampling" in said for holds, said in cfg.rules() if not holds)
    assert is_refused == A[:6].any()


@pytest.mark.quick
def test_a_baseline_keeps_the_expected_gradient_of_sums_and_changes_that_of_means():
    """Enumerate all outputs of up to two tokens; token 2 ends an output. The rows of theta are the
    policy's logits at the first position, after token 0 and after token 1. Weighted by their
    probabilities, the outputs are one group, so its baselines are those of the population."""
    tokens = torch.tensor([(2, 0), *itertools.product((0, 1), (0, 1, 2))])      # (7, 2)
    lengths = f64([1] + [2] * 6)
    mask = (torch.arange(2) < lengths[:, None]).double()
    rewards = f64([1, 0, 0, 2, 1, -1, 3])
    theta = f64([[0.3, -0.2, 0.5], [1, 0, -1], [0.2, 0.4, -0.5]]).requires_grad_()
    log_p = theta.log_softmax(dim=1)[torch.stack([0 * tokens[:, 0], 1 + tokens[:, 0] % 2], dim=1)]
    logps = log_p.gather(2, tokens[:, :, None])[:, :, 0] * mask                 # (7, 2)
    pi = logps.sum(dim=1).exp()
    p = pi.detach()[:, None]                                                    # (7, 1)
    sizes = (1 - 2 * logps.exp() + log_p.exp().square().sum(dim=2)).detach()    # eq. (16)
    without, R = rewards[:, None] * mask, rewards[None]
    for name, A in {"none": without, "mean": zoo.opo(R, p.T), "opo": zoo.opo(R, p.T * lengths),
                    "remax": R - 2, "otb": zoo.otb(R, p * sizes, mask)}.items():
        A = A.view(7, -1) * mask
        token_loss = zoo.grpo.policy_loss(logps, logps, A, mask)
        found = {how: gradient(sum(
            p[i] * zoo.grpo.aggregate(token_loss[[i]], mask[[i]], how, max_length=2)
            for i in range(7)), theta) for how in ("constant", "sequence_mean")}
        close(found["constant"], -gradient(pi @ rewards / 2, theta))
        change = found["sequence_mean"] + gradient(pi @ (rewards / lengths), theta)
        if name != "otb":                               # the baseline is one number
            close(change, (without - A)[0, 0] * gradient(pi @ (1 / lengths), theta))
        assert (change.abs().max() > 0.01) == (name != "none"), name


def test_a_baseline_that_contains_the_own_reward_changes_the_mean_gradient_of_a_group():
    """Enumerate all groups of four, drawn from three outputs; the policy is a softmax over them."""
    p, rewards, lengths = f64([0.2, 0.3, 0.5]), f64([1, 1, 0]), f64([33, 4, 4])
    norms = 1 - 2 * p + p.square().sum()                                        # eq. (16)
    means = dict.fromkeys(("remax", "opo", "otb"), 0.0)
    for group in map(torch.tensor, itertools.product(range(3), repeat=4)):
        r = rewards[group][None]
        grads = torch.eye(3)[group] - p                                         # of log p
        for name, A in {"remax": r - rewards[2], "opo": zoo.opo(r, lengths[group][None]),
                        "otb": zoo.otb(r, norms[group][:, None], torch.ones(4, 1))}.items():
            means[name] = means[name] + p[group].prod() * A.view(4) @ grads / 4
    close(means["remax"], p * (rewards - p @ rewards))
    page = " ".join(PAGE.split())
    for name, mean in means.items():
        numbers = ", ".join(f"{x:.3f}" for x in mean.tolist())
        assert f"({numbers})" in page, (name, numbers)


def test_gradient_norms_are_those_of_log_pi_in_the_logits():
    cfg = zoo.Config(**SMALL | {"base_steps": 0, "temperature": 0.7, "micro_batch_size": 3})
    policy = zoo.grpo.GPT(cfg)
    policy.embed.weight.data *= 20                      # so that tokens differ
    batch = zoo.grpo.sample_batch(policy, common.load_task(cfg, zoo.grpo.verify), cfg, 0)
    hidden = zoo.grpo.completion_states(policy, batch.prompts, batch.tokens)
    logits = (hidden @ policy.embed.weight.T / 0.7).detach().requires_grad_()
    logps, _ = zoo.grpo.logprobs(logits, batch.tokens)
    (logps * batch.mask).sum().backward()
    expected = logits.grad.square().sum(dim=-1)
    torch.testing.assert_close(
        zoo.gradient_norms(policy, batch, cfg), expected, atol=1e-4, rtol=1e-3)


# ---- runs ------------------------------------------------------------------------------------

def test_what_the_zoo_calls_grpo_is_grpo(at_work_folder, tmp_path):
    flags = SMALL | {"loss_type": "grpo", "max_steps": 3}
    for script, name in ((zoo, "zoo"), (zoo.grpo, "grpo")):
        script.main(arguments(flags | {"output_dir": tmp_path / name}))
    logs = [read_log(tmp_path / name, "metrics", "loss") for name in ("zoo", "grpo")]
    assert [(one["loss"], one["grad_norm"]) for one in logs[0]] == [
        (one["loss"], one["grad_norm"]) for one in logs[1]]


# ---- the page --------------------------------------------------------------------------------

PAGE = (ROOT / "docs/zoo.md").read_text()


@pytest.mark.parametrize("title, good, bad", [
    ("PPO, GRPO", [0.7, 1.1, 0], [0, 1.1, 1.3]), ("KL-Cov, some tokens", [1.2, 0.6, 0.8],
                                                  [0.2, 1.6, 1.8])])
def test_the_picture_shows_how_much_a_token_counts_at_ratios_below_and_above_one(title, good, bad):
    for A, expected in ((1.0, good), (-1.0, bad)):
        shown = [pictures.PANELS[title].weight(A, ratio) for ratio in (0.7, 1.1, 1.3)]
        assert shown == pytest.approx(expected, abs=1e-3)


def test_the_tables_are_what_the_functions_compute_today():
    runs = json.loads((ROOT / "docs/zoo.json").read_text())["runs"]
    assert list(runs) == list(pictures.commands())
    assert pictures.credit_table() in PAGE and pictures.learning_table(runs) in PAGE


def test_every_name_that_a_trainer_registers_is_found_on_the_page():
    found = json.loads((ROOT / "docs/conformance.json").read_text())["registered"]
    assert len(found) == 3 and all(len(names) > 7 for names in found.values())
    for names in found.values():
        assert all(f"`{name}`" in PAGE for name in names)
