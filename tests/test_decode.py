"""The decode path of CUDA against the scripts' rollout, token for token.

On a CPU its step runs as it is written, or from a recording that does what a CUDA graph does: the same
operations on the same addresses, and nothing that Python did. With a CUDA device there are real graphs, too.
"""
import dataclasses
import gc
import math
import weakref

import pytest
import torch
from conftest import every_script
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo
from kernels import decode as path
from kernels.decode import decode

PROMPTS = ["(3+4)=", "((1+2)-1)=", "((9*2)-8)=", "(5-5)=", "((2*7)+6)=", "((8-3)*4)="]
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def speaker(script, config):
    """speaker(**changes) -> cfg, a policy whose rows end soon or late, prompts, uniforms for four copies"""
    def make(dtype=torch.float64, device="cpu", end=3.0, **changes):
        cfg = config(**({"max_completion_length": 20, "num_hidden_layers": 3, "device": device} | changes))
        policy = script.GPT(cfg).to(device, dtype)
        weight = policy.embed.weight.data
        weight *= 20
        weight[:, 0] = 1                # what all hidden states have in common, and EOS has more of
        weight[script.EOS, 0] += end
        uniforms = torch.rand(4 * len(PROMPTS), cfg.max_completion_length,
                              generator=torch.Generator().manual_seed(0)).to(device)
        return cfg, policy, script.encode_prompts(PROMPTS, cfg), uniforms
    return make


def decoded(policy, prompts, cfg, copies=1, uniforms=None, **options):
    """decode, called as rollout is."""
    return decode(policy, prompts, copies, cfg.max_completion_length, cfg.temperature, uniforms,
                  grpo.EOS, grpo.PAD, **options)


def rows(prompts, copies=4):
    """Which prompt each row continues, as score takes it."""
    return torch.arange(len(prompts)).repeat_interleave(copies).to(prompts.device)


def equal(out, expected, atol=1e-10):
    """Tokens and mask are the same, log-probabilities and entropies to rounding."""
    assert len(out) == 4
    assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[1])
    for ours, theirs in zip(out[2:], expected[2:4]):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


# ---- 1. the same rollout --------------------------------------------------------------------------------

@every_script
@pytest.mark.parametrize("copies", [1, 4])
def test_it_is_the_rollout_of_every_script(script, speaker, copies):
    cfg, policy, prompts, uniforms = speaker(temperature=0.7)
    for random in (uniforms[:copies * len(prompts)], None):
        expected = script.rollout(policy, prompts, cfg, copies, random)
        out = decoded(policy, prompts, cfg, copies, random)
        equal(out, expected)
        assert torch.equal(out[1].sum(1).long(), expected.lengths)          # no environment spoke


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.7])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rows_that_end_at_any_time_are_the_same(speaker, kv_heads, temperature):
    lengths = set()
    for end in (2, 3, 4, 5):
        cfg, policy, prompts, uniforms = speaker(end=end * max(temperature, 1), num_key_value_heads=kv_heads,
                                                 temperature=temperature)
        expected = grpo.rollout(policy, prompts, cfg, 4, uniforms)
        lengths |= set(expected.mask.sum(1).tolist())
        equal(decoded(policy, prompts, cfg, 4, uniforms), expected)
    assert len(lengths) > 9 and {1, 20} < lengths


def test_float32_differs_by_rounding_alone(speaker):
    cfg, policy, prompts, uniforms = speaker(torch.float32)
    for random in (uniforms, None):
        out = decoded(policy, prompts, cfg, 4, random)
        equal(out, grpo.rollout(policy, prompts, cfg, 4, random), 2e-5)
        assert all(slots.dtype == torch.float32 for slots in out[1:])


def test_the_log_probabilities_are_those_that_the_update_will_see(speaker):
    cfg, policy, prompts, uniforms = speaker(temperature=0.7)
    tokens, mask, logps, entropy = decoded(policy, prompts, cfg, 4, uniforms)
    for ours, scored in zip((logps, entropy), grpo.score(policy, prompts, rows(prompts), tokens, 0.7)):
        torch.testing.assert_close(ours, scored * mask, atol=1e-10, rtol=0)


