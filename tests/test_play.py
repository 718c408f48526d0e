"""The engine of the playground, in node: what it computes is what the scripts compute, with torch.
And build.py: what a page holds of a run, and which runs have no page."""
import base64
import dataclasses
import hashlib
import json
import random
import re
import shlex
import struct
import zlib
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT
from node_engine import run
from test_tokenizer_verifier import HOSTILE, RIGHT, SEVEN, TEXTS, WRONG, values
from torch import nn

import common
import dpo
import grpo
import reinforce
from tools.play import __main__ as play
from tools.play import build

METHODS = ["GRPO", "Dr. GRPO", "RLOO", "MaxRL"]
PROMPTS = ["((((3+4)-5)*4)-2)=", "((1+2)*3)=", "7", "", "ü*(2="]


# ---- policies --------------------------------------------------------------------------------

class Case(NamedTuple):
    """A policy that was made up, as a page stores it, and as torch has it, in float64."""
    stored: dict
    base: grpo.GPT
    trained: grpo.GPT
    cfg: grpo.Config
    task: common.Task


SHAPES = {"default": {},
          "odd": {"operands": "3-7", "temperature": 0.7, "hidden_size": 48, "num_hidden_layers": 3,
                  "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 50}}


@pytest.fixture(scope="module", params=SHAPES)
def case(request):
    """A Case of the default shape, and one in which all sizes and the temperature are others."""
    return make_case(request.param)


@pytest.fixture(scope="module")
def odd():
    """The second one alone."""
    return make_case("odd")


def make_case(shape):
    cfg = grpo.Config(device="cpu", max_completion_length=12, **SHAPES[shape])
    generator = torch.Generator().manual_seed(0)
    task = common.load_task(cfg, grpo.verify)
    weights = made_up_weights(cfg, generator)
    trained = {name: weight + 0.02 * torch.randn(weight.shape, generator=generator)
               for name, weight in weights.items()}
    packed = build.pack(weights, trained)
    policies = [policy_of(cfg, state).double() for state in build.unpack(packed)]
    return Case({"cfg": build.sizes(grpo, cfg, task), "packed": packed}, *policies, cfg, task)


def made_up_weights(cfg, generator):
    """Weights of a policy that comes to an end about every tenth token, and has tiny embeddings of
    one token, where the eps of norms counts."""
    weights = grpo.GPT(cfg).state_dict()
    for weight in weights.values():
        if weight.dim() == 1:
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    embed = weights["embed.weight"]
    embed *= 10
    embed[:, 0] = 1.0
    embed[grpo.EOS, 0] = 2.2
    embed[ord("(")] *= 0.02
    return weights


def policy_of(cfg, state):
    """The GPT with these weights; its norms have the eps of float32, whatever it computes in."""
    policy = grpo.GPT(cfg)
    policy.load_state_dict(state)
    for module in policy.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = torch.finfo(torch.float32).eps
    return policy


def distance(found, wanted):
    """Of two tensors, relative to the second."""
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def tensors(case, completions):
    """Prompts (B, W), tokens (B, T), mask (B, T) of completions [{"prompt", "tokens"}]."""
    T = case.cfg.max_completion_length
    prompts = grpo.encode_prompts([one["prompt"] for one in completions], case.task, "cpu")
    rows = [one["tokens"] for one in completions]
    tokens = torch.tensor([row + [grpo.PAD] * (T - len(row)) for row in rows])
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (T - len(row)) for row in rows])
    return prompts, tokens, mask.double()


def made_up_completions():
    """Completions of PROMPTS with 1 to 12 tokens, some of which begin alike, one of which is there
    twice."""
    rng = random.Random(0)
    completions = []
    for prompt in PROMPTS:
        tokens = [rng.randrange(320) for _ in range(12)]
        for n in (12, 12, 7, 1):
            completions.append({"prompt": prompt, "tokens": tokens[:n]})
        completions.append({"prompt": prompt, "tokens": [*tokens[:5], grpo.EOS]})
    return completions


# ---- what it reads ---------------------------------------------------------------------------

READ = """
const result = {};
for (const [name, policy] of Object.entries({ base, trained })) {
  const tree = new Tree(policy, inputs.temperature);
  const again = readAgain(tree, inputs.completions);
  const nodes = again.flatMap((completion) => completion.nodes);
  const logits = new Matrix(policy.embed.weight.O, tree.tokens.length);
  linear(logits, tree.hidden, policy.embed.weight, [...new Set(nodes)]);
  result[name] = {
    logits: nodes.map((node) => logits.row(node)),
    p: nodes.map((node) => tree.next[node].p),
    entropy: nodes.map((node) => tree.next[node].entropy),
    logps: again.flatMap((completion) => logProbs(tree, completion)),
  };
}
return result;
"""


def test_logits_chances_and_entropies_of_completions_are_those_of_torch(case):
    completions = made_up_completions()
    found = run(case.stored, READ, completions=completions, temperature=case.cfg.temperature)
    prompts, tokens, mask = tensors(case, completions)
    for name, policy in {"base": case.base, "trained": case.trained}.items():
        with torch.no_grad():
            hidden = grpo.completion_states(policy, prompts, tokens)
            logits = hidden @ policy.embed.weight.T
            logps, entropy = grpo.logprobs(logits, tokens, case.cfg.temperature)
        wanted = {"logits": logits, "p": (logits / case.cfg.temperature).softmax(dim=-1),
                  "entropy": entropy, "logps": logps}
        for key, numbers in wanted.items():
            rows = found[name][key]
            numbers = numbers[mask > 0]
            rows = torch.stack(rows) if key in ("logits", "p") else torch.tensor(rows)
            assert (rows - numbers).abs().max() < 1e-5 * numbers.abs().max(), key


