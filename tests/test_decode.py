"""The decode path of CUDA against the scripts' rollout, token for token.

On a CPU its step runs as it is written, or from a recording that does what a CUDA graph does: the
same operations on the same addresses, and nothing that Python did. With a CUDA device there are
real graphs, too.
"""
import dataclasses
import gc
import math
import types
import weakref

import pytest
import torch
from conftest import every_script
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
import kernels
from kernels import decode as decode_path

PROMPTS = ["(3+4)=", "((1+2)-1)=", "((9*2)-8)=", "(5-5)=", "((2*7)+6)=", "((8-3)*4)="]
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@dataclasses.dataclass
class Case:
    """A policy and what it is to complete, by the decode path or by the script."""
    script: types.ModuleType
    cfg: common.Config
    policy: torch.nn.Module
    prompts: torch.Tensor           # (B, W)
    uniforms: torch.Tensor          # (B, T), or None: greedy

    def decode(self, **options):
        """-> tokens, mask, logps, entropy, (B, T) each"""
        return decode_path.decode(
            self.policy, self.prompts, self.cfg.max_completion_length, self.cfg.temperature,
            self.uniforms, self.script.EOS, self.script.PAD, **options)

    def rollout(self):
        """-> the script's Rollout"""
        task = common.load_task(self.cfg, self.script.verify)
        problems = [None] * len(self.prompts)       # no environment looks at them
        return self.script.rollout(
            self.policy, self.prompts, problems, task, self.cfg, self.uniforms)

    def score(self, tokens):
        """-> logps, entropy, (B, T) each, as an update computes them"""
        return self.script.score(self.policy, self.prompts, tokens, self.cfg.temperature)

    def change(self, **changes):
        """A case with other values for some fields."""
        return dataclasses.replace(self, **changes)

    def rows(self, rows):
        """A case with some of the rows."""
        return self.change(prompts=self.prompts[rows], uniforms=self.uniforms[rows])


@pytest.fixture
def make_case(script, config):
    """make_case(**changes): a policy whose rows end soon or late, and four rows for each prompt."""
    def make(dtype=torch.float64, device="cpu", end=3.0, **changes):
        changes = {"max_completion_length": 20, "num_hidden_layers": 3, "device": device} | changes
        cfg = config(**changes)
        task = common.load_task(cfg, script.verify)
        policy = script.GPT(cfg).to(device, dtype)
        weight = policy.embed.weight.data
        weight *= 20
        weight[:, 0] = 1                # what all hidden states have in common, and EOS has more of
        weight[script.EOS, 0] += end
        prompts = script.encode_prompts(PROMPTS, task, device).repeat_interleave(4, dim=0)
        generator = torch.Generator().manual_seed(0)
        uniforms = torch.rand(len(prompts), cfg.max_completion_length, generator=generator)
        return Case(script, cfg, policy, prompts, uniforms.to(device))
    return make


def equal(decoded, expected, atol=1e-10):
    """Tokens and mask are the same, log-probabilities and entropies to rounding."""
    if not isinstance(expected, tuple):
        expected = (expected.tokens, expected.mask, expected.logps, expected.entropy)
    tokens, mask, logps, entropy = decoded
    expected_tokens, expected_mask, expected_logps, expected_entropy = expected
    assert torch.equal(tokens, expected_tokens) and torch.equal(mask, expected_mask)
    torch.testing.assert_close(logps, expected_logps, atol=atol, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=atol, rtol=0)


# ---- 1. the same rollout ---------------------------------------------------------------------

@every_script
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("copies", [1, 4])
def test_it_is_the_rollout_of_every_script(make_case, copies, greedy):
    case = make_case(temperature=0.7).rows(slice(None, None, 4 // copies))
    if greedy:
        case = case.change(uniforms=None)
    tokens, mask, logps, entropy = case.decode()
    expected = case.rollout()
    equal((tokens, mask, logps, entropy), expected)
    assert torch.equal(mask.sum(dim=1).long(), expected.lengths)        # nothing was inserted


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.7])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rows_that_end_at_any_time_are_the_same(make_case, kv_heads, temperature):
    lengths = set()
    for end in (2, 3, 4, 5):
        case = make_case(end=end * max(temperature, 1), num_key_value_heads=kv_heads,
                         temperature=temperature)
        expected = case.rollout()
        lengths |= set(expected.lengths.tolist())
        equal(case.decode(), expected)
    assert len(lengths) > 9 and {1, 20} < lengths


