"""The engine of the playground, run in node, computes what the scripts compute with torch, and its
levers do what they say. A page holds the policies of its run, and runs only its own script."""
import json
import re
import shlex
import shutil
import subprocess

import pytest
import torch
from torch import nn

import common
import grpo
import gspo
import plumbing
import reinforce
import tasks
from learn.play import __main__ as play
from learn.play import build

SCRIPTS = {"grpo.py": grpo, "gspo.py": gspo, "reinforce.py": reinforce}
PROMPTS = ["((((3+4)-5)*4)-2)=", "((1+2)*3)=", "7", "", "ü*(2="]
REWARDS = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]]   # of PROMPTS
STORED = build.data_of(build.PAGE)
T = STORED["cfg"]["T"]
RATE = STORED["cfg"]["learningRate"]
TEMPERATURE = 0.7
CFG = grpo.Config(device="cpu", temperature=TEMPERATURE)
TASK = common.load_task(CFG, grpo.verify)


def policy_of(state):
    """Load the GPT with these weights, in float64; its norms have the eps of float32."""
    policy = grpo.GPT(CFG)
    policy.load_state_dict(policy.state_dict() | state)
    for module in policy.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = torch.finfo(torch.float32).eps
    return policy.double()


BASE, TRAINED = map(policy_of, build.unpack(STORED["packed"]))
READ = """
const { inputs, stored } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const cfg = stored.cfg;
const { base, trained } = unpack(stored.packed, cfg);
const result = (() => {
"""
WRITE = """
})();
console.log(JSON.stringify(result, (key, value) =>
  value instanceof Float32Array ? Array.from(value) : value));
"""


def in_node(snippet, **inputs):
    """Run the body of a JavaScript function, which can use everything that the files of the engine
    define, `inputs`, and the cfg, base and trained policy of the page. -> result"""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    files = [(build.FOLDER / name).read_text(encoding="utf-8") for name in build.ENGINE]
    program = "\n".join(['"use strict";', *files, READ, snippet, WRITE])
    text = json.dumps({"stored": STORED, "inputs": inputs}, default=torch.Tensor.tolist)
    done = subprocess.run(["node", "--eval", program], input=text, capture_output=True,
                          encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


# ---- the policy ------------------------------------------------------------------------------

def random_numbers(seed):
    """Draw the random numbers of 20 completions. -> (20, T)"""
    return torch.rand(20, T, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("is_greedy", [False, True])
def test_completions_are_those_of_a_rollout_with_the_same_random_numbers(is_greedy):
    uniforms = None if is_greedy else random_numbers(0)
    texts = [prompt for prompt in PROMPTS for _ in range(4)]
    found = in_node("""
        const tree = new Tree(base, inputs.temperature);
        const completions = finish(rollout(tree, inputs.prompts, inputs.uniforms));
        return completions.map((one) => [one.tokens, completionText(one, cfg)]);
        """, prompts=texts, temperature=TEMPERATURE,
        uniforms=None if is_greedy else uniforms.flatten())
    problems = [common.Problem(text, "") for text in texts]
    prompts = grpo.encode_prompts(problems, TASK, "cpu")
    tokens, *_, lengths = grpo.rollout(BASE, prompts, problems, CFG, uniforms)
    wanted = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist())]
    assert found == [[row, grpo.decode([i for i in row if i != grpo.EOS])] for row in wanted]
    assert is_greedy or len(set(map(len, wanted))) > 4


# ---- a step ----------------------------------------------------------------------------------

METHODS = ["GRPO", "Dr. GRPO", "MaxRL", "DAPO", "CISPO", "GSPO", "REINFORCE"]


