"""The decode path for CUDA and the rollout of the scripts produce the same tokens.

On a CPU, the decode step runs without a graph. If no GPU is present, the tests of graphs record the
operations of the step on the CPU.
"""
import contextlib
import dataclasses
import types

import pretend
import pytest
import torch
from conftest import ROOT, TINY
from small_models import Recording

import common
import grpo
import kernels
from kernels import decode as decode_path
from kernels import logprob
from vectors.edits import replace_once

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = ["(3+4)=", "((1+2)-1)=", "((9*2)-8)=", "(5-5)=", "((2*7)+6)=", "((8-3)*4)="]
FLAGS = TINY | {"num_hidden_layers": 3, "max_completion_length": 20}


@dataclasses.dataclass
class Case:
    """A policy, and prompts that it completes with the decode path or the script's rollout."""
    script: types.ModuleType
    cfg: common.Config
    policy: torch.nn.Module
    prompts: torch.Tensor           # (B, W)
    uniforms: torch.Tensor          # (B, T), or None for greedy completions

    def decode(self):
        """Use the decode path. -> tokens, mask, logps, entropy (B, T), lengths (B,)"""
        script = self.script
        own = script.read_prompts, script.sample_token, script.logprobs, script.rotate
        return kernels.rollout(
            self.policy, self.prompts, None, self.cfg, self.uniforms, own)

    def rollout(self):
        """Use the script's rollout. -> the same tensors as decode"""
        return self.script.rollout(self.policy, self.prompts, None, self.cfg, self.uniforms)

    def change(self, **changes):
        """Copy the case, with different values for some fields or flags. -> Case"""
        flags = {name: value for name, value in changes.items() if hasattr(self.cfg, name)}
        fields = {name: value for name, value in changes.items() if name not in flags}
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, **flags), **fields)


def make_case(script=grpo, dtype=torch.float64, end=3.0, **flags):
    """Make a policy whose rows end early or late, and four rows for each prompt. -> Case"""
    cfg = script.Config(**FLAGS | flags)
    task = common.load_task(cfg, script.verify)
    policy = script.GPT(cfg).to(cfg.device, dtype)
    weight = policy.embed.weight.data
    weight *= 20
    weight[:, 0] = 1                # acts like a bias of the logits, which is larger for EOS
    weight[script.EOS, 0] += end
    problems = [common.Problem(prompt, "") for prompt in PROMPTS for _ in range(4)]
    prompts = script.encode_prompts(problems, task, cfg.device)
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(len(prompts), cfg.max_completion_length, generator=generator)
    return Case(script, cfg, policy, prompts, uniforms.to(cfg.device))


def equal(decoded, expected, atol=1e-10):
    """Check that tokens, mask and lengths are equal, and logps and entropies up to rounding."""
    for exact in (0, 1, 4):
        assert torch.equal(decoded[exact], expected[exact])
    for rounded in (2, 3):
        torch.testing.assert_close(decoded[rounded], expected[rounded], atol=atol, rtol=0)


# ---- 1. the same rollout ---------------------------------------------------------------------

@pytest.mark.parametrize("T, kv_heads", [(1, 2), (2, 1), (8, 4), (9, 1), (16, 2), (17, 4)])
def test_there_may_be_any_number_of_slots(T, kv_heads):
    case = make_case(max_completion_length=T, num_key_value_heads=kv_heads, temperature=0.7)
    for each in (case, case.change(uniforms=None)):
        equal(each.decode(), each.rollout())


# ---- 2. a recorded step ----------------------------------------------------------------------

@pytest.fixture
def graphs(monkeypatch):
    """A list of the graphs that are recorded during the test."""
    made = []

    def capture(function, device, capture=decode_path.capture):
        if device.type == "cuda":
            made.append(capture(function, device))
        else:
            with Recording() as recording:
                function()
            made.append(recording.replay)
        return made[-1]
    monkeypatch.setattr(decode_path, "capture", capture)
    return made


def test_a_graph_reads_the_weights_as_they_are_now(graphs):
    case = make_case(device=DEVICE)
    optimizer = torch.optim.AdamW(case.policy.parameters(), lr=0.05)
    outputs = []
    for _ in range(3):
        outputs.append(case.decode())
        equal(outputs[-1], case.rollout(), 2e-5)
        logps, _ = case.script.score(case.policy, case.prompts, outputs[-1][0])
        logps.mean().backward()
        optimizer.step()
    assert not torch.equal(outputs[0][0], outputs[-1][0]) and len(graphs) == 1


def test_what_a_graph_depends_on_is_recorded_anew(graphs, monkeypatch):
    monkeypatch.setattr(decode_path, "NUM_GRAPHS", 99)
    case = make_case(device=DEVICE, end=2.0)
    cases = [case, case.change(prompts=case.prompts[:, 1:]), case.change(temperature=0.5),
             case.change(uniforms=None),
             case.change(uniforms=case.uniforms[:, :19], max_completion_length=19),
             case.change(prompts=case.prompts[::2], uniforms=case.uniforms[::2])]
    for each in cases:
        equal(each.decode(), each.rollout(), 2e-5)
    monkeypatch.setattr(logprob, "choice", "torch")
    equal(case.decode(), case.rollout(), 2e-5)
    case.policy.norm.weight = torch.nn.Parameter(2 * case.policy.norm.weight.data)
    equal(case.decode(), case.rollout())
    assert len(graphs) == 8


NOTE = "note: your GPT is not the one that kernels/decode.py records; sampling without it\n"
NORMED = """        q = rotate(F.rms_norm(q, q.shape[-1:]), cos, sin)
        k = F.rms_norm(k, k.shape[-1:])
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])     # recorded; simulated if there is no GPU
def test_a_gpt_of_your_own_is_sampled_without_a_graph_and_one_line_says_so(
        device, graphs, import_text, capsys):
    source = (ROOT / "grpo.py").read_text("utf-8")
    mine = import_text(replace_once(source, "        q = rotate(q, cos, sin)\n", NORMED))
    decode_path.note_other_gpt.cache_clear()
    simulated = pretend.cuda() if device != DEVICE != "cuda" else contextlib.nullcontext()
    with simulated, torch.no_grad():
        for script, num_graphs in ((mine, 0), (grpo, 2)):
            case = make_case(script, device=device)
            for each in (case, case.change(uniforms=None)):
                found = each.decode()
                equal([x.cpu() for x in found], [x.cpu() for x in each.rollout()])
            assert len(graphs) == num_graphs or device != "cpu"
            assert capsys.readouterr().err == (NOTE if script is mine else "")