def test_bf16_weights_give_fp32_log_probabilities(speaker):
    cfg, policy, prompts, uniforms = speaker(torch.bfloat16, max_completion_length=4)
    tokens, mask, logps, entropy = decoded(policy, prompts, cfg, 4, uniforms[:, :4])
    first = policy(prompts)[:, -1]
    scored, _ = grpo.score(policy.float(), prompts, rows(prompts), tokens)
    assert logps.dtype == mask.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logps, scored * mask, atol=0.2, rtol=0)
    cdf = first.float().softmax(-1).cumsum(-1).repeat_interleave(4, 0)      # not of sums in bf16
    assert torch.equal(tokens[:, 0], (cdf <= uniforms[:, :1] * cdf[:, -1:]).sum(1))


@pytest.mark.parametrize("T", [1, 2, 8, 9, 16, 17])
def test_there_may_be_any_number_of_slots(speaker, T):
    cfg, policy, prompts, uniforms = speaker(max_completion_length=T)
    for random in (uniforms, None):
        equal(decoded(policy, prompts, cfg, 4, random), grpo.rollout(policy, prompts, cfg, 4, random))


def test_a_single_row_is_a_batch(speaker):
    cfg, policy, prompts, uniforms = speaker()
    one = prompts[:1], cfg, 1, uniforms[:1]
    equal(decoded(policy, *one), grpo.rollout(policy, *one))


@pytest.mark.parametrize("temperature", [0.02, 20.0])
@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_uniforms_at_the_ends_draw_tokens_that_can_be(speaker, u, temperature):
    cfg, policy, prompts, _ = speaker(torch.float32, temperature=temperature)
    uniforms = torch.full((len(prompts), 20), u)
    tokens, mask, logps, entropy = decoded(policy, prompts, cfg, 1, uniforms)
    assert torch.equal(tokens, grpo.rollout(policy, prompts, cfg, 1, uniforms).tokens)
    assert tokens.min() >= 0 and tokens.max() < grpo.VOCAB and (logps.exp() > 0).all()


def test_a_uniform_of_nearly_one_draws_no_impossible_token(speaker):
    """Rounded sums of probabilities end at a little less than 1, or more."""
    _, policy, _, _ = speaker(torch.float32)
    logits = torch.randn(1000, grpo.VOCAB, generator=torch.Generator().manual_seed(0))
    logits[:, -20:] = -1e4
    assert (logits.softmax(-1).cumsum(-1)[:, -1] <= 1 - 2**-23).any()
    s = path.allocate(policy, 1000, 10, 1, 1.0, torch.zeros(1000, 1), grpo.EOS, grpo.PAD, "torch")
    s.uniforms.fill_(1 - 2**-24)
    path.sample(s, logits)
    assert s.tokens.max() < grpo.VOCAB - 20


def test_a_pad_that_was_sampled_is_a_token_like_any_other(speaker):
    cfg, policy, prompts, uniforms = speaker()
    policy.embed.weight.data[grpo.PAD, 0] += 2
    expected = grpo.rollout(policy, prompts, cfg, 4, uniforms)
    assert ((expected.tokens == grpo.PAD) & (expected.mask == 1)).sum() > 5
    equal(decoded(policy, prompts, cfg, 4, uniforms), expected)


# ---- 2. what it leaves alone ----------------------------------------------------------------------------

def test_nothing_but_the_result_is_different_afterwards(speaker):
    cfg, policy, prompts, uniforms = speaker()
    policy.train()
    policy.blocks[1].eval()
    modes = [module.training for module in policy.modules()]
    for weight in policy.parameters():
        weight.grad = torch.ones_like(weight)
    before = [x.clone() for x in (prompts, uniforms, torch.get_rng_state(), *policy.parameters())]
    out = decoded(policy, prompts, cfg, 4, uniforms)
    after = prompts, uniforms, torch.get_rng_state(), *policy.parameters()
    assert all(map(torch.equal, before, after)) and torch.is_grad_enabled()
    assert modes == [module.training for module in policy.modules()]
    assert all(weight.requires_grad and (weight.grad == 1).all() for weight in policy.parameters())
    assert not any(slots.requires_grad for slots in out) and policy not in path.GRAPHS


def test_uniforms_of_another_shape_get_one_clear_line(speaker):
    cfg, policy, prompts, uniforms = speaker()
    with pytest.raises(ValueError, match=r"uniforms \(24, 20\): need one per row and slot, \(12, 20\)"):
        decoded(policy, prompts, cfg, 2, uniforms)