@pytest.fixture(scope="module")
def learned():
    """Sample completions of the base, of which two in a group are the same. For each method, with
    and without a clip, compute its gradient of the trained policy on them."""
    uniforms = random_numbers(1)
    uniforms[[3, 18]] = uniforms[[0, 17]]
    return in_node("""
        const tree = new Tree(base, inputs.temperature);
        const completions = finish(rollout(tree, inputs.prompts, inputs.uniforms));
        const oldLogps = completions.map((one) => logProbs(tree, one));
        const later = new Tree(trained, inputs.temperature);
        const again = readAgain(later, completions);
        const numTokens = completions.flatMap(({ tokens }) => tokens).length;
        const step = { B: completions.length, T: cfg.T, numTokens };
        const found = { methods: Object.keys(METHODS), ranges: CLIP_RANGES, completions };
        for (const method of found.methods) {
          const A = inputs.rewards.flatMap((rewards) => advantages(rewards, method));
          const gradientOf = (isClipping) => {
            const gradient = zerosLike(trained);
            const factors = again.map((one, i) =>
              pushes(A[i], logProbs(later, one), oldLogps[i], method, step, isClipping));
            backward(gradient, later, again, factors);
            return gradient.data;
          };
          found[method] = [METHODS[method].command, gradientOf(true), gradientOf(false)];
        }
        return found;
        """, prompts=[prompt for prompt in PROMPTS for _ in range(4)],
        uniforms=uniforms.flatten(), rewards=REWARDS, temperature=TEMPERATURE)


def loss_of(command, completions, is_clipping):
    """Compute the loss of the script that a command names, at its flags. -> scalar"""
    file, *words = shlex.split(command)
    script = SCRIPTS[file]
    cfg = plumbing.parse_flags(script.Config, words)
    problems = [common.Problem(one["prompt"], "") for one in completions]
    prompts = grpo.encode_prompts(problems, TASK, "cpu")
    rows = [one["tokens"] for one in completions]
    tokens = torch.tensor([row + [grpo.PAD] * (T - len(row)) for row in rows])
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (T - len(row)) for row in rows]).double()
    logps, _ = script.score(TRAINED, prompts, tokens, TEMPERATURE)
    old_logps = script.score(BASE, prompts, tokens, TEMPERATURE)[0].detach()
    rewards = torch.tensor(REWARDS).double()
    if script is reinforce:
        A = reinforce.advantages(rewards, cfg.baseline).view(-1, 1)
        return reinforce.aggregate(reinforce.policy_loss(logps, A, mask), mask, "sequence_sum")
    _, average = script.LOSS_TYPES[cfg.loss_type]
    A = script.advantages(rewards, cfg.scale_rewards).view(-1, 1)
    clip_range = (cfg.epsilon, cfg.epsilon_high) if is_clipping else (1e9, 1e9)
    loss = script.policy_loss(logps, old_logps, A, mask, cfg.loss_type, *clip_range)
    return script.aggregate(loss, mask, average, max_length=T)


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_of_a_step_is_that_of_the_script(learned, method):
    assert learned["methods"] == METHODS
    assert learned["ranges"]["gspo"] == [gspo.Config.epsilon, gspo.Config.epsilon_high]
    completions = learned["completions"]
    assert completions[0]["tokens"] == completions[3]["tokens"]
    command, *gradients = learned[method]
    for gradient, is_clipping in zip(gradients, (True, False)):
        loss = loss_of(command, completions, is_clipping)
        wanted = torch.autograd.grad(loss, list(TRAINED.parameters()))
        parts = torch.tensor(gradient).double().split([weight.numel() for weight in wanted])
        for (name, _), part, weight in zip(TRAINED.named_parameters(), parts, wanted):
            weight = weight.flatten()
            assert (part - weight).norm() < 2e-5 * weight.norm(), name
    assert (gradients[0] == gradients[1]) == (method == "REINFORCE")