def test_reading_piece_by_piece_gives_what_reading_at_once_gives(case):
    numbers = run(case.stored, """
        const tokens = inputs.tokens;
        const [whole, parts] = [new Tree(base), new Tree(base)];
        whole.addAll(-1, tokens);
        read(whole);
        let node = -1;
        for (let start = 0; start < tokens.length; start += 1 + start % 7) {
          node = parts.addAll(node, tokens.slice(start, start + 1 + start % 7));
          read(parts);
          read(parts);
        }
        const before = parts.tokens.length;
        parts.addAll(-1, tokens);
        const used = ({ hidden }) => hidden.data.slice(0, tokens.length * base.cfg.D);
        return { before, after: parts.tokens.length, whole: used(whole), parts: used(parts) };
        """, tokens=[random.Random(0).randrange(320) for _ in range(150)])
    assert numbers["before"] == numbers["after"] == 150
    assert distance(numbers["parts"], numbers["whole"].double()) < 1e-6


def test_a_norm_of_zeros_is_zero_and_its_gradient_is_finite():
    numbers = run(None, """
        const [x, y, dy, dx, dw] = Array.from({ length: 5 }, () => new Matrix(4, 1));
        const weight = { data: Float32Array.of(1, 2, 3, 4), O: 4 };
        dy.data.fill(1);
        rmsNorm(y, x, weight, [0], inputs.eps);
        rmsNormBackward(dx, dw, dy, x, weight, [0], inputs.eps);
        return [y.data, dx.data, dw.data];
        """, eps=0.25)
    assert [row.tolist() for row in numbers] == [[0, 0, 0, 0], [2, 4, 6, 8], [0, 0, 0, 0]]


def test_chances_of_very_different_logits_are_finite():
    p = run(None, """
        const logits = [Float32Array.of(1000, 999, -1000), Float32Array.of(-1000, -1000, -1000)];
        for (const x of logits) softmax(x, 0.5);
        return logits;
        """)
    wanted = torch.tensor([[2000.0, 1998.0, -2000.0], [0.0, 0.0, 0.0]]).softmax(dim=-1)
    assert torch.allclose(torch.stack(p), wanted)


# ---- what it samples -------------------------------------------------------------------------

SAMPLE = """
const tree = new Tree(base, inputs.temperature);
const rollouts = rollout(tree, inputs.prompts, inputs.uniforms);
const seen = [];
let step = rollouts.next();
for (; !step.done; step = rollouts.next()) seen.push(step.value.map(({ tokens }) => tokens.length));
const completions = step.value;
const other = new Tree(base, inputs.temperature);
return {
  seen,
  completions,
  texts: completions.map((completion) => completionText(completion, cfg)),
  logps: completions.map((completion) => logProbs(tree, completion)),
  again: readAgain(other, completions).map((completion) => logProbs(other, completion)),
  unread: tree.tokens.length - tree.numRead,
};
"""


@pytest.mark.parametrize("is_greedy", [False, True])
def test_completions_are_those_of_a_rollout_with_the_same_random_numbers(case, is_greedy):
    texts = [prompt for prompt in PROMPTS for _ in range(4)]
    uniforms = torch.rand(20, 12, generator=torch.Generator().manual_seed(0)).double()
    uniforms[1] = uniforms[0]
    drawn = None if is_greedy else uniforms
    found = run(case.stored, SAMPLE, prompts=texts, temperature=case.cfg.temperature,
                uniforms=None if is_greedy else uniforms.flatten())
    prompts = grpo.encode_prompts(texts, case.task, "cpu")
    out = grpo.rollout(case.base, prompts, [None] * 20, case.task, case.cfg, drawn)
    lengths = out.lengths.tolist()
    tokens = [row[:n] for row, n in zip(out.tokens.tolist(), lengths)]
    assert [one["tokens"] for one in found["completions"]] == tokens
    assert [one["prompt"] for one in found["completions"]] == texts
    assert found["texts"] == grpo.completion_texts(out)
    assert found["seen"] == [[min(n, t + 1) for n in lengths] for t in range(max(lengths))]
    assert found["unread"] == 0
    if not is_greedy:
        assert len(set(lengths)) > 4
    for row, again, logps in zip(found["logps"], found["again"], out.logps):
        assert row == pytest.approx(logps[:len(row)].tolist(), abs=1e-5)
        assert again == pytest.approx(logps[:len(row)].tolist(), abs=1e-5)


def test_a_token_is_drawn_by_the_inverse_of_the_sum_of_chances():
    p = [0.0, 0.25, 0.25, 0.0, 0.5, 0.0]
    uniforms = [0.0, 0.2, 0.25, 0.4, 0.5, 0.9, None]
    tokens = run(None, """
        const p = Float32Array.from(inputs.p);
        return inputs.uniforms.map((uniform) => sampleToken(p, uniform));
        """, p=p, uniforms=uniforms)
    logits = torch.tensor([p]).log()
    drawn = [None if u is None else torch.tensor([u]) for u in uniforms]
    assert tokens == [grpo.sample_token(logits, u, 1.0).item() for u in drawn]
    assert tokens == [1, 1, 2, 2, 4, 4, 4]


