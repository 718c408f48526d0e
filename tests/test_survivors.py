"""Mistakes that once went unseen (see mutants.py): each test here is one that was missing."""
import copy
import dataclasses
from types import SimpleNamespace

import policies
import pytest
import torch
from conftest import SCRIPTS, every_script, scripts

talker, bigram = policies.talker, policies.bigram


@pytest.fixture
def learn(script, talker, monkeypatch):
    """learn(gradient, **flags) -> the metrics of four steps of main, on made-up rewards, by a policy that had
    this gradient before."""
    def run_main(gradient=0.0, **flags):
        logged = []

        class Run:
            weights = None

            def __init__(self, cfg, model, *_):
                self.model, self.resumed, self.state = model, None, {}

            def base(self, *_):
                for weight in self.model.parameters():
                    weight.grad = torch.full_like(weight, gradient)

            def steps(self, *_, **__):
                return range(4)

            def log(self, metrics, batch, *_, **__):
                logged.append(script.common.describe(batch) | metrics)

            def finish(self):
                pass
        monkeypatch.setattr(script.common, "Run", Run)
        monkeypatch.setattr(script, "GPT", talker)
        monkeypatch.setattr(script, "verify", lambda problem, text: float(len(text) % 2))
        flags = {"device": "cpu", "operands": 3, "hidden_size": 16, "intermediate_size": 16, "num_prompts": 4,
                 "num_generations": 4, "max_completion_length": 6, "num_mini_batches": 1,
                 "learning_rate": 0.03} | flags
        script.main([f"--{name}={value}" for name, value in flags.items()])
        return logged
    return run_main


@pytest.fixture
def sampled(script, config, talker):
    """sampled(**changes) -> cfg, policy, a reference some way off, a batch of the policy, in float64."""
    def make(**changes):
        cfg = config(**changes)
        policy = talker(cfg).double()
        ref, draw = copy.deepcopy(policy), torch.Generator().manual_seed(0)
        for weight in ref.parameters():
            weight.data += 0.1 * torch.randn(weight.shape, generator=draw).to(weight)
        batch = script.sample_batch(policy, cfg, 0)
        batch.rewards = torch.randn(batch.rewards.shape, generator=draw).double()
        batch.verdicts = batch.rewards.view(-1).tolist()
        return cfg, policy, ref, batch
    return make


# ---- what all scripts share -----------------------------------------------------------------------------