def test_the_kernel_that_is_asked_for_computes_the_log_probabilities(speaker, monkeypatch):
    cfg, policy, prompts, uniforms = speaker()
    with pytest.raises(ValueError, match="--kernel triton: on cpu"):
        decoded(policy, prompts, cfg, 4, uniforms, kernel="triton")
    monkeypatch.setattr(path, "choose", lambda kernel, device: lambda logits, tokens, temperature: (
        tokens.to(logits) + 0.5, tokens, tokens.to(logits) * 2))
    tokens, mask, logps, entropy = decoded(policy, prompts, cfg, 4, uniforms)
    assert torch.equal(logps, (tokens + 0.5) * mask) and torch.equal(entropy, tokens * 2 * mask)


def test_it_stops_within_eight_steps_of_the_last_end(speaker, monkeypatch):
    cfg, policy, prompts, uniforms = speaker(max_completion_length=60, end=4.0)
    steps, step = [], path.step
    monkeypatch.setattr(path, "step", lambda model, s: (steps.append(1), step(model, s)))
    expected = grpo.rollout(policy, prompts, cfg, 4, uniforms)
    last = int(expected.mask.sum(1).max())
    assert 8 < last < 40
    equal(decoded(policy, prompts, cfg, 4, uniforms), expected)
    assert last - 1 <= len(steps) < last + 8 and len(steps) % 8 == 7        # the first token takes no step


def test_the_cache_holds_the_few_key_value_heads_once(speaker):
    cfg, policy, prompts, uniforms = speaker(num_key_value_heads=1)
    s = path.allocate(policy, 24, prompts.shape[1], 20, 1.0, uniforms, grpo.EOS, grpo.PAD, "auto")
    assert s.cache.shape[:4] == (3, 2, 24, 1) and s.cache.shape[4] < prompts.shape[1] + 20 + 16
    assert s.mask.shape[1] == s.cache.shape[4] and s.mask.shape[1] % 16 == 0    # others are copied


# ---- 3. one step, recorded ------------------------------------------------------------------------------

class Recording(TorchDispatchMode):
    """What a CUDA graph keeps: operations, sizes, addresses. Python's part of a step is not replayed."""
    SYNCS = {"_local_scalar_dense", "nonzero", "lift_fresh", "equal", "masked_select", "item", "is_nonzero"}

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in self.SYNCS, f"{function} waits for the device"
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, out in self.calls:
            for kept, new in zip(tree_leaves(out), tree_leaves(function(*args, **kwargs))):
                if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():    # no view
                    kept.copy_(new)


@pytest.fixture
def recordings(monkeypatch):
    """A list of all recordings: on a CPU they take the place of graphs."""
    made = []

    def record(function):
        made.append(Recording())
        with made[-1]:
            function()
        return made[-1].replay
    monkeypatch.setattr(path, "capture", record)
    return made


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_step_recorded_once_and_replayed_is_every_step(speaker, recordings, kv_heads):
    cfg, policy, prompts, uniforms = speaker(num_key_value_heads=kv_heads, temperature=0.7)
    for random in (uniforms, None):
        out = decoded(policy, prompts, cfg, 4, random, captured=True)
        equal(out, grpo.rollout(policy, prompts, cfg, 4, random))
    assert len(recordings) == 2 and len(recordings[0].calls) > 50


def test_a_recording_serves_other_prompts_and_other_uniforms(speaker, recordings):
    cfg, policy, prompts, uniforms = speaker()
    batches = [(prompts, cfg, 4, uniforms), (prompts.flip(0), cfg, 4, uniforms),
               (prompts, cfg, 4, uniforms.flip(0))]
    outs = [decoded(policy, *batch, captured=True) for batch in batches]
    for out, batch in zip(outs, batches):               # the first was not written over by the second
        equal(out, grpo.rollout(policy, *batch))
    assert len(recordings) == 1


def test_a_recording_reads_the_weights_as_they_are_now(speaker, recordings):
    cfg, policy, prompts, uniforms = speaker()
    optimizer, outs = torch.optim.AdamW(policy.parameters(), lr=0.05), []
    state = {name: weight.clone() for name, weight in policy.state_dict().items()}
    for _ in range(3):
        outs.append(decoded(policy, prompts, cfg, 4, uniforms, captured=True))
        equal(outs[-1], grpo.rollout(policy, prompts, cfg, 4, uniforms))
        grpo.score(policy, prompts, rows(prompts), outs[-1][0])[0].mean().backward()
        optimizer.step()
    assert not torch.equal(outs[0][0], outs[2][0])
    policy.load_state_dict(state)
    equal(decoded(policy, prompts, cfg, 4, uniforms, captured=True), outs[0])
    assert len(recordings) == 1