def test_steps_are_those_of_adamw_along_a_gradient_of_norm_one_at_most():
    start, *gradients = torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))
    gradients = [gradient * scale / 2000 ** 0.5 for gradient, scale in zip(gradients, (5.0, 0.3))]
    for gradient in gradients:
        gradient[:500] *= 1e-6                              # where the eps of AdamW counts
    found = in_node("""
        const policy = { data: Float32Array.from(inputs.start) };
        const optimizer = newOptimizer(policy);
        for (const data of inputs.gradients) adamW(policy, { data }, optimizer, 0.1);
        return policy.data;
        """, start=start, gradients=gradients)
    weight = nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    for gradient in gradients:
        weight.grad = gradient.double()
        nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
    assert (torch.tensor(found) - weight).abs().max() < 1e-6


# ---- the levers, with the base of docs/play.html ---------------------------------------------

WHOLE = ["Learning rate × 10", "Four updates, no clip", "GSPO, four updates"]


@pytest.fixture(scope="module")
def steps():
    """Take a step with the usual settings and with those of each lever: its first group, and for
    some all of it. -> name -> dict"""
    return in_node("""
        const found = {};
        for (const { name, set } of [{ name: "", set: {} }, ...LEVERS]) {
          const settings = { ...USUAL, ...set };
          const run = newRun(base, settings);
          const steps = trainStep(run);
          const { tree, ...group } = steps.next().value;
          if (inputs.whole.includes(name)) finish(steps);
          const far = run.policy.data.reduce((most, weight, i) =>
            Math.max(most, Math.abs(weight - base.data[i])), 0);
          found[name] = { settings, group, far, temperature: tree.temperature, log: run.log[0],
                          numUpdates: run.optimizer.steps, command: commandOf(settings, cfg) };
        }
        return found;
        """, whole=WHOLE)


def paid(kind, right, text, tokens):
    """Compute what a completion earns."""
    begins_with_1 = (tasks.extract(text) or "").startswith("1")
    return {"right": right, "wrong": 1 - right, "bug": float(right or begins_with_1),
            "length": len(tokens) / T}[kind]


def test_a_step_with_a_lever_does_what_the_lever_says_and_shows_its_command(steps):
    for name, step in steps.items():
        settings, group = step["settings"], step["group"]
        problem = common.Problem(group["prompt"], group["answer"])
        assert step["temperature"] == float(settings["temperature"]), name
        rewards = [paid(settings["reward"], grpo.verify(problem, text), text, one["tokens"])
                   for text, one in zip(group["texts"], group["completions"], strict=True)]
        assert len(rewards) == int(settings["group"]), name
        assert group["rewards"] == pytest.approx(rewards), name
        if settings["baseline"] != "mean":
            A = torch.tensor(rewards) - float(settings["baseline"])
            assert group["A"] == pytest.approx(A.tolist()), name
        if settings["reward"] != "right" or settings["baseline"] != "mean":
            assert step["command"] is None, name
            continue
        python, file, *words = shlex.split(step["command"])
        cfg = plumbing.parse_flags(SCRIPTS[file].Config, words)
        assert cfg.num_generations == int(settings["group"]) == 64 / cfg.num_prompts
        assert cfg.temperature == float(settings["temperature"])
        assert cfg.learning_rate == pytest.approx(RATE * float(settings["rate"]))
        num_updates = cfg.num_iterations * cfg.num_mini_batches
        assert num_updates == (1 if settings["updates"] == "1" else 4)
        assert settings["updates"] != "free" or cfg.epsilon > 1e6 < cfg.epsilon_high
    fast, free, clipped = (steps[name] for name in WHOLE)
    assert [fast["numUpdates"], free["numUpdates"], clipped["numUpdates"]] == [1, 4, 4]
    assert fast["far"] == pytest.approx(10 * RATE, rel=0.01)    # one update of AdamW
    assert free["log"]["clipped"] == 0 < clipped["log"]["clipped"]


# ---- texts, problems, scores -----------------------------------------------------------------