def test_rows_may_come_in_any_order_and_equal_prompts_are_read_once(make_case, monkeypatch):
    case = make_case()
    expected = case.decode()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    hidden = case.policy.hidden
    num_read = []

    def counted(tokens, cache=None):
        num_read.append(len(tokens))
        return hidden(tokens, cache)
    monkeypatch.setattr(case.policy, "hidden", counted)
    decoded = case.rows(order).decode()
    equal(decoded, tuple(values[order] for values in expected))
    assert num_read == [len(PROMPTS)]


@pytest.mark.parametrize("greedy", [False, True])
def test_float32_differs_by_rounding_alone(make_case, greedy):
    case = make_case(torch.float32)
    if greedy:
        case = case.change(uniforms=None)
    tokens, mask, logps, entropy = case.decode()
    equal((tokens, mask, logps, entropy), case.rollout(), 2e-5)
    assert mask.dtype == logps.dtype == entropy.dtype == torch.float32


def test_the_log_probabilities_are_those_that_the_update_will_see(make_case):
    case = make_case(temperature=0.7)
    tokens, mask, logps, entropy = case.decode()
    scored_logps, scored_entropy = case.score(tokens)
    torch.testing.assert_close(logps, scored_logps * mask, atol=1e-10, rtol=0)
    torch.testing.assert_close(entropy, scored_entropy * mask, atol=1e-10, rtol=0)


def test_bf16_weights_give_fp32_log_probabilities(make_case):
    case = make_case(torch.bfloat16, max_completion_length=4)
    tokens, mask, logps, entropy = case.decode()
    first_logits = case.policy(case.prompts)[:, -1]
    case.policy.float()
    scored_logps, _ = case.score(tokens)
    assert logps.dtype == mask.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logps, scored_logps * mask, atol=0.2, rtol=0)
    cdf = first_logits.float().softmax(-1).cumsum(-1)           # not of sums in bf16
    threshold = case.uniforms[:, :1] * cdf[:, -1:]
    assert torch.equal(tokens[:, 0], (cdf <= threshold).sum(1))


@pytest.mark.parametrize("T", [1, 2, 8, 9, 16, 17])
def test_there_may_be_any_number_of_slots(make_case, T):
    case = make_case(max_completion_length=T)
    equal(case.decode(), case.rollout())
    case = case.change(uniforms=None)
    equal(case.decode(), case.rollout())


def test_a_single_row_is_a_batch(make_case):
    case = make_case().rows(slice(0, 1))
    equal(case.decode(), case.rollout())


@pytest.mark.parametrize("temperature", [0.02, 20.0])
@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_uniforms_at_the_ends_draw_tokens_that_can_be(make_case, u, temperature):
    case = make_case(torch.float32, temperature=temperature)
    case.uniforms.fill_(u)
    tokens, _, logps, _ = case.decode()
    assert torch.equal(tokens, case.rollout().tokens)
    assert tokens.min() >= 0 and tokens.max() < case.script.VOCAB_SIZE
    assert (logps.exp() > 0).all()