def test_where_chances_add_up_to_less_than_one_the_last_possible_token_is_drawn():
    assert run(None, "return sampleToken([0.3, 0.3, 0], 0.999);") == 1
    assert run(None, "return sampleToken([0.3, 0.4, 0.4], null);") == 1


def test_the_page_answers_200_held_out_problems_as_the_policies_that_it_holds_do():
    stored = build.data_of(build.PAGE.read_text(encoding="utf-8"))
    sizes = stored["cfg"]
    cfg = grpo.Config(
        device="cpu", operands=f"{sizes['minOperands']}-{sizes['maxOperands']}",
        max_completion_length=sizes["T"], hidden_size=sizes["D"], intermediate_size=sizes["F"],
        num_hidden_layers=sizes["numLayers"], num_attention_heads=sizes["H"],
        num_key_value_heads=sizes["KV"])
    task = common.load_task(cfg, grpo.verify)
    problems = common.held_out_problems(task, 200)
    texts = [problem.prompt for problem in problems]
    found = run(stored, """
        return [base, trained].map((policy) => finish(rollout(new Tree(policy), inputs.prompts)));
        """, prompts=texts)
    prompts = grpo.encode_prompts(texts, task, "cpu")
    for state, completions in zip(build.unpack(stored["packed"]), found):
        out = grpo.rollout(policy_of(cfg, state), prompts, problems, task, cfg)
        tokens = [row[:n] for row, n in zip(out.tokens.tolist(), out.lengths.tolist())]
        assert [one["tokens"] for one in completions] == tokens


# ---- what it learns --------------------------------------------------------------------------

REWARDS = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]]   # of PROMPTS
LEARN = """
const found = {};
const tree = new Tree(base, inputs.temperature);
const other = new Tree(base, inputs.temperature);
const sampled = finish(rollout(tree, inputs.prompts, inputs.uniforms));
const again = readAgain(other, sampled);
found.completions = sampled;
for (const method of Object.keys(METHODS)) {
  const factors = inputs.rewards.flatMap((rewards, i) => {
    const group = sampled.slice(4 * i, 4 * i + 4);
    return pushes(advantages(rewards, method), group, method, cfg.T, sampled.length);
  });
  const gradients = [zerosLike(base), zerosLike(base)];
  backward(gradients[0], tree, sampled, factors);
  backward(gradients[1], other, again, factors);
  found[method] = { command: METHODS[method].command, factors,
                    gradients: gradients.map(({ data }) => data) };
}
return found;
"""


@pytest.fixture(scope="module")
def learned(case):
    """What LEARN finds: completions, of which two in a group are the same, and for each method the
    gradients from the tree that sampled, and from another one."""
    uniforms = torch.rand(20, 12, generator=torch.Generator().manual_seed(1)).double()
    uniforms[[3, 18]] = uniforms[[0, 17]]
    return run(case.stored, LEARN, prompts=[prompt for prompt in PROMPTS for _ in range(4)],
               uniforms=uniforms.flatten(), rewards=REWARDS, temperature=case.cfg.temperature)


def loss_of(command, case, completions):
    """The loss of the script that a command names, at its flags, where pi is pi_old."""
    _, file, *words = shlex.split(command)
    script = {"grpo.py": grpo, "reinforce.py": reinforce}[file]
    cfg = common.parse_flags(script.Config, words)
    prompts, tokens, mask = tensors(case, completions)
    logps, _ = script.score(case.base, prompts, tokens, case.cfg.temperature)
    rewards = torch.tensor(REWARDS).double()
    if script is reinforce:
        A = reinforce.advantages(rewards, cfg.baseline).view(-1, 1)
        return reinforce.aggregate(reinforce.policy_loss(logps, A, mask), mask, "sequence_sum")
    surrogate, average = grpo.LOSS_TYPES[cfg.loss_type]
    assert surrogate == "clip"
    A = grpo.advantages(rewards, cfg.scale_rewards).view(-1, 1)
    token_loss = grpo.policy_loss(logps, logps, A, mask, cfg.loss_type)
    return grpo.aggregate(token_loss, mask, average)


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_of_a_step_is_that_of_the_script(case, learned, method):
    assert set(learned) == {"completions", *METHODS}
    completions = learned["completions"]
    assert completions[0]["tokens"] == completions[3]["tokens"]
    loss = loss_of(learned[method]["command"], case, completions)
    wanted = torch.autograd.grad(loss, list(case.base.parameters()))
    flat = torch.cat([gradient.flatten() for gradient in wanted])
    for gradient in learned[method]["gradients"]:
        assert distance(gradient, flat) < 1e-5
        parts = gradient.split([weight.numel() for weight in wanted])
        for (name, _), part, weight in zip(case.base.named_parameters(), parts, wanted):
            assert distance(part, weight.flatten()) < 1e-5, name


@pytest.mark.parametrize("method", METHODS)
def test_a_group_of_equal_rewards_pushes_nothing(learned, method):
    factors = torch.tensor(learned[method]["factors"]).view(5, 4)
    is_pushed = factors.abs().sum(dim=1) > 0
    assert is_pushed.tolist() == [True, False, True, False, True]
    assert (factors[1] == 0).all() and (factors[3] == 0).all()