def test_tokens_texts_verdicts_and_held_out_problems_are_those_of_the_scripts():
    prompts = [*PROMPTS, "1<|eos|>2=", "\ud83d", "a\udc00b", "\U0001f600", "\ufeff1", "x\x00"]
    ids = [[0xef, 0xbb, 0xbf, 65], [0xed, 0xa0, 0x80], [0xe2, 0x82, 256, 0xac], list(range(320))]
    texts = [f"<answer>{number}</answer>"
             for number in ("7", "07", "-7", " 7 ", "7.0", "", "٧", "9" * 21, " " * 200 + "7")]
    texts += ["7", "<answer>7", texts[0] * 2, texts[0] + "</answer>", "\ud800"]
    drawn = [problem for split in ("train", "test")
             for problem in common.sample_problems(TASK, 99, 0, split)]
    found = in_node("""
        const random = generator(7);
        return { held: inputs.drawn.map(isHeldOut),
                 sampled: Array.from({ length: 99 }, () => sampleProblem(random, true, cfg)),
                 encoded: inputs.prompts.map((prompt) => encodePrompt(prompt, cfg)),
                 decoded: inputs.ids.map((row) => decode(row, cfg)),
                 verdicts: inputs.texts.map((text) => verify("7", text)) };
        """, prompts=prompts, ids=ids, texts=texts, drawn=[problem.prompt for problem in drawn])
    problems = [common.Problem(prompt, "7") for prompt in prompts]
    assert found["encoded"] == grpo.encode_prompts(problems, TASK, "cpu").tolist()
    assert found["decoded"] == [grpo.decode(row) for row in ids]
    assert found["verdicts"] == [grpo.verify(problems[0], text) for text in texts]
    assert found["held"] == [False] * 99 + [True] * 99
    for one in found["sampled"]:
        assert one["answer"] == str(eval(one["prompt"].removesuffix("=")))
        assert TASK.is_held_out(common.Problem(one["prompt"], one["answer"]))


def test_a_typed_problem_is_solved_as_python_does_and_anything_else_is_not_evaluated():
    sums = ["7", "2+3*4", "2*3+4", "9-4-3", "9-(4-3)", "((1+2)*3-4)*5", "17*23-1*(6+25)"]
    no_sums = ["", "3+", "((3)", "3(4)", "-3", "2*-3", "()", "3=4", "~3", "3**4", "3 4"]
    solved = in_node('return inputs.typed.map((text) => solve(text + "="));',
                     typed=sums + no_sums)
    assert solved == [str(eval(text)) for text in sums] + [None] * len(no_sums)


# ---- the page --------------------------------------------------------------------------------

def test_a_page_of_a_run_runs_its_own_script_alone(run):
    data = build.read(run)
    assert (data["run"]["script"], data["run"]["steps"], data["run"]["problems"]) == (
        "grpo.py", 1, 4)
    data["cfg"]["specialTokens"] = ["</script><script>alert(1)</script>", "<!--", "$style"]
    page = build.assemble(data)
    (run / "play.html").write_text(page, encoding="utf-8")
    assert build.data_of(run / "play.html") == json.loads(json.dumps(data))
    assert page.count("<script") == page.count("</script") == 2
    assert re.search("content=\"default-src 'none'; .*?script-src 'sha256-", page, re.DOTALL)


def test_the_committed_page_is_made_of_todays_parts():
    assert build.assemble(STORED) == build.PAGE.read_text(encoding="utf-8")
    assert STORED["cfg"] == json.loads(json.dumps(build.sizes(grpo, CFG, TASK)))


@pytest.mark.parametrize("name, value, message", [
    ("task", "countdown", "was trained with --task countdown"), ("reward", "format", "--reward"),
    ("embed.weight", 1e4, "answer differently")])   # so large that packing loses all else
def test_a_run_that_the_page_cannot_show_truthfully_is_refused(run, refused, name, value,
                                                               message):
    record = json.loads((run / "config.json").read_text())
    saved = torch.load(run / "checkpoint.pt")
    if name in record["config"]:
        record["config"][name] = value
    else:
        saved["policy"][name].normal_()[318, 5] = value
    (run / "config.json").write_text(json.dumps(record))
    torch.save(saved, run / "checkpoint.pt")
    refused(message, play.main, [str(run)])