def test_a_uniform_of_nearly_one_draws_no_impossible_token(make_case):
    """Rounded sums of probabilities end at a little less than 1, or more."""
    case = make_case(torch.float32)
    vocab_size = case.script.VOCAB_SIZE
    logits = torch.randn(1000, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[:, -20:] = -1e4
    assert (logits.softmax(-1).cumsum(-1)[:, -1] <= 1 - 2**-23).any()
    state = decode_path.allocate(
        case.policy, 1000, 10, 1, 1.0, torch.float32, case.script.EOS, case.script.PAD, "torch")
    state.uniforms.fill_(1 - 2**-24)
    decode_path.sample(state, logits)
    assert state.tokens.max() < vocab_size - 20


def test_a_pad_that_was_sampled_is_a_token_like_any_other(make_case):
    case = make_case()
    PAD = case.script.PAD
    case.policy.embed.weight.data[PAD, 0] += 2
    expected = case.rollout()
    assert ((expected.tokens == PAD) & (expected.mask == 1)).sum() > 5
    equal(case.decode(), expected)


# ---- 2. what it leaves alone -----------------------------------------------------------------

def test_nothing_but_the_result_is_different_afterwards(make_case):
    case = make_case()
    policy = case.policy
    policy.train()
    policy.blocks[1].eval()
    modes = [module.training for module in policy.modules()]
    for weight in policy.parameters():
        weight.grad = torch.ones_like(weight)

    def tensors():
        return [case.prompts, case.uniforms, torch.get_rng_state(), *policy.parameters()]
    before = [x.clone() for x in tensors()]
    outputs = case.decode()
    assert all(map(torch.equal, before, tensors())) and torch.is_grad_enabled()
    assert modes == [module.training for module in policy.modules()]
    assert all(weight.requires_grad for weight in policy.parameters())
    assert all((weight.grad == 1).all() for weight in policy.parameters())
    assert not any(output.requires_grad for output in outputs)
    assert policy not in decode_path.GRAPHS


def test_uniforms_of_another_shape_get_one_clear_line(make_case):
    case = make_case()
    case = case.change(prompts=case.prompts[:12])
    line = r"uniforms \(24, 20\): need one per row and slot, \(12, 20\)"
    with pytest.raises(ValueError, match=line):
        case.decode()


def test_the_kernel_that_is_asked_for_computes_the_log_probabilities(make_case, monkeypatch):
    case = make_case()
    with pytest.raises(ValueError, match="--kernel triton: on cpu"):
        case.decode(kernel="triton")

    def applies(kernel, logits):
        return kernel == "auto"

    def logprobs(logits, tokens, temperature):
        return tokens.to(logits) + 0.5, tokens.to(logits) * 2
    monkeypatch.setattr(kernels, "applies", applies)
    monkeypatch.setattr(kernels, "logprobs", logprobs)
    tokens, mask, logps, entropy = case.decode()
    assert torch.equal(logps, (tokens + 0.5) * mask) and torch.equal(entropy, tokens * 2 * mask)
    equal(case.decode(kernel="torch"), case.change(
        cfg=dataclasses.replace(case.cfg, kernel="torch")).rollout())


def test_it_stops_within_eight_steps_of_the_last_end(make_case, monkeypatch):
    case = make_case(max_completion_length=60, end=4.0)
    real_step = decode_path.step
    steps = []

    def step(model, state):
        steps.append(1)
        real_step(model, state)
    monkeypatch.setattr(decode_path, "step", step)
    expected = case.rollout()
    last = int(expected.lengths.max())
    assert 8 < last < 40
    equal(case.decode(), expected)
    assert last - 1 <= len(steps) < last + 8 and len(steps) % 8 == 7    # one token takes no step


def test_the_cache_holds_the_few_key_value_heads_once(make_case):
    case = make_case(num_key_value_heads=1)
    W = case.prompts.shape[1]
    state = decode_path.allocate(
        case.policy, 24, W, 20, 1.0, torch.float32, case.script.EOS, case.script.PAD, "auto")
    for cache in (state.keys, state.values):
        num_blocks, B, num_kv_heads, L, _ = cache.shape
        assert (num_blocks, B, num_kv_heads) == (3, 24, 1)
        assert W + 20 <= L < W + 20 + 16
        assert state.attention_mask.shape[1] == L and L % 16 == 0       # other masks are copied


# ---- 3. one step, recorded -------------------------------------------------------------------

class Recording(TorchDispatchMode):
    """What a CUDA graph keeps: operations, sizes, addresses. Python's part of a step is not
    replayed."""
    SYNCS = {"_local_scalar_dense", "nonzero", "lift_fresh", "equal", "masked_select", "item",
             "is_nonzero"}

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.SYNCS, f"{function} waits for the device"
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, output))
        return output

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, output in self.calls:
            new_output = function(*args, **kwargs)
            for kept, new in zip(tree_leaves(output), tree_leaves(new_output)):
                is_tensor = isinstance(kept, torch.Tensor)
                if is_tensor and kept.data_ptr() != new.data_ptr():     # a view needs no copy
                    kept.copy_(new)


@pytest.fixture
def recordings(monkeypatch):
    """A list of all recordings, which on a CPU take the place of graphs."""
    made = []

    def capture(function):
        recording = Recording()
        made.append(recording)
        with recording:
            function()
        return recording.replay
    monkeypatch.setattr(decode_path, "capture", capture)
    return made


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_step_recorded_once_and_replayed_is_every_step(make_case, recordings, kv_heads):
    case = make_case(num_key_value_heads=kv_heads, temperature=0.7)
    equal(case.decode(captured=True), case.rollout())
    case = case.change(uniforms=None)
    equal(case.decode(captured=True), case.rollout())
    assert len(recordings) == 2 and len(recordings[0].calls) > 50


def test_a_recording_serves_other_prompts_and_other_uniforms(make_case, recordings):
    case = make_case()
    others = case.change(prompts=case.prompts.flip(0))
    redrawn = case.change(uniforms=case.uniforms.flip(0))
    cases = [case, others, redrawn]
    outputs = [each.decode(captured=True) for each in cases]
    for each, output in zip(cases, outputs):        # the second did not write over the first
        equal(output, each.rollout())
    assert len(recordings) == 1


