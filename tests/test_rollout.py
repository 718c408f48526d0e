"""A rollout samples what the policy would say, token by token, each row by itself."""
import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch

import common
import grpo

PROMPTS = ["(3+4)=", "((1+2)-1)=", "((9*2)-8)=", "(5-5)=", "((2*7)+6)=", "((8-3)*4)="]


@dataclasses.dataclass
class Sampled:
    cfg: common.Config
    task: common.Task
    policy: torch.nn.Module
    prompts: torch.Tensor       # (B, W) copies of a prompt stand side by side
    uniforms: torch.Tensor      # (B, T)
    out: common.Rollout

    def rollout(self, prompts, uniforms=None):
        problems = [None] * len(prompts)                # the task never asks for them
        return grpo.rollout(self.policy, prompts, problems, self.task, self.cfg, uniforms)


@pytest.fixture
def sampled(config, talker, load_task):
    """sampled(copies, dtype, **changes): the rollout of copies of six prompts."""
    def make(copies=4, dtype=torch.float64, **changes):
        cfg = config(**({"max_completion_length": 12} | changes))
        task = load_task(cfg)
        policy = talker(cfg).to(dtype)
        prompts = grpo.encode_prompts(PROMPTS, task, "cpu").repeat_interleave(copies, dim=0)
        uniforms = torch.rand(
            len(prompts), cfg.max_completion_length, generator=torch.Generator().manual_seed(0))
        one = Sampled(cfg, task, policy, prompts, uniforms, None)
        one.out = one.rollout(prompts, uniforms)
        return one
    return make


# ---- the numbers of a rollout ----------------------------------------------------------------

@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("num_key_value_heads", [1, 2, 4])
def test_rollout_logps_equal_forward_logps_at_the_same_temperature(
        sampled, temperature, num_key_value_heads):
    one = sampled(dtype=torch.float32, temperature=temperature,
                  num_key_value_heads=num_key_value_heads)
    out = one.out
    lengths = out.lengths
    assert lengths.min() < 4
    assert lengths.max() == 12
    assert len(lengths.unique()) > 5                    # rows end at many times
    logps, entropy = grpo.score(one.policy, one.prompts, out.tokens, temperature)
    torch.testing.assert_close(out.logps, logps * out.mask, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.entropy, entropy * out.mask, atol=1e-5, rtol=0)
    other_logps, _ = grpo.score(one.policy, one.prompts, out.tokens, 1.3)
    assert ((other_logps - logps) * out.mask).abs().max() > 0.1


def test_the_scores_of_a_token_are_read_from_the_logits_of_all_before_it(sampled):
    one = sampled(copies=1)
    tokens = one.out.tokens
    logps, entropy = grpo.score(one.policy, one.prompts, tokens, 0.7)
    for i in range(len(PROMPTS)):
        for t in range(12):                             # every prefix in a forward pass of its own
            prefix = torch.cat([one.prompts[i], tokens[i, :t]])[None]
            p = torch.softmax(one.policy(prefix)[0, -1] / 0.7, dim=-1)
            expected = (p[tokens[i, t]].log(), -(p * p.log()).sum())
            torch.testing.assert_close((logps[i, t], entropy[i, t]), expected, atol=1e-10, rtol=0)


def test_the_mask_is_1_up_to_the_first_eos_or_to_the_end_of_a_truncated_row(sampled):
    out = sampled().out
    for row in range(24):
        tokens = out.tokens[row].tolist()
        n = tokens.index(grpo.EOS) + 1 if grpo.EOS in tokens else 12
        assert out.lengths[row] == n
        assert out.mask[row].tolist() == [1.0] * n + [0.0] * (12 - n)
        assert tokens[n:] == [grpo.PAD] * (12 - n)
        for values in (out.logps[row], out.entropy[row]):
            assert (values[:n] != 0).all()
            assert (values[n:] == 0).all()
    is_ended = (out.tokens == grpo.EOS).any(dim=1)
    assert is_ended.any()
    assert not is_ended.all()