def test_gradients_add_up_and_without_a_push_there_is_none(case):
    completions = made_up_completions()[:6]
    found = run(case.stored, """
        const tree = new Tree(base, inputs.temperature);
        const again = readAgain(tree, inputs.completions);
        const factors = [[0.5, -2, 0, 1, 0, 0.25], [0, -1.5, 0, 1, 0, 0.25], [0, 0, 0, 0, 0, 0]];
        const gradients = factors.map((pushes) => {
          const gradient = zerosLike(base);
          backward(gradient, tree, again, pushes);
          return gradient.data;
        });
        const sum = zerosLike(base);
        factors[0].forEach((push, i) => backward(sum, tree, [again[i]], [push]));
        return { gradients, sum: sum.data };
        """, completions=completions, temperature=case.cfg.temperature)
    assert completions[0] == completions[1]                 # 0.5 - 2 is as good as 0 - 1.5
    together, merged, nothing = found["gradients"]
    assert distance(merged, together.double()) < 1e-6
    assert distance(found["sum"], together.double()) < 1e-6
    assert (nothing == 0).all()


def test_steps_are_those_of_adamw_along_a_gradient_of_norm_one_at_most(case):
    generator = torch.Generator().manual_seed(0)
    size = sum(weight.numel() for weight in case.base.parameters())
    gradients = [torch.randn(size, generator=generator) * scale / size ** 0.5
                 for scale in (5.0, 0.3, 2.0)]
    for gradient in gradients:
        gradient[:1000] *= 1e-6                             # where the eps of AdamW counts
    found = run(case.stored, """
        const policy = copyOf(base);
        const optimizer = newOptimizer(policy);
        const norms = [];
        const weights = [];
        for (const data of inputs.gradients) {
          norms.push(adamW(policy, { data }, optimizer, inputs.learningRate));
          weights.push(policy.data.slice());
        }
        return { norms, weights, base: base.data };
        """, gradients=gradients, learningRate=0.1)
    weight = nn.Parameter(found["base"].double())
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    for gradient, norm, after in zip(gradients, found["norms"], found["weights"]):
        weight.grad = gradient.double()
        assert nn.utils.clip_grad_norm_([weight], 1.0).item() == pytest.approx(norm, rel=1e-6)
        optimizer.step()
        assert (after - weight).abs().max() < 1e-5 * 0.1
    wanted = torch.cat([weight.flatten() for weight in case.base.parameters()])
    assert torch.equal(found["base"].double(), wanted)      # a copy has learned


# ---- text ------------------------------------------------------------------------------------

def test_prompts_become_the_tokens_that_the_scripts_read(odd):
    prompts = [*PROMPTS, "1<|eos|>2=", "\ud83d", "a\udc00b", "\U0001f600", "\ufeff1", "x\x00",
               "1" * odd.task.prompt_width]
    found = run(odd.stored, "return inputs.prompts.map((prompt) => encodePrompt(prompt, cfg));",
                prompts=prompts)
    assert found == grpo.encode_prompts(prompts, odd.task, "cpu").tolist()


def test_tokens_become_the_text_that_the_scripts_read(odd):
    rng = random.Random(0)
    ids = [[65, 266, 66, 319], [0xff, 65, 0xe4, 0xbd], [0xef, 0xbb, 0xbf, 65], [65, 0xef, 0xbb],
           [0xf0, 0x9f, 0x98], [0xed, 0xa0, 0x80], [0xc0, 0x80], [0xf4, 0x90, 0x80, 0x80], [], [0],
           [0xe2, 0x82, 256, 0xac], list(range(256, 320)), [13, 10, 0xc2, 0x85]]
    ids += [list(text.encode()) for text in TEXTS]
    ids += [[i] for i in range(320)]
    for highest in (320, 270, 256, 128):
        for _ in range(250):
            ids.append([rng.randrange(highest) for _ in range(rng.randrange(40))])
    for _ in range(250):                                    # mostly whole characters
        text = "".join(chr(rng.choice([65, 0xe9, 0x20ac, 0x1f600])) for _ in range(9)).encode()
        ids.append([byte for byte in text if rng.random() < 0.9])
    found = run(odd.stored, "return inputs.ids.map((row) => decode(row, cfg));", ids=ids)
    assert found == [grpo.decode(row) for row in ids]


# ---- the verifier ----------------------------------------------------------------------------

def test_the_verifier_says_what_that_of_the_scripts_says():
    others = ["<answer>-7</answer>", "<answer>-07</answer>", "<answer>-0</answer>",
              "<answer>" + "9" * 20 + "</answer>", "<answer>" + "9" * 21 + "</answer>",
              "<answer>" + "0" * 20 + "7</answer>", "<answer>" + " " * 199 + "7</answer>",
              "<answer>" + " " * 200 + "7</answer>",
              "<answer>7\n</answer>", "\n<answer>7</answer>\n", "<answer>~</answer>",
              "<answer>\x7f</answer>", "<answer>18446744073709551616</answer>",
              "<answer>18446744073709551617</answer>", "\ud800<answer>7</answer>"]
    texts = [*RIGHT, *WRONG, *HOSTILE, *others]
    answers = ["7", "-7", "0", "18446744073709551616", "9" * 20]
    found = run(None, """
        return {
          extracted: inputs.texts.map(extract),
          verdicts: inputs.answers.map((answer) =>
            inputs.texts.map((text) => verify(answer, text))),
          none: inputs.texts.map((text) => verify(null, text)),
        };
        """, texts=texts, answers=answers)
    assert found["extracted"] == [common.extract(text) for text in texts]
    for answer, verdicts in zip(answers, found["verdicts"]):
        problem = SEVEN._replace(answer=answer)
        assert verdicts == [grpo.verify(problem, text) for text in texts], answer
        assert sum(verdicts) > 0
    assert found["none"] == [0] * len(texts)                # to no answer, none is right