def test_a_recording_reads_the_weights_as_they_are_now(make_case, recordings):
    case = make_case()
    policy = case.policy
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.05)
    initial = {name: weight.clone() for name, weight in policy.state_dict().items()}
    outputs = []
    for _ in range(3):
        outputs.append(case.decode(captured=True))
        equal(outputs[-1], case.rollout())
        tokens, *_ = outputs[-1]
        logps, _ = case.score(tokens)
        logps.mean().backward()
        optimizer.step()
    assert not torch.equal(outputs[0][0], outputs[2][0])
    policy.load_state_dict(initial)
    equal(case.decode(captured=True), outputs[0])
    assert len(recordings) == 1


def test_what_a_recording_depends_on_is_recorded_anew(make_case, recordings, monkeypatch):
    case = make_case(end=2.0)
    narrow = case.change(prompts=case.prompts[:, 1:])
    shorter = case.change(uniforms=case.uniforms[:, :19],
                          cfg=dataclasses.replace(case.cfg, max_completion_length=19))
    colder = case.change(cfg=dataclasses.replace(case.cfg, temperature=0.5))
    fewer = case.rows(slice(None, None, 2))
    in_torch = case.change(cfg=dataclasses.replace(case.cfg, kernel="torch"))
    cases = [case, narrow, shorter, colder, fewer, in_torch]
    for _ in range(2):
        for each in cases:
            equal(each.decode(captured=True, kernel=each.cfg.kernel), each.rollout())
        assert len(recordings) == len(cases)
    for name, token in (("EOS", 80), ("PAD", 81)):
        with monkeypatch.context() as patch:
            patch.setattr(case.script, name, token)
            equal(case.decode(captured=True), case.rollout())
    assert len(recordings) == len(cases) + 2


def test_one_slot_needs_no_recording(make_case, recordings):
    case = make_case(max_completion_length=1)
    equal(case.decode(captured=True), case.rollout())
    assert not recordings


def test_another_size_or_weights_elsewhere_are_recorded_anew(make_case, recordings):
    case = make_case()
    policy = case.policy
    half = case.rows(slice(None, None, 2))
    greedy = case.change(uniforms=None)

    def decode_all_twice():
        for each in (case, half, greedy):
            each.decode(captured=True)
            equal(each.decode(captured=True), each.rollout(), 2e-5)
    decode_all_twice()
    assert len(recordings) == 3
    policy.norm.weight = torch.nn.Parameter(2 * policy.norm.weight.data)
    decode_all_twice()
    assert len(recordings) == 6
    policy.float()
    decode_all_twice()
    assert len(recordings) == 9


def test_nothing_of_an_earlier_batch_stays(make_case, recordings):
    case = make_case()
    expected = case.rollout()
    weight = case.policy.blocks[0].attention.value.weight.data
    good = weight.clone()
    weight.fill_(math.nan)
    _, _, logps, _ = case.decode(captured=True)
    assert logps.isnan().any()
    weight.copy_(good)
    equal(case.decode(captured=True), expected)
    assert len(recordings) == 1


def test_a_recording_is_kept_as_long_as_its_model(make_case, recordings):
    case = make_case()
    case.decode(captured=True)
    assert len(decode_path.GRAPHS[case.policy]) == 1
    gone = weakref.ref(case.policy)
    del case
    gc.collect()
    assert gone() is None and len(decode_path.GRAPHS) == 0


# ---- 4. with a CUDA device -------------------------------------------------------------------

@cuda
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_graph_is_the_eager_step_token_for_token(make_case, dtype, greedy):
    case = make_case(dtype, device="cuda", temperature=0.7)
    if greedy:
        case = case.change(uniforms=None)
    graph = case.decode(captured=True)
    equal(graph, case.decode(captured=False), 1e-6)
    equal(case.decode(), graph, 0)                              # the default, and once more
    in_torch = case.change(cfg=dataclasses.replace(case.cfg, kernel="torch"))
    equal(graph, in_torch.rollout(), 2e-5)


@cuda
def test_a_graph_reads_the_weights_as_they_are_now(make_case):
    case = make_case(device="cuda")
    in_torch = case.change(cfg=dataclasses.replace(case.cfg, kernel="torch"))
    optimizer = torch.optim.AdamW(case.policy.parameters(), lr=0.05)
    for _ in range(3):
        tokens, mask, logps, entropy = case.decode()
        equal((tokens, mask, logps, entropy), in_torch.rollout())
        scored_logps, _ = case.score(tokens)
        scored_logps.mean().backward()
        optimizer.step()
    assert len(decode_path.GRAPHS[case.policy]) == 1