def test_a_pad_that_the_policy_sampled_is_a_token_like_any_other(config, bigram, load_task):
    logits = torch.full((grpo.VOCAB_SIZE, grpo.VOCAB_SIZE), -30.0, dtype=torch.float64)
    logits[61, grpo.PAD] = 0.0                          # after the = of the prompt
    logits[grpo.PAD, grpo.PAD] = 0.0
    logits[grpo.PAD, grpo.EOS] = 0.0
    cfg = config(max_completion_length=6)
    task = load_task(cfg)
    prompts = grpo.encode_prompts(["(1+1)="] * 40, task, "cpu")
    uniforms = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    out = grpo.rollout(bigram(logits), prompts, [None] * 40, task, cfg, uniforms)
    lengths = out.lengths.tolist()
    assert len(set(lengths)) > 2
    for tokens, mask, n in zip(out.tokens.tolist(), out.mask.tolist(), lengths):
        assert mask == [1.0] * n + [0.0] * (6 - n)
        ends = tokens[:n] == [grpo.PAD] * (n - 1) + [grpo.EOS]
        assert ends or (n == 6 and grpo.EOS not in tokens)
    assert grpo.completion_texts(out)[lengths.index(3)] == "<|pad|><|pad|>"


def test_the_texts_are_the_completions_without_eos_and_what_is_behind_it():
    tokens = [[*b"<1>", grpo.EOS, *b"23"], [*b"012345"], [grpo.EOS, *b"12345"]]
    is_sampled = torch.tensor([[1.0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0]])
    lengths = torch.tensor([4, 6, 1])
    out = common.Rollout(torch.tensor(tokens), is_sampled, is_sampled, is_sampled, lengths)
    assert grpo.completion_texts(out) == ["<1>", "012345", ""]      # inserted text included


# ---- no row depends on another ---------------------------------------------------------------

def test_a_prompt_alone_is_completed_as_it_is_among_others(sampled):
    one = sampled()
    for i in range(24):
        row = slice(i, i + 1)
        alone = one.rollout(one.prompts[row], one.uniforms[row])
        assert torch.equal(alone.tokens, one.out.tokens[row])
        assert torch.equal(alone.mask, one.out.mask[row])
        torch.testing.assert_close(alone.logps, one.out.logps[row], atol=1e-10, rtol=0)


def test_the_order_of_the_rows_does_not_matter(sampled):
    one = sampled()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    shuffled = one.rollout(one.prompts[order], one.uniforms[order])
    assert torch.equal(shuffled.tokens, one.out.tokens[order])


def test_copies_of_a_prompt_are_completed_differently_although_it_is_read_once(sampled):
    one = sampled()
    assert len({tuple(row) for row in one.out.tokens.tolist()}) > 12
    reads = []

    def remember(module, args, output):
        reads.append(args[0])
    one.policy.embed.register_forward_hook(remember)
    one.rollout(one.prompts, one.uniforms)
    assert reads[0].shape == (6, one.prompts.shape[1])


def test_rows_that_have_ended_are_not_read_any_more(sampled):
    one = sampled()
    num_read = []
    one.policy.embed.register_forward_hook(
        lambda module, args, output: num_read.append(len(args[0])))
    one.rollout(one.prompts, one.uniforms)
    expected = [int((one.out.lengths > t).sum()) for t in range(1, 12)]
    assert num_read[1:] == expected


def test_greedy_decoding_takes_the_likeliest_token_of_a_full_forward_pass(sampled):
    one = sampled(copies=1)
    lengths = set()
    for bias_of_eos in (2.0, 3.0, 4.0, 5.0):            # ever more inclined to end
        one.policy.embed.weight.data[grpo.EOS, 0] = bias_of_eos
        out = one.rollout(one.prompts)
        for i in range(len(PROMPTS)):
            expected = []
            while len(expected) < 12 and grpo.EOS not in expected:
                prefix = torch.cat([one.prompts[i], torch.tensor(expected, dtype=torch.long)])
                expected.append(one.policy(prefix[None])[0, -1].argmax().item())
            lengths.add(len(expected))
            assert out.tokens[i].tolist() == expected + [grpo.PAD] * (12 - len(expected))
        logps, _ = grpo.score(one.policy, one.prompts, out.tokens, one.cfg.temperature)
        torch.testing.assert_close(out.logps, logps * out.mask, atol=1e-10, rtol=0)
    assert len(lengths) > 2