# ---- problems --------------------------------------------------------------------------------

def test_the_same_prompts_are_held_out_as_in_the_scripts(odd):
    problems = common.sample_problems(odd.task, 250, 0)
    problems += common.sample_problems(odd.task, 250, 0, "test")
    prompts = [problem.prompt for problem in problems]
    found = run(None, """
        return { hashes: inputs.prompts.map(crc32), held: inputs.prompts.map(isHeldOut) };
        """, prompts=[*prompts, "", "123456789", "naïve 你好"])
    assert found["hashes"][:500] == [zlib.crc32(prompt.encode()) for prompt in prompts]
    assert found["hashes"][500:] == [0, 0xcbf43926, zlib.crc32("naïve 你好".encode())]
    assert found["held"][:500] == [odd.task.is_held_out(problem) for problem in problems]
    assert sum(found["held"][:500]) == 250


def test_sampled_problems_are_those_of_the_task_and_of_the_side_that_is_asked_for(odd):
    found = run(odd.stored, """
        const random = generator(7);
        return [true, false].map((heldOut) => Array.from({ length: 700 }, () => {
          const { prompt, answer } = sampleProblem(random, heldOut, cfg);
          return { prompt, answer, solved: solve(prompt) };
        }));
        """)
    task = odd.task
    operands = []
    digits = []
    on_the_way = set()
    for is_held_out, problems in zip((True, False), found):
        assert len({one["prompt"] for one in problems}) > 600
        for one in problems:
            problem = common.Problem(one["prompt"], one["answer"])
            numbers = values(problem.prompt)
            assert re.fullmatch(r"\(+[0-9][-+*()0-9]+=", problem.prompt)
            assert one["answer"] == one["solved"] == str(numbers[-1])
            on_the_way |= set(numbers)
            assert len(problem.prompt) <= task.prompt_width
            assert task.is_held_out(problem) == is_held_out
            operands.append(len(numbers) + 1)
            digits.append(re.findall("[0-9]+", problem.prompt))
    assert set(operands) == set(range(task.min_operands, task.max_operands + 1))
    assert on_the_way == set(range(21))
    for i in (0, 1):
        assert {row[i] for row in digits} == set("123456789")
    theirs = [problem.prompt for problem in common.sample_problems(task, 1400, 0)]
    ours = [one["prompt"] for problems in found for one in problems]
    for sign in "+-*":                                      # about as often as in the scripts
        shares = [sum(prompt.count(sign) for prompt in prompts) / sum(
            len(re.findall(r"[-+*]", prompt)) for prompt in prompts) for prompts in (ours, theirs)]
        assert shares[0] == pytest.approx(shares[1], abs=0.04)


def random_sum(rng, depth):
    """A random expression of + - * and brackets, some of which are needless."""
    if depth == 0 or rng.random() < 0.2:
        return str(rng.choice([0, 1, 7, 10, 20, 123, 10 ** 17]))
    left, right = random_sum(rng, depth - 1), random_sum(rng, depth - 1)
    text = f"{left}{rng.choice('+-*')}{right}"
    return f"({text})" if rng.random() < 0.4 else text


def test_sums_that_somebody_types_are_solved_as_python_does():
    rng = random.Random(0)
    sums = ["1+2*3", "2*3+1", "10-2-3", "2-3*4-5", "(1+2)*3", "2*(3+4)*5", "0", "12", "1-2",
            "((((7))))", "(" * 12 + "7" + ")" * 12, "9" * 17, "*".join(["99999"] * 9), "3-(4-5)"]
    sums += [random_sum(rng, depth) for depth in (1, 2, 3, 4) for _ in range(100)]
    found = run(None, "return inputs.prompts.map(solve);", prompts=[f"{text}=" for text in sums])
    assert found == [str(eval(text)) for text in sums]
    assert run(None, 'return [solve("007+01="), solve("00=")];') == ["8", "0"]


def test_what_is_no_sum_has_no_answer():
    texts = ["", "=", "1", "1+1", "1=2=", "1==", "=1", "-1=", "(-1)=", "+1=", "1-+1=", "1--1=",
             "1+=", "*1=", "1**2=", "2(3)=", "(1)2=", "(1)(2)=", "(1+2=", "1+2)=", "()=", ")(=",
             "((=", "a=", "1e3=", "0x10=", "1_0=", "1.5=", "1 + 1=", " 1=", "1= ", "1=\n", "\n1=",
             "1+1=2", "1/1=", "1,1=", "x+1=", "\uff11+\uff11=", "\u0663=", "\u00b2=", "\ud800=",
             "\U0001f600=", "1\x00=", "(" * 26, "(" * 13 + "1" + ")" * 12 + "=", "None=", "null",
             "1n=", "1+1=<answer>2</answer>"]
    assert run(None, "return inputs.texts.map(solve);", texts=texts) == [None] * len(texts)