@every_script
def test_moving_every_position_by_the_same_amount_changes_nothing_a_block_computes(script, config):
    """Only the distance of two tokens counts, as it does if a rotation, not a mirror, tells the position."""
    block = script.GPT(config()).blocks[0].double()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)).double()

    def read(positions):
        angles = positions[:, None].double() * torch.tensor([1.0, 0.3]).double()        # (L, hd / 2)
        seen = torch.ones(5, 5).tril().bool().repeat(block.H // block.KV, 1)
        return block(x, angles.cos(), angles.sin(), seen, None)
    for start in (1, 7, 1000):
        torch.testing.assert_close(read(torch.arange(5) + start), read(torch.arange(5)), atol=1e-9, rtol=0)
    assert (read(torch.arange(5) * 2) - read(torch.arange(5))).abs().max() > 1e-3


@scripts("reinforce", "ppo", "grpo", "gspo")
def test_the_reference_stays_where_the_policy_began(learn):
    kl = [metrics["kl"] for metrics in learn(num_iterations=1)]             # so that it grows from 0
    assert abs(kl[0]) < 1e-4 < 0.01 < kl[3]


@pytest.mark.parametrize("script, flags", [
    *((name, {}) for name in SCRIPTS), ("ppo", {"trust_region": "trpo"})], indirect=["script"])
def test_a_gradient_that_the_warm_start_left_behind_is_not_learned_from(learn, flags):
    """Else a run that makes its base would differ from one that finds it made."""
    logged = [[metrics["entropy"] for metrics in learn(left_behind, **flags)] for left_behind in (0.0, 1.0)]
    assert logged[0] == logged[1] and len(set(logged[0])) == 4


@every_script
@pytest.mark.parametrize("changes", [{"step": 1}, {"seed": 1}])
def test_the_same_prompts_get_other_completions_in_another_step_and_with_another_seed(
        script, config, talker, monkeypatch, changes):
    cfg = config()
    problems = script.common.sample_problems("arithmetic", 4, 0, operands=3)
    monkeypatch.setattr(script.common, "sample_problems", lambda *_, **__: problems)
    policy = talker(cfg)
    cfgs = cfg, dataclasses.replace(cfg, seed=changes.get("seed", 0))
    one, other = (script.sample_batch(policy, c, step) for c, step in zip(cfgs, (0, changes.get("step", 0))))
    assert one.problems == other.problems and not torch.equal(one.out.tokens, other.out.tokens)


@every_script
def test_the_warm_start_learns_every_token_of_a_completion_its_eos_included_and_no_padding(script, config):
    """The gradient that its first batch leaves behind is that of the mean over these tokens."""
    cfg = config(base_steps=1, base_batch_size=7, base_learning_rate=0.0)
    model = script.GPT(cfg).double()
    script.warm_start(model, cfg, lambda label, steps: steps)
    found = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    total, count = 0.0, 0
    for problem, text in script.common.sample_corpus("arithmetic", 7, (0, 0), "textbook", operands=3):
        ids = script.TOKENIZER.encode(text, allowed_special="all") + [script.EOS]
        prompt = script.encode_prompts([problem.prompt], cfg)
        logits = model(torch.cat([prompt, torch.tensor([ids])], 1))[0, prompt.shape[1] - 1:-1]
        total = total - logits.log_softmax(-1)[range(len(ids)), ids].sum()
        count += len(ids)
    (total / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(found, [weight.grad for weight in model.parameters()], atol=1e-10, rtol=0)


@every_script
def test_the_warm_start_reads_six_tenths_of_a_textbook_then_a_forum_and_nothing_twice(
        script, config, monkeypatch):
    read, real = [], script.common.sample_corpus
    monkeypatch.setattr(script.common, "sample_corpus", lambda *args, **options: read.append(args[2:4])
                        or real(*args, **options))
    cfg = config(base_steps=10, base_batch_size=2)
    shown = []
    script.warm_start(script.GPT(cfg), cfg, lambda *args: shown.append(args) or args[1])
    assert shown == [("warm start", range(10))]
    assert [phase for _, phase in read] == ["textbook"] * 6 + ["forum"] * 4 and len(set(read)) == 10


@every_script
def test_the_warm_start_does_not_learn_what_a_tool_says_but_what_is_said_around_it(
        script, config, monkeypatch):
    seen, real = [], script.logprobs

    def logprobs(logits, tokens, *options):
        logps, entropy = real(logits, tokens, *options)
        logps.retain_grad()
        seen.append((tokens, logps))
        return logps, entropy
    monkeypatch.setattr(script, "logprobs", logprobs)
    cfg = config(task="lookup", base_steps=1, base_batch_size=16, textbook=1.0)
    script.warm_start(script.GPT(cfg), cfg, lambda label, steps: steps)
    told, others = [], []
    for tokens, logps in seen:
        for ids, gradient in zip(tokens.tolist(), logps.grad.tolist()):
            inside = False
            for token, g in zip(ids, gradient):
                word = script.decode([token])
                inside = (inside or word == "<information>") and word != "</information>"
                told += [g] if inside else []
                others += [g] if not inside and word not in ("</information>", "<|pad|>") else []
    assert len(told) > 30 and not any(told) and len(others) > 100 and all(others)


# ---- grpo.py, gspo.py -----------------------------------------------------------------------------------


@scripts("grpo", "gspo")
def test_a_gradient_too_long_for_a_float_stops_the_run_before_a_weight_is_touched(
        script, config, talker, capsys):
    cfg = config()
    policy = talker(cfg)
    batch, start = script.sample_batch(policy, cfg, 0), copy.deepcopy(policy.state_dict())
    batch.out.logps[0] -= 50 * batch.out.mask[0]            # the ratio is e^50, the square of it infinite
    A = torch.full((16,), -1.0)
    with pytest.raises(SystemExit):
        script.update(policy, policy, torch.optim.SGD(policy.parameters()), batch, A, cfg, 0)
    assert "'grad_norm': inf" in capsys.readouterr().err
    torch.testing.assert_close(policy.state_dict(), start, atol=0, rtol=0)


# ---- reinforce.py ---------------------------------------------------------------------------------------


@scripts("reinforce")
def test_the_squared_norms_are_those_of_the_gradient_of_each_completion(script, sampled):
    cfg, policy, _, batch = sampled(temperature=0.7, micro_batch_size=3)
    norms = script.squared_gradient_norms(policy, batch, cfg)
    for row, norm in enumerate(norms):
        rows = slice(row, row + 1)
        logps, _ = script.score(policy, batch.prompts, batch.of[rows], batch.out.tokens[rows], 0.7)
        gradients = torch.autograd.grad((logps * batch.out.mask[rows]).sum(), list(policy.parameters()))
        torch.testing.assert_close(norm, sum((g ** 2).sum() for g in gradients), atol=0, rtol=1e-9)
    assert len(norms) == 16 and norms.max() > 1.1 * norms.min() > 0


@scripts("reinforce")
@pytest.mark.parametrize("baseline", ["none", "mean", "rloo", "batch", "optimal"])
def test_the_baseline_of_the_returns_is_subtracted_from_every_reward_to_go(script, sampled, baseline):
    cfg, policy, ref, batch = sampled(view="token", baseline=baseline, beta=0.1, gamma=0.9)
    A, mask = script.credit(policy, ref, batch, cfg), batch.out.mask
    assert not A.requires_grad and (A[mask == 0] == 0).all()        # a loss has no gradient through a reward
    ref_logps, _ = script.score(ref, batch.prompts, batch.of, batch.out.tokens)
    rewards = -0.1 * (batch.out.logps - ref_logps.detach())
    rewards[range(16), mask.sum(1).long() - 1] += batch.rewards.view(-1)
    to_go = script.rewards_to_go(rewards, mask, 0.9)
    R, norms = to_go[:, 0].view(4, 4), script.squared_gradient_norms(policy, batch, cfg).view(4, 4)
    b = (R - script.advantages(R, baseline, norms)).view(16, 1)
    torch.testing.assert_close(A, (to_go - b) * mask, atol=1e-9, rtol=0)


# ---- ppo.py ---------------------------------------------------------------------------------------------


@scripts("ppo")
def test_the_critic_learns_from_the_gradient_of_this_step_alone(script, sampled):
    cfg, policy, _, batch = sampled()
    zeros, ends = torch.zeros_like(batch.out.mask), []
    for before in (0.0, 1.0):
        critic = script.Critic(policy)
        for weight in critic.parameters():
            weight.grad = torch.full_like(weight, before)
        credit = SimpleNamespace(values=zeros, returns=zeros + 1)
        script.fit_critic(critic, torch.optim.SGD(critic.parameters()), batch, credit, torch.arange(16), cfg)
        ends.append(critic.head.detach())
    assert torch.equal(*ends) and ends[0].norm() > 1e-4


@scripts("ppo")
@pytest.mark.parametrize("trust_region, passes", [("clip", 1), ("penalty", 4)])
def test_only_with_the_clip_do_passes_end_early(script, sampled, monkeypatch, trust_region, passes):
    cfg, policy, _, batch = sampled(trust_region=trust_region, target_kl=1e-9, num_iterations=4)
    seen, real, zeros = [], script.backward, torch.zeros_like(batch.out.mask)
    batch.out.logps.mul_(1.1)                               # the policy is far from those already
    monkeypatch.setattr(script, "backward", lambda *args: seen.append(real(*args)) or seen[-1])
    critic = script.Critic(policy)
    optimizers = [torch.optim.SGD(model.parameters()) for model in (policy, critic)]
    credit = SimpleNamespace(advantages=zeros + 1, values=zeros, returns=zeros, kl=0.0)
    script.update(policy, critic, *optimizers, batch, credit, cfg, 0, 1.0)
    assert len(seen) == passes


@scripts("ppo")
def test_the_coefficients_adapt_each_to_its_own_kl(script, learn):
    """beta to that from the base, which grows; that of the penalty to that from the policy that sampled."""
    logged = learn(trust_region="penalty", num_iterations=2, beta=0.1, kl_target=0.5, target_kl=1e-6)
    for now, then in zip(logged, logged[1:]):
        assert then["beta"] == script.adapted(now["beta"], now["kl"], 0.5)
        assert then["penalty_coef"] == script.adapted(now["penalty_coef"], now["policy_kl"], 1e-6)
    assert logged[1]["beta"] == 0.05 and logged[0]["kl"] < 1e-6 < logged[0]["policy_kl"]
    assert logged[1]["penalty_coef"] == 2.0 and logged[0]["beta"] == 0.1
    assert {metrics["penalty_coef"] for metrics in learn(target_kl=1e-6)} == {1.0}      # the clip has none


@scripts("ppo")
def test_before_training_the_critic_learns_whole_returns_while_the_policy_stays(script, learn, monkeypatch):
    seen, real = [], script.assign_credit

    def spy(critic, ref, batch, cfg, beta, critic_lam):
        seen.append((critic_lam, batch.out.mask.sum().item()))
        return real(critic, ref, batch, cfg, beta, critic_lam)
    monkeypatch.setattr(script, "assign_credit", spy)
    with_it, without = learn(critic_pretrain_steps=3, critic_lam=0.5), learn()
    assert [lam for lam, _ in seen] == [1.0] * 3 + [0.5] * 4 + [-1.0] * 4
    assert seen[3][1] == seen[7][1] and with_it[0]["entropy"] == without[0]["entropy"]
    assert with_it[0]["explained_variance"] != without[0]["explained_variance"]


# ---- dpo.py ---------------------------------------------------------------------------------------------


@scripts("dpo")
def test_the_best_of_a_group_is_paired_with_its_worst_and_so_on_inwards_while_they_differ(script):
    rewards = torch.tensor([[0.0, 3, 1, 2], [5, 5, 5, 5], [0, 1, 0, 0], [1, 0, 1, 1]])
    chosen, rejected = script.preferences(rewards)
    assert list(zip(chosen.tolist(), rejected.tolist())) == [(1, 0), (3, 2), (9, 11), (12, 13)]
    chosen, rejected = script.preferences(rewards[:, :3])                   # the middle one has no partner
    assert list(zip(chosen.tolist(), rejected.tolist())) == [(1, 0), (7, 8), (9, 10)]
    assert all(len(rows) == 0 for rows in script.preferences(torch.ones(2, 4)))


@scripts("dpo")
def test_a_pair_is_ordered_if_the_chosen_gained_more_than_the_rejected_even_if_both_lost(
        script, config, bigram):
    """Log-probs against the base: of token 4 -2, of 5 -1, of 6 +1."""
    likely = torch.zeros(script.VOCAB, script.VOCAB).double()
    change = likely.clone()
    change[1, 4:7] = torch.tensor([-2.0, -1.0, 1.0]).double()
    policy, ref, cfg = bigram(likely + change), bigram(likely), config(beta=0.1)
    tokens, mask = torch.tensor([[4], [5], [6]]), torch.ones(3, 1).double()
    out = script.Rollout(tokens, mask, mask, mask, mask.sum(1).long())
    batch = SimpleNamespace(prompts=torch.ones(1, 1).long(), of=torch.zeros(3).long(), out=out)
    for good, bad, ordered in ((1, 0, 1.0), (2, 0, 1.0), (0, 1, 0.0), (1, 2, 0.0)):
        loss, metrics = script.compare(policy, ref, batch, torch.tensor([good]), torch.tensor([bad]), cfg)
        assert metrics["rewards/accuracies"].item() == ordered
        margin = 0.1 * (change[1, 4 + good] - change[1, 4 + bad])
        torch.testing.assert_close(metrics["rewards/margins"], margin[None], atol=1e-9, rtol=0)


@scripts("dpo")
@pytest.mark.parametrize("online", ["no", "yes"])
def test_the_base_answers_held_out_problems_to_measure_and_it_or_the_policy_those_to_learn_from(
        script, learn, monkeypatch, online):
    seen, models, real = [], [], script.sample_batch

    def spy(model, cfg, step, weights=None, split="train"):
        models.append(model)
        seen.append((step, split, model is models[0]))
        return real(model, cfg, step, weights, split)
    monkeypatch.setattr(script, "sample_batch", spy)
    learn(online=online)
    assert seen == [("pairs", "test", True), *((step, "train", online == "no") for step in range(4))]