# ---- sampling --------------------------------------------------------------------------------

@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_tokens_are_as_frequent_as_the_softmax_says(sampled, temperature):
    one = sampled(temperature=temperature, max_completion_length=1)
    N = 4000
    generator = torch.Generator().manual_seed(0)
    evenly_spread = (torch.arange(N) + 0.5) / N         # no chance is left
    uniforms = evenly_spread[torch.randperm(N, generator=generator), None]
    out = one.rollout(one.prompts[:1].expand(N, -1), uniforms)
    frequencies = torch.bincount(out.tokens[:, 0], minlength=grpo.VOCAB_SIZE) / N
    p = torch.softmax(one.policy(one.prompts[:1])[0, -1] / temperature, dim=-1)
    assert (frequencies - p).abs().max() <= 1.01 / N


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_extreme_uniforms_give_tokens_that_can_be_sampled(
        config, bigram, load_task, dtype, scale):
    V = grpo.VOCAB_SIZE
    table = scale * torch.randn(V, V, generator=torch.Generator().manual_seed(0)).to(dtype)
    table[:, :5] = -1e5                                 # the ends have probability 0
    table[:, -50:] = -1e5
    cfg = config(max_completion_length=4)
    prompts = torch.arange(V)[:, None]                  # every token's own distribution
    for u in (0.0, 2.0 ** -24, 1 - 2.0 ** -24):         # of torch.rand: the least, next, the last
        uniforms = torch.full((V, 4), u)
        out = grpo.rollout(bigram(table), prompts, [None] * V, load_task(cfg), cfg, uniforms)
        sampled_tokens = out.tokens[out.mask == 1]
        assert sampled_tokens.min() >= 5
        assert sampled_tokens.max() < V - 50
        assert out.logps.isfinite().all()
        assert out.entropy.isfinite().all()


def test_a_rollout_leaves_the_model_and_its_arguments_as_it_found_them(sampled):
    one = sampled()
    kept = (one.policy.state_dict(), one.prompts, one.uniforms)
    before = copy.deepcopy(kept)
    cfg = dataclasses.replace(one.cfg, num_eval_problems=3)
    for mode in (True, False):
        one.policy.train(mode)
        out = one.rollout(one.prompts, one.uniforms)
        grpo.evaluate(one.policy, one.task, cfg, 2)
        grpo.sample_batch(one.policy, one.task, cfg, 0)
        assert all(module.training == mode for module in one.policy.modules())
        assert not any(values.requires_grad for values in vars(out).values())
    torch.testing.assert_close(kept, before, atol=0, rtol=0)
    assert all(weight.grad is None for weight in one.policy.parameters())


# ---- CUDA graphs -----------------------------------------------------------------------------

def test_a_rollout_that_kernels_captures_is_left_to_it(sampled, monkeypatch):
    """On CUDA without call tokens. Here a stand-in is asked."""
    one = sampled(copies=1)
    asked = []

    def captured_rollout(*args):
        asked.append(args)
        out = one.out
        return out.tokens, out.mask, out.logps, out.entropy, out.lengths

    def captures(prompts, task, cfg):
        asked.append((prompts, task, cfg))
        return cfg.kernel != "torch"
    stand_in = SimpleNamespace(captures=captures, captured_rollout=captured_rollout,
                               applies=lambda kernel, logits: False)
    monkeypatch.setattr(common, "kernels", stand_in)
    out = one.rollout(one.prompts, one.uniforms)
    assert asked == [(one.prompts, one.task, one.cfg),
                     (one.policy, one.prompts, one.cfg, one.uniforms, grpo.EOS, grpo.PAD)]
    torch.testing.assert_close(vars(out), vars(one.out), atol=0, rtol=0)
    one.cfg = dataclasses.replace(one.cfg, kernel="torch")
    one.rollout(one.prompts, one.uniforms)
    assert len(asked) == 3                              # asked, but not left to it
