"""The engine of the playground, run in node, computes what the scripts compute with torch. A page
holds the policies of its run, and runs only its own script."""
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
from learn.play import __main__ as play
from learn.play import build

SCRIPTS = {"grpo.py": grpo, "gspo.py": gspo, "reinforce.py": reinforce}
PROMPTS = ["((((3+4)-5)*4)-2)=", "((1+2)*3)=", "7", "", "ü*(2="]
REWARDS = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]]   # of PROMPTS
STORED = build.data_of(build.PAGE)
T = STORED["cfg"]["T"]
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


# ---- a step ----------------------------------------------------------------------------------

METHODS = ["GRPO", "Dr. GRPO", "MaxRL", "DAPO", "CISPO", "GSPO", "REINFORCE"]
PROBLEMS = [common.Problem(prompt, "") for prompt in PROMPTS for _ in range(4)]
# random numbers for completions, of which two in a group are the same
UNIFORMS = torch.rand(20, T, generator=torch.Generator().manual_seed(1)).double()
UNIFORMS[[3, 18]] = UNIFORMS[[0, 17]]


@pytest.fixture(scope="module")
def written():
    """Sample completions of the base with grpo.py. -> prompts (B, W), tokens (B, T), mask (B, T)"""
    prompts = grpo.encode_prompts(PROBLEMS, TASK, "cpu")
    tokens, mask, *_ = grpo.rollout(BASE, prompts, PROBLEMS, CFG, UNIFORMS)
    return prompts, tokens, mask.double()


@pytest.fixture(scope="module")
def learned():
    """Sample the same completions in node. For each method, with and without a clip, compute its
    gradient of the trained policy on them."""
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
        """, prompts=[problem.prompt for problem in PROBLEMS],
        uniforms=UNIFORMS.flatten(), rewards=REWARDS, temperature=TEMPERATURE)


def loss_of(command, is_clipping, prompts, tokens, mask):
    """Compute the loss of the script that a command names, at its flags. -> scalar"""
    file, *words = shlex.split(command)
    script = SCRIPTS[file]
    cfg = plumbing.parse_flags(script.Config, words)
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
def test_the_gradient_of_a_step_is_that_of_the_script(learned, written, method):
    assert learned["methods"] == METHODS
    assert learned["ranges"]["gspo"] == [gspo.Config.epsilon, gspo.Config.epsilon_high]
    command, *gradients = learned[method]
    for gradient, is_clipping in zip(gradients, (True, False)):
        loss = loss_of(command, is_clipping, *written)
        wanted = torch.autograd.grad(loss, list(TRAINED.parameters()))
        parts = torch.tensor(gradient).double().split([weight.numel() for weight in wanted])
        for (name, _), part, weight in zip(TRAINED.named_parameters(), parts, wanted):
            weight = weight.flatten()
            assert (part - weight).norm() < 2e-5 * weight.norm(), name
    assert (gradients[0] == gradients[1]) == (method == "REINFORCE")


def test_samples_are_those_of_the_script_with_the_same_random_numbers(learned, written):
    _, tokens, mask = written
    rows = [row[is_written].tolist() for row, is_written in zip(tokens, mask.bool())]
    assert [one["tokens"] for one in learned["completions"]] == rows and rows[0] == rows[3]


def test_steps_of_adamw_are_those_of_torch_with_short_and_long_gradients():
    weights = torch.tensor([0.5, -1.0, 2.0])
    gradients = [[0.1, -0.2, 0.0], [3.0, 4.0, -12.0], [-0.3, 0.0, 0.1]]     # the second is clipped
    found = in_node("""
        const policy = { data: Float32Array.from(inputs.weights) };
        const optimizer = newOptimizer(policy);
        const norms = inputs.gradients.map((data) => adamW(policy, { data }, optimizer, 0.1));
        return { norms, weights: policy.data };
        """, weights=weights, gradients=gradients)
    weights = nn.Parameter(weights)
    optimizer = plumbing.AdamW([weights], lr=0.1)
    norms = []
    for gradient in gradients:
        weights.grad = torch.tensor(gradient)
        norms.append(nn.utils.clip_grad_norm_([weights], 1.0).item())
        optimizer.step()
    assert found["norms"] == pytest.approx(norms)
    assert found["weights"] == pytest.approx(weights.tolist(), abs=1e-5)


def test_verdicts_and_held_out_problems_are_those_of_the_script():
    answers = ["7", "-7"] * 6
    texts = ["<answer>7</answer>", "<answer>-7</answer>", "<answer> 07 </answer>", "7", "",
             "<answer>7", "<answer>7</answer><answer>7</answer>", "<think>7</think><answer>8",
             "<answer>7.0</answer>", "<answer>\uff17</answer>", "<answer>- 7</answer>", "<answer>"]
    prompts = [problem.prompt for problem in common.sample_problems(TASK, 40, 0)]
    prompts += [problem.prompt for problem in common.sample_problems(TASK, 5, 0, "test")]
    found = in_node("""
        return [inputs.texts.map((text, i) => verify(inputs.answers[i], text)),
                inputs.prompts.map(isHeldOut)];
        """, answers=answers, texts=texts, prompts=prompts)
    verdicts = [grpo.verify(common.Problem("", answer), text)
                for answer, text in zip(answers, texts)]
    assert found == [verdicts, [False] * 40 + [True] * 5] and 0 < sum(verdicts) < len(verdicts)


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