def test_random_numbers_are_a_function_of_the_seed_and_even():
    found = run(None, """
        const draws = [1, 1, 2].map((seed) => uniformNumbers(4000, generator(seed)));
        return [...draws, uniformNumbers(3, generator(0))];
        """)
    one, same, other, known = found
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert known.tolist() == pytest.approx(         # of mulberry32, as others have it
        [0.26642920868471265, 0.0003297457005828619, 0.2232720274478197], abs=1e-15)
    assert one.min() >= 0 and one.max() < 1
    counts = torch.histc(one, 10, 0, 1)
    assert counts.min() > 340 and counts.max() < 460


# ---- scores ----------------------------------------------------------------------------------

def test_pass_at_k_is_that_of_the_scripts():
    cases = [(n, c, k) for n in (1, 4, 8, 64) for c in range(n + 1) for k in range(1, n + 1)]
    found = run(None, "return inputs.cases.map(([n, c, k]) => passAtK(n, c, k));", cases=cases)
    assert found == pytest.approx([common.pass_at_k(*case) for case in cases], abs=1e-12)


def test_the_majority_of_answers_is_that_of_the_scripts(odd):
    rng = random.Random(0)
    lists = [[], [None], [None, None, "1"], ["1", "2"], ["2", "1"], ["1", "2", "2"], [None, "3"],
             ["1", "2", "3", "3", "2"], ["__proto__", "1"], ["1", "10", "1", "10"], ["10", "9"]]
    lists += [rng.choices(["1", "2", "12", None], k=8) for _ in range(300)]
    ks = [1, 2, 3, 5, 8]
    found = run(None, """
        const scores = (answers) => inputs.ks.map((k) => majAtK("2", answers, k));
        const full = inputs.lists.filter((answers) => answers.length === 8);
        return { majorities: inputs.lists.map(majority), scores: full.map(scores) };
        """, lists=lists, ks=ks)
    assert found["majorities"] == [common.majority(answers) for answers in lists]
    problems = [common.Problem("", "2")] * 8
    for answers, scores in zip(lists[-300:], found["scores"], strict=True):
        wanted = [common.maj_at_k(odd.task, problems, answers, 8, k) for k in ks]
        assert scores == pytest.approx(wanted, abs=1e-12)


# ---- what the page holds ---------------------------------------------------------------------

def test_every_finite_number_of_16_bits_is_read():
    numbers = run(None, """
        const bits = Array.from({ length: 65536 }, (_, i) => i);
        return Float32Array.from(bits.filter((i) => (i & 0x7c00) !== 0x7c00), float16);
        """)
    halves = torch.frombuffer(bytearray(struct.pack("<65536H", *range(65536))), dtype=torch.float16)
    wanted = halves[halves.isfinite()].float()
    assert torch.equal(numbers.view(torch.int32), wanted.view(torch.int32))


def test_weights_are_unpacked_as_in_python(odd):
    found = run(odd.stored, "return { base: base.data, trained: trained.data };")
    states = build.unpack(odd.stored["packed"])
    base, trained = [torch.cat([weight.flatten() for weight in state.values()]) for state in states]
    assert torch.equal(found["base"], base)
    ulp = torch.finfo(torch.float32).eps * (base.abs() + (trained - base).abs())
    assert ((found["trained"] - trained).abs() <= ulp).all()
    names = run(odd.stored, "return Object.keys(base.blocks[1].mlp);")
    assert names == ["gate", "up", "down"]


def test_the_base_is_packed_in_half_precision_and_the_difference_to_half_a_step(odd):
    generator = torch.Generator().manual_seed(1)
    weights = made_up_weights(odd.cfg, generator)
    weights["blocks.0.mlp.up.weight"] *= 1e-6               # too small for whole precision
    trained = {name: weight + 0.02 * torch.rand(weight.shape, generator=generator)
               for name, weight in weights.items()}
    trained["norm.weight"] = weights["norm.weight"].half().float()          # has not changed
    packed = json.loads(json.dumps(build.pack(weights, trained)))
    base, again = build.unpack(packed)
    assert list(base) == list(again) == list(weights)
    for (name, weight), scale in zip(weights.items(), packed["scales"]):
        assert torch.equal(base[name], weight.half().float())
        assert (again[name] - trained[name]).abs().max() <= 0.5001 * scale + 1e-7
        assert 0 < scale <= (0.02 + 5e-4 * weight.abs().max()) / 127
    assert torch.equal(again["norm.weight"], trained["norm.weight"])
    grpo.GPT(odd.cfg).load_state_dict(base)


# ---- the run ---------------------------------------------------------------------------------