def test_what_a_recording_depends_on_is_recorded_anew(speaker, recordings, monkeypatch):
    cfg, policy, prompts, uniforms = speaker(end=2.0)
    changes = ({}, {"prompts": prompts[:, 1:]}, {"T": 19}, {"temperature": 0.5}, {"EOS": 80}, {"PAD": 81},
               {"copies": 2}, {"kernel": "torch"})
    usual = {"prompts": prompts, "T": 20, "temperature": 1, "EOS": 264, "PAD": 265, "copies": 4}
    for n in (1, 2):
        for change in changes:
            now = usual | change
            monkeypatch.setattr(grpo, "EOS", now["EOS"])
            monkeypatch.setattr(grpo, "PAD", now["PAD"])
            cfg = dataclasses.replace(cfg, max_completion_length=now["T"], temperature=now["temperature"])
            batch = now["prompts"], cfg, now["copies"], uniforms[:6 * now["copies"], :now["T"]]
            out = decoded(policy, *batch, captured=True, kernel=change.get("kernel", "auto"))
            equal(out, grpo.rollout(policy, *batch))
        assert len(recordings) == len(changes), n


def test_one_slot_needs_no_recording(speaker, recordings):
    cfg, policy, prompts, uniforms = speaker(max_completion_length=1)
    out = decoded(policy, prompts, cfg, 4, uniforms, captured=True)
    equal(out, grpo.rollout(policy, prompts, cfg, 4, uniforms))
    assert not recordings


def test_another_size_or_weights_elsewhere_are_recorded_anew(speaker, recordings):
    cfg, policy, prompts, uniforms = speaker()
    for change in range(3):
        if change == 1:
            policy.norm.weight = torch.nn.Parameter(2 * policy.norm.weight.data)
        if change == 2:
            policy.float()
        for copies, random in ((4, uniforms), (2, uniforms[:12]), (4, None)):
            for _ in range(2):
                out = decoded(policy, prompts, cfg, copies, random, captured=True)
            equal(out, grpo.rollout(policy, prompts, cfg, copies, random), 2e-5)
    assert len(recordings) == 9


def test_nothing_of_an_earlier_batch_stays(speaker, recordings):
    cfg, policy, prompts, uniforms = speaker()
    expected = grpo.rollout(policy, prompts, cfg, 4, uniforms)
    weight = policy.blocks[0].qkv.weight.data
    good = weight.clone()
    weight.fill_(math.nan)
    assert decoded(policy, prompts, cfg, 4, uniforms, captured=True)[2].isnan().any()
    weight.copy_(good)
    equal(decoded(policy, prompts, cfg, 4, uniforms, captured=True), expected)
    assert len(recordings) == 1


def test_a_recording_is_kept_as_long_as_its_model(speaker, recordings):
    cfg, policy, prompts, uniforms = speaker()
    decoded(policy, prompts, cfg, 4, uniforms, captured=True)
    assert len(path.GRAPHS[policy]) == 1
    gone = weakref.ref(policy)
    del policy
    gc.collect()
    assert gone() is None and not len(path.GRAPHS)


# ---- 4. with a CUDA device ------------------------------------------------------------------------------

@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_graph_is_the_eager_step_token_for_token(speaker, dtype):
    cfg, policy, prompts, uniforms = speaker(dtype, device="cuda", temperature=0.7)
    for random in (uniforms, None):
        graph, eager = (decoded(policy, prompts, cfg, 4, random, captured=how) for how in (True, False))
        equal(graph, eager, 1e-6)
        equal(graph, grpo.rollout(policy, prompts, cfg, 4, random), 2e-5)
        equal(decoded(policy, prompts, cfg, 4, random), graph, 0)           # the default, and once more


@cuda
def test_a_graph_reads_the_weights_as_they_are_now(speaker):
    cfg, policy, prompts, uniforms = speaker(device="cuda")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05)
    for _ in range(3):
        out = decoded(policy, prompts, cfg, 4, uniforms)
        equal(out, grpo.rollout(policy, prompts, cfg, 4, uniforms))
        grpo.score(policy, prompts, rows(prompts), out[0])[0].mean().backward()
        optimizer.step()
    assert len(path.GRAPHS[policy]) == 1