def exact_states(cfg):
    """Weights of two policies that are the same after they were packed."""
    generator = torch.Generator().manual_seed(0)
    base = {name: weight.half().float() for name, weight in made_up_weights(cfg, generator).items()}
    trained = {}
    for name, weight in base.items():
        steps = torch.randint(-127, 128, weight.shape, generator=generator)
        steps.view(-1)[0] = 127
        trained[name] = weight + steps * 2.0 ** -12
    return base, trained


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of grpo.py that was made up, of a small policy."""
    cfg = grpo.Config(device="cpu", operands="3", hidden_size=16, intermediate_size=12,
                      max_completion_length=4, learning_rate=0.002)
    base, trained = exact_states(cfg)
    torch.save(base, tmp_path / "base.pt")
    torch.save({"policy": trained}, tmp_path / "checkpoint.pt")
    record = {"script": "grpo.py", "config": dataclasses.asdict(cfg)}
    (tmp_path / "config.json").write_text(json.dumps(record))
    (tmp_path / "summary.json").write_text(json.dumps(
        {"steps": 30, "base": {"greedy": 0.125, "problems": 8}, "trained": {"greedy": 0.875}}))
    return tmp_path


def test_a_page_holds_the_policies_of_a_run_its_sizes_and_its_scores(folder):
    data = json.loads(json.dumps(build.read(folder)))
    assert data["run"] == {"script": "grpo.py", "batch_size": 256, "num_updates": 2, "steps": 30,
                           "problems": 8, "base": 0.125, "trained": 0.875}
    expected = {"D": 16, "H": 4, "KV": 1, "F": 12, "numLayers": 2, "T": 4, "promptWidth": 10,
                "EOS": grpo.EOS, "PAD": grpo.PAD, "specialTokens": grpo.SPECIAL_TOKENS,
                "eps": 2.0 ** -23, "minOperands": 3, "maxOperands": 3, "learningRate": 0.002}
    assert data["cfg"] == expected
    saved = [torch.load(folder / "base.pt"), torch.load(folder / "checkpoint.pt")["policy"]]
    for state, wanted in zip(build.unpack(data["packed"]), saved):
        assert all(torch.equal(state[name], weight) for name, weight in wanted.items())


def test_answers_are_counted_that_other_weights_change(odd):
    base, trained = [policy.float().state_dict() for policy in (odd.base, odd.trained)]
    problems = common.held_out_problems(odd.task, 200)
    prompts = grpo.encode_prompts([problem.prompt for problem in problems], odd.task, "cpu")
    answers = []
    for state in (base, trained):
        out = grpo.rollout(policy_of(odd.cfg, state), prompts, problems, odd.task, odd.cfg)
        answers.append(out.tokens.tolist())
    is_changed = [one != other for one, other in zip(*answers)]
    begins_alike = [one[0] == other[0] for one, other in zip(*answers)]
    assert any(changed and alike for changed, alike in zip(is_changed, begins_alike))
    count = lambda one, other: build.count_changed(grpo, odd.cfg, odd.task, one, other)
    assert count(base, trained) == sum(is_changed) > 0
    assert count(base, base) == 0


@pytest.fixture
def refusal(folder, capsys):
    """refusal(): what python -m tools.play says of the folder: one line that names it, code 2."""
    def call():
        with pytest.raises(SystemExit) as stop:
            play.main([str(folder), "--output", str(folder / "play.html")])
        printed = capsys.readouterr()
        assert stop.value.code == 2 and printed.out == "" and not (folder / "play.html").exists()
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
        assert str(folder) in printed.err
        return printed.err
    return call


@pytest.mark.parametrize("flag, value", [
    ("task", "countdown"), ("task", "arithmetic,countdown"), ("reward", "accuracy+format"),
    ("init_from", "runs/a")])
def test_a_run_of_which_the_page_would_not_tell_the_truth_is_refused(folder, refusal, flag, value):
    record = json.loads((folder / "config.json").read_text())
    record["config"][flag] = value
    (folder / "config.json").write_text(json.dumps(record))
    assert f"was trained with --{flag} {value}; name a run" in refusal()


def test_a_run_of_dpo_is_refused(folder, refusal):
    record = {"script": "dpo.py", "config": dataclasses.asdict(dpo.Config(device="cpu"))}
    (folder / "config.json").write_text(json.dumps(record))
    assert "learns from pairs" in refusal()


def test_a_run_that_has_not_ended_and_a_folder_of_something_else_are_refused(folder, refusal):
    (folder / "summary.json").unlink()
    assert "has not ended; resume it" in refusal()
    (folder / "config.json").unlink()
    assert "name the folder of a run" in refusal()


@pytest.mark.parametrize("name", ["base.pt", "checkpoint.pt"])
def test_a_damaged_policy_is_refused(folder, refusal, name):
    path = folder / name
    content = path.read_bytes()
    for damaged in (b"", content[:-100], content.replace(b"embed.weight", b"embed.wiight")):
        path.write_bytes(damaged)
        assert f"{name}: holds no policy of this run" in refusal()
    wider = grpo.GPT(grpo.Config(hidden_size=24)).state_dict()
    for other in (wider, {"policy": wider}, {}, [1]):
        torch.save(other, path)
        assert f"{name}: holds no policy of this run" in refusal()


@pytest.mark.parametrize("name, number", [("base", 1.0 + 2 ** -12), ("trained", 1e4)])
def test_a_run_whose_packed_policies_answer_otherwise_is_refused(folder, refusal, name, number):
    """A base whose two likeliest tokens differ by less than half precision can tell; a trained
    policy with one weight that is far from that of the base, so that steps are large."""
    states = exact_states(grpo.Config(operands="3", hidden_size=16, intermediate_size=12))
    state = states[name == "trained"]
    embed = state["embed.weight"]
    if name == "base":
        embed[318] = embed[grpo.EOS] * number
    else:
        embed[318, 5] = number
    path = folder / ("base.pt" if name == "base" else "checkpoint.pt")
    torch.save(state if name == "base" else {"policy": state}, path)
    assert f"packed, the policy {name} answers " in refusal()


def test_one_answer_that_changes_is_one_too_many(folder, refusal, monkeypatch):
    monkeypatch.setattr(build, "count_changed", lambda *_: 1)
    assert "answers 1 of 200 problems otherwise; name another run" in refusal()


# ---- the page --------------------------------------------------------------------------------

def digest(text):
    """What a browser computes of a script or a style sheet that stands in a page."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_page_holds_the_data_and_allows_its_own_script_and_style_alone(folder):
    data = build.read(folder)
    data["cfg"]["specialTokens"] = ["</script><script>alert(1)</script>", "<!--", "$style"]
    page = build.assemble(data)
    assert build.data_of(page) == json.loads(json.dumps(data))
    [style] = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    [script] = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    assert page.count("<script") == page.count("</script") == 2
    [policy] = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', page, re.DOTALL)
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest(script)}'" in policy
    assert f"style-src 'sha256-{digest(style)}'" in policy
    for name in build.SCRIPTS:
        assert (ROOT / "tools/play" / name).read_text(encoding="utf-8") in script
    assert script.lstrip().startswith('"use strict";')


@pytest.mark.parametrize("data", [None, "{", "[]", "{}", '{"run": {}, "cfg": {}, "packed": {}}'])
def test_without_a_run_a_page_that_is_none_or_damaged_is_refused(tmp_path, capsys, data):
    path = tmp_path / "a.html"
    element = f'<script id="data" type="application/json">{data}</script>'
    text = "<title>another page</title>" if data is None else element
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        play.main(["--output", str(path)])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and printed.count("\n") == 1
    assert printed.startswith(f"error: {path}: ") and "name a run" in printed
    assert path.read_text() == text


def test_without_a_run_the_page_keeps_its_policies_and_is_made_anew(folder, tmp_path):
    path = tmp_path / "a.html"
    play.main([str(folder), "--output", str(path)])
    page = path.read_text(encoding="utf-8")
    path.write_text(page.replace("Small print", "Large print"), encoding="utf-8")
    play.main(["--output", str(path)])
    assert path.read_text(encoding="utf-8") == page
    assert [other.name for other in tmp_path.glob("a.html*")] == ["a.html"]


def test_a_page_whose_writing_is_broken_off_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.html"
    path.write_text("old")

    def write_half(self, text, **_):
        with open(self, "w") as file:
            file.write(text[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "write_text", write_half)
    with pytest.raises(KeyboardInterrupt):
        build.write(path, "new text")
    assert path.read_text() == "old"


def test_the_committed_page_is_made_of_todays_parts():
    page = build.PAGE.read_text(encoding="utf-8")
    data = build.data_of(page)
    assert build.assemble(data) == page
    cfg = grpo.Config(device="cpu")
    today = build.sizes(grpo, cfg, common.load_task(cfg, grpo.verify))
    assert data["cfg"] == json.loads(json.dumps(today))
    shapes = [[name, *build.shape(weight)] for name, weight in grpo.GPT(cfg).state_dict().items()]
    assert data["packed"]["shapes"] == shapes
    assert len(page.encode()) < 600_000


@pytest.mark.parametrize("prompt, expected", [
    ("((((6-1)-2)*4)+8)=", True), ("(3+4)=", True), ("3+4=", False), ("(3+4)", False),
    ("((3+4)=", False), ("(3+4))=", False), ("(3/4)=", False), ("(13+4)=", False),
    ("(3+0)=", False), ("(3+(4*2))=", False), ("7=", False), ("", False)])
def test_a_prompt_of_the_task_is_known_by_its_form(prompt, expected):
    assert run(None, "return hasTaskForm(inputs.prompt);", prompt=prompt) is expected


def test_the_page_is_written_where_the_command_says(folder, tmp_path, capsys):
    play.main([str(folder), "--output", str(tmp_path / "a.html")])
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert build.data_of(page)["run"]["steps"] == 30
    size = len(page.encode()) // 1000
    assert capsys.readouterr().out == f"{size} kB  {tmp_path / 'a.html'}\n"
    assert build.PAGE == ROOT / "docs/play.html"


@pytest.mark.parametrize("output, most, said", [
    ("a.html", 50_000, "name a run of a smaller policy"),
    ("missing/a.html", 600_000, "No such file")])
def test_a_page_that_is_too_large_or_cannot_be_written_is_refused_in_one_line(
        folder, tmp_path, capsys, monkeypatch, output, most, said):
    monkeypatch.setattr(build, "MOST_BYTES", most)
    with pytest.raises(SystemExit) as stop:
        play.main([str(folder), "--output", str(tmp_path / output)])
    printed = capsys.readouterr()
    assert stop.value.code == 2 and not (tmp_path / output).exists()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert said in printed.err


@pytest.mark.parametrize("content", [
    "{}", "[]", "", '{"steps": 1, "base": 3}',
    '{"steps": "<b>", "base": {"greedy": 0, "problems": 1}, "trained": {"greedy": 1}}',
    '{"steps": 1, "base": {"greedy": null, "problems": 1}, "trained": {"greedy": 1}}'])
def test_a_damaged_summary_is_refused(folder, refusal, content):
    (folder / "summary.json").write_text(content)
    assert "summary.json is damaged" in refusal()


def test_no_line_of_the_page_is_wider_than_those_of_the_scripts():
    for path in (ROOT / "tools/play").iterdir():
        if path.is_file():
            assert max(map(len, path.read_text(encoding="utf-8").splitlines()), default=0) <= 100
