"""Test that real.py, and the rungs of the path on it, compute what nano.py computes, on models of
several families; and the mistakes that people make here: padding, ends, temperature, templates."""
import contextlib
import inspect
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from small_models import NEEDS, SHAPES, gradient, random_model, save_random
from torch.testing import assert_close as same

from learn.path import rungs
from report import check

pytest.importorskip("transformers", reason=NEEDS)
import real
from engines import export  # noqa: F401  (before the tests, which block some modules)

QUESTIONS = ["(3+4)=", "3>", "((((3+4)-5)*4)-2)=", "12", "Say yes:"]
PAGE = Path(rungs.ROOT, "docs/real-models.md").read_text("utf-8")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "granite", "gpt2", "gemma3_text")
SMALL = {"P": 4, "G": 4, "W": 90, "T": 24, "N": 7, "M": 3, "HELD_OUT": 3}


@pytest.fixture(autouse=True)
def change(monkeypatch, tmp_path):
    """change(**values): sets globals of real.py. Each test begins with small sizes, in an empty
    folder."""
    def set_values(**values):
        for name, value in values.items():
            monkeypatch.setattr(real, name, value)
    monkeypatch.chdir(tmp_path)
    set_values(**SMALL)
    return set_values


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a random Llama, which no test may change."""
    return save_random(tmp_path_factory.mktemp("model") / "llama")


def module(source, **values):
    """Run a script that is like real.py, and set its globals, by default to small sizes."""
    script = types.ModuleType("script")
    script.__file__ = real.__file__
    exec(source, vars(script))
    vars(script).update(SMALL | values)
    return script


def small_source(**values):
    """Write the values and the small sizes into the text of real.py."""
    source = inspect.getsource(real)
    for name, value in (SMALL | values).items():
        source = re.sub(rf"^{name} = \d+", f"{name} = {value}", source, flags=re.M)
    return source


def write_rows(rows):
    """Write data.jsonl, with blank lines between the rows."""
    Path("data.jsonl").write_text("\n\n".join(map(json.dumps, rows)))


def sums(n=20):
    """Write n sums, which is quicker than to make up 10,000. -> file"""
    write_rows({"prompt": f"{i}+1=", "answer": i + 1} for i in range(n))
    return "data.jsonl"


def batch_of(folder, G=4):
    """A policy, its outputs to questions of different lengths, and log pi of the sampler."""
    policy = real.load(folder)
    torch.manual_seed(0)
    prompts = real.encode([question for question in QUESTIONS for _ in range(G)], real.W)
    with torch.no_grad():
        uniforms = 1 - torch.rand(len(prompts), real.T)
        return policy, *real.sample_few(policy, prompts, uniforms, False)


# ---- nano.py, and TRL with our loss ----------------------------------------------------------

def training(source):
    """The functions of a script that train, except for make_base, and its loop."""
    _, _, functions = source.partition("# ---- training -")
    functions, _, main = functions.partition("\ndef evaluate(")
    functions, _, _ = functions.partition("\ndef make_base(")
    _, _, loop = main.partition("    optimizer = ")
    return functions.rstrip(), re.split('    print."held-out|\ndef main', loop)[0].rstrip()


@pytest.mark.parametrize("name", ["nano", *rungs.REAL_RUNGS[:-1]])    # without the agent
def test_the_training_step_is_that_of_nano_word_for_word(name):
    source = rungs.REAL if name == "nano" else rungs.real_script(name)
    """But for a fused optimizer, a generator, judge, spaces, and the metrics of a step."""
    plain = source.replace(f",\n{rungs.FUSED}", ")").replace(", generator=DRAWS", "")
    plain = plain.replace("map(judge, ", "map(verify, ")
    plain = re.sub(r"\n {8}yield step.*|(?<=    )norm = |\n    METRICS.*(?=\n\n)", "", plain)
    ours, theirs = ([re.sub(" {2,}#", "  #", part) for part in training(text)]
                    for text in (plain, rungs.script(name)))
    assert ours == theirs and "\ndef descend(" in source


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_trl_with_our_loss(family, change):
    """With temperature 0.8, off-policy, with dropout in GPT-2's config. TRL gives a model no
    positions, so a padded prompt of GPT-2 has others, and is left out."""
    trl = pytest.importorskip("trl", reason=NEEDS)
    from datasets import Dataset

    from engines.trl import Trainer
    change(TEMPERATURE=0.8)
    folder = random_model(family)
    policy, tokens, sampled_logps = batch_of(folder)
    if family == "gpt2":
        tokens, sampled_logps = tokens[8:12].repeat(5, 1), sampled_logps[8:12].repeat(5, 1)
    tokens[0, -5:] = real.PAD                                   # one is shorter
    logps, mask = real.logprobs(policy, tokens)
    same(logps.detach() * mask, sampled_logps * mask, atol=1e-5, rtol=0)
    assert mask.sum(1).max() == real.T and mask.sum(1).min() < real.T and logps.std() > 0.5
    for row, ours in zip(tokens[::4], logps[::4]):              # a row does not see its padding
        same(real.logprobs(policy, row[None])[0][0], ours, atol=1e-5, rtol=0)
    old_logps = (logps + 0.3 * torch.randn_like(logps)).detach() * mask
    A = real.advantages(torch.rand(5, 4)).view(-1, 1)
    ours = gradient(policy, real.surrogate_loss(logps, old_logps, A, mask))

    args = trl.GRPOConfig(
        "out", temperature=0.8, use_cpu=True, bf16=False, report_to="none",
        max_completion_length=real.T, per_device_train_batch_size=5, num_generations=5,
        gradient_accumulation_steps=4, activation_checkpointing=False, disable_dropout=True)
    trainer = Trainer(str(folder), lambda **_: None, args,
                      Dataset.from_list([{"prompt": "a"}]), loss="grpo epsilon_high=0.28")
    trainer.current_gradient_accumulation_steps = 4
    trainer.model.train()
    is_token = (tokens != real.PAD).long()
    first = int(is_token.argmax(1).min())                       # columns before it are empty
    for rows in torch.randperm(20).chunk(4):
        ids, slots = tokens[rows].clamp(min=0), is_token[rows]
        trainer._compute_loss(trainer.model, {
            "prompt_ids": ids[:, first:real.W], "prompt_mask": slots[:, first:real.W],
            "completion_ids": ids[:, real.W:], "completion_mask": slots[:, real.W:],
            "advantages": A[rows, 0], "old_per_token_logps": old_logps[rows],
            "num_items_in_batch": mask.sum()}).backward()
    theirs = {name: weight.grad for name, weight in trainer.model.named_parameters()}
    scale = max(1.0, *(one.abs().max().item() for one in theirs.values()))
    same(ours, theirs, rtol=0, atol=2e-6 * scale)


KERNEL_OR_TORCH = """
import sys
sys.path.append(sys.argv[1])
import torch
import real
from torch.testing import assert_close as same

real.W, real.T, real.M, real.TEMPERATURE = 3, 5, 3, 0.7
policy = real.load("llama")
torch.manual_seed(0)
tokens = torch.randint(321, (5, real.W + real.T))
tokens[0, :2] = tokens[0, -2:] = tokens[1, real.W:] = tokens[3, -4:] = real.PAD
kernel, found, used = real.KERNEL, [], []
logprob = kernel["logprob"]
kernel["logprob"] = lambda logits, *rest, **more: used.append(1) or logprob(logits, *rest, **more)
for real.KERNEL in (kernel, None):
    policy.zero_grad()
    logps, mask = real.logprobs(policy, tokens)
    (logps.exp() * torch.linspace(-1, 2, real.T)).sum().backward()
    found.append([logps.detach(), *(weight.grad for weight in policy.parameters())])
same(*found, rtol=1e-4, atol=1e-5)
assert found[0][0][0, 0] < -1 and (logps[mask == 0] == 0).all()
print(isinstance(kernel["forward_kernel"], kernel["triton"].JITFunction), len(used))
"""


def test_the_kernel_and_torch_compute_the_same_log_probabilities_and_gradients():
    """Rows of PAD, a vocabulary of 321 tokens, a temperature."""
    pytest.importorskip("triton", reason="needs Triton")
    random_model(vocab_size=321)
    found = subprocess.run([sys.executable, "-c", KERNEL_OR_TORCH, rungs.ROOT], text=True,
                           env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True)
    assert (found.stdout.split(), found.returncode) == (
        ["False", "4"], 0), found.stderr


# ---- padding, memory, ends -------------------------------------------------------------------

def test_any_loss_has_its_gradient_and_no_activation_stays_in_memory(llama, change):
    policy, tokens, _ = batch_of(llama)
    A, kept, found = torch.randn(20), [], []
    for M in (20, 3):
        change(M=M)
        logps, mask = real.logprobs(policy, tokens)
        found.append(gradient(policy, ((logps * mask).sum(1) * A).logsumexp(0)))
    same(*found, rtol=1e-4, atol=4e-6)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1],
                                                  lambda x: x):
        real.logprobs(policy, tokens)
    assert 0 < sum(kept) < 10 * tokens.numel()                  # no activation of any layer


def test_every_end_ends_an_output_whatever_the_folder_asks_for():
    folder = random_model()
    file = folder / "generation_config.json"
    config = json.loads(file.read_text()) | {
        "eos_token_id": [17, 99, 200], "top_k": 1, "top_p": 0.1, "repetition_penalty": 3.0,
        "do_sample": False, "temperature": 0.01, "early_stopping": True}
    file.write_text(json.dumps(config))
    policy, tokens, _ = batch_of(folder, G=40)
    ends = policy.generation_config.eos_token_id
    assert ends == sorted({17, 99, 200, real.TOKENIZER.eos_token_id})
    used = set()
    for row, ones in zip(tokens[:, real.W:].tolist(), real.logprobs(policy, tokens)[1].sum(1)):
        places = [i for i, token in enumerate(row) if token in ends]
        length = places[0] + 1 if places else real.T
        assert length == ones and row[length:] == [real.PAD] * (real.T - length)
        used |= {row[i] for i in places}
    policy.save_pretrained(folder / "again")            # which refuses a top_k without do_sample
    assert len(used) > 2 and len({tuple(row[real.W:real.W + 3]) for row in tokens.tolist()}) > 150


def test_autocast_rounds_products_and_no_weight_loses_its_gradient(llama, capsys):
    """A cast that is cached while nothing has a gradient would cut the weights off."""
    policy, tokens, _ = batch_of(llama)
    exact, mask = real.logprobs(policy, tokens)
    source = inspect.getsource(real).replace('enabled=DEVICE == "cuda"', "enabled=True")
    source = source.replace("torch.bfloat16 if DEVICE", "torch.bfloat16 if True or DEVICE")
    script = module(source)
    script.sample(policy, tokens[:, :real.W])
    rounded, _ = script.logprobs(policy, tokens)
    assert float(re.search("gap (.+)", capsys.readouterr().out)[1]) < 0.02
    assert rounded.dtype == torch.float32 and 1e-4 < (rounded - exact).abs().max() < 0.2
    ours, theirs = (gradient(policy, (one * mask).sum()) for one in (rounded, exact))
    for name, grad in ours.items():
        assert torch.cosine_similarity(grad.flatten(), theirs[name].flatten(), dim=0) > 0.99, name


@pytest.mark.parametrize("gap, greedy, printed", [
    (0.25, False, "gap 2.5e-01\n"), (0.0009, True, "gap 9.0e-04\n"), (0.0011, True, "")])
def test_the_gap_is_a_mean_over_tokens_and_before_the_first_step_a_thousandth_is_too_large(
        llama, gap, greedy, printed, change, capsys):
    policy, tokens, logps = batch_of(llama)
    tokens[0, -5:] = real.PAD
    change(N=len(tokens), sample_few=lambda *_: (tokens, logps + gap))
    with contextlib.nullcontext() if printed else pytest.raises(SystemExit, match="other probab"):
        real.sample(policy, tokens[:, :real.W], greedy)
    assert printed in capsys.readouterr().out


# ---- the sampler -----------------------------------------------------------------------------

@torch.no_grad()
def sampled_without_a_cache(policy, questions, uniforms):
    tokens, logps = torch.nn.functional.pad(questions, (0, real.T), value=real.PAD), []
    ends = torch.tensor(policy.generation_config.eos_token_id)
    for column in range(real.W, real.W + real.T):
        logits = real.logits_after(policy, tokens[:, :column], 1)[:, 0]
        log_pi = (logits / real.TEMPERATURE).log_softmax(-1)
        has_ended = torch.isin(tokens[:, real.W:], ends).any(1)
        places = (log_pi.exp().cumsum(1) < uniforms[:, [column - real.W]]).sum(1).clamp(max=319)
        logps.append(log_pi.gather(1, places[:, None]))
        tokens[:, column] = places.masked_fill(has_ended, real.PAD)
    return tokens, torch.cat(logps, 1)


@pytest.mark.parametrize("family", [
    *FAMILIES, "bloom", "gpt_neox", "olmo2", "qwen3_moe", "lfm2"])
def test_a_recorded_sampler_is_a_policy_without_a_cache(family, record_real, capsys):
    """Also with short windows and ALiBi. Where a layer has a state, nothing is recorded."""
    policy = real.load(random_model(family))
    questions, uniforms = real.encode(QUESTIONS * 2, real.W), 1 - torch.rand(10, real.T)
    expected, expected_logps = sampled_without_a_cache(policy, questions, uniforms)
    with torch.no_grad():
        plain_greedy, _ = real.sample_few(policy, questions[:5], uniforms[:5], True)
        record_real()
        tokens, logps = real.sample_few(policy, questions, uniforms, False)
        greedy, _ = real.sample_few(policy, questions[:5], uniforms[:5], True)
    mask = tokens[:, real.W:] != real.PAD
    same(tokens, expected)
    same(logps * mask, expected_logps * mask, atol=2e-5, rtol=0)
    assert len({*map(tuple, tokens.tolist())}) == 10
    assert torch.equal(greedy, plain_greedy)
    printed = capsys.readouterr().out
    assert ("cannot be recorded: this waits" in printed) == (family == "lfm2")


@pytest.mark.parametrize("family", SHAPES)
def test_a_family_works_if_the_page_says_so(family, change):
    """make families prints the gap between the sampler and what is trained, for each of them."""
    change(W=32, T=16)
    try:
        policy, tokens, sampled = batch_of(random_model(family))
        with torch.no_grad():
            logps, mask = real.logprobs(policy, tokens)
        gap = (((logps - sampled) * mask).abs().sum() / mask.sum()).item()
    except Exception as error:              # the code of a family raises nearly anything
        gap = f"{type(error).__name__}: {str(error)[:100]}"
    print(f"{family}: {gap}")
    [families] = re.findall(r"families work: ([^.]*)\.", PAGE)
    assert (family in re.findall(r"\w+", families)) == (isinstance(gap, float) and gap < 1e-3)


def test_weights_are_trained_in_float32_and_the_copy_that_samples_is_rounded_but_for_its_angles(
        change, watch):
    """A folder may have bfloat16, in which a step of 1e-6 would change hardly any weight."""
    folder = random_model()
    real.load(folder).bfloat16().save_pretrained(folder)
    policy = real.load(folder)
    change(DTYPE=torch.bfloat16)
    samplers = watch(real, "sample_few", lambda sampler, *_: sampler)
    real.sample(policy, real.encode(QUESTIONS, real.W))
    assert {weight.dtype for weight in samplers[0].parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    for ours, theirs in zip(policy.buffers(), samplers[0].buffers(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


# ---- the tokenizer, and runs -----------------------------------------------------------------

def test_a_prompt_has_no_end_and_its_beginning_once_and_a_chat_its_generation_prompt():
    from tokenizers import processors
    policy = real.load(random_model())
    tokenizer = real.TOKENIZER
    tokenizer.add_special_tokens({"bos_token": "<|bos|>"})
    bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", bos), ("<|eos|>", end)])
    assert real.encode(["12", "345"], 4).tolist() == [[-1, bos, 49, 50], [bos, 51, 52, 53]]
    assert policy.generation_config.eos_token_id == [end]
    tokenizer.chat_template = ("{{ bos_token }}{% for m in messages %}U:{{ m['content'] }}."
                               "{% endfor %}{% if add_generation_prompt %}A:{% endif %}")
    assert real.encode(["12", "345"], 9).tolist() == [[-1, bos, *b"U:12.A:"], [bos, *b"U:345.A:"]]
    rows = torch.tensor([[55, end, -1, -1], [56, 57, 58, end]])
    assert real.decode(torch.nn.functional.pad(rows, (real.W, 0), value=-1)) == ["7", "89:"]


@pytest.mark.parametrize("text, shown", [
    ("7<|im_end|>", "7"), ("7<|eos|>", "7"), ("7", "7"), ("7<|im_end|> or 8", "7<|im_end|> or 8"),
    ("7<|im_end|><|im_end|>", "7<|im_end|>"), ("<|im_end|>", "")])
def test_the_end_that_the_policy_wrote_is_no_text_whether_or_not_it_is_special(text, shown):
    folder = random_model()
    tokenizer = real.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_end|>"])
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(
        config | {"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}))
    real.load(folder)
    rows = torch.tensor([[*real.TOKENIZER(text).input_ids, real.PAD]])
    assert real.decode(torch.nn.functional.pad(rows, (real.W, 0), value=real.PAD)) == [shown]


@pytest.mark.parametrize("name, reward, has_learned", [
    ("mean", lambda text: 1.0, False), ("mean", lambda text: float("7" in text), True),
    ("reinforce", lambda text: 1.0, True), ("reinforce", lambda text: 0.0, False)])
def test_a_run_in_which_no_step_had_a_gradient_says_so(llama, name, reward, has_learned, capsys):
    script = module(rungs.real_script(name), P=2, verify=lambda answer, text: reward(text))
    script.main(llama, sums(), steps=2)
    line = "no group had two different rewards, so nothing was learned\n"
    assert (line in capsys.readouterr().out) == (not has_learned)


def test_problems_and_verdicts():
    for answer, text, reward in (
            ("7", "a 12, no: 7.", 1), ("1200", "so 1,200", 1), (7, "7.0", 1), ("-7", "it is -7", 1),
            ("7", "none", 0), ("7", "7 or 8", 0), ("1,200", "1200", 1), ("-7", "\u22127", 1),
            ("7", "\u22127", 0), (" \u22127", "-7.", 1), ("12", "1,2", 0), ("7", "10-7", 1),
            (2**53, "9007199254740993", 0), ("2", "7/2", 0), (1e-5, "0.00001", 1),
            ("3", "\u0663", 0), ("5", "1.2.5", 0), ("1e9", "1" + "0" * 9, 1)):
        assert real.verify(answer, text) == reward, (answer, text)
    Path("data.jsonl").write_text('{"prompt": "a", "answer": 0.12345678901234567890}')
    [(_, answer)] = real.read_problems("data.jsonl")            # keeps all its digits
    assert real.verify(answer, "0.12345678901234567890") == 1
    assert real.verify(answer, "0.12345678901234568") == 0
    for seed in range(100):
        question, answer = real.make_up_problem(random.Random(seed))
        assert eval(re.search("is (.*)[?]", question)[1]) == int(answer)


def test_a_run_learns_from_each_problem_once_and_saves_a_model(change, capsys):
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in [*range(50), 0]]
    write_rows([*rows, {"prompt": "7+1=\n ", "answer": 8}])     # the same question as before
    used, sample_problem = [], real.sample_problem
    change(RATE=4e-2, P=8, G=8, T=8, M=64, N=64,
           sample_problem=lambda rng: used.append(sample_problem(rng)) or used[-1],
           verify=lambda answer, text: sum(map(str.isdigit, text)) / 8)
    real.main(random_model(scale=0.5), "data.jsonl", 1, steps=14)
    assert len(real.PROBLEMS) == 47 and sorted(used[:47]) == sorted(used[47:94]) != used[47:94]
    out = capsys.readouterr().out
    rewards = [float(reward) for reward in re.findall("reward ([0-9.]+)", out)]
    assert len(re.findall(r"gap (\d.\de-0[5678]|0.0e[+]00)\n", out)) == 16
    assert rewards[0] < 0.2 and rewards[-1] > 0.5
    policy = real.load("trained")
    [text] = real.decode(real.sample(policy, real.encode(["7+1="], real.W), greedy=True))
    assert sum(map(str.isdigit, text)) > 4


def test_a_run_writes_over_nothing_and_saves_before_its_last_evaluation(monkeypatch):
    """On a console that cannot show the questions; and the last evaluation fails."""
    random_model()
    write_rows({"prompt": f"{i} \u2212 1 =", "answer": "1,000"} for i in range(10))
    for name in ("trained", "trained-2"):
        Path(name).mkdir()
        Path(name, "mine").touch()
    source = small_source(P=2, T=3, STEPS=1)
    source = source.replace('print("held-out questions, after', 'raise MemoryError("')
    console = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", console)
    monkeypatch.setattr("sys.argv", ["real.py", "llama", "data.jsonl"])
    with pytest.raises(MemoryError):
        exec(source, {"__name__": "__main__", "__file__": real.__file__})
    assert b" \\u2212 1 =" in console.buffer.getvalue()
    assert [path.name for path in Path().glob("trained*/mine")] == ["mine"] * 2
    assert Path("trained-3/model.safetensors").exists()


def test_a_tenth_is_held_out_at_most_and_outputs_without_an_end_are_cut(llama, change, capsys):
    change(HELD_OUT=100, STEPS=0, SEED=7, N=None)       # as an importer of real.py sets them
    real.main(llama, sums(20))
    assert len(real.PROBLEMS) == 18 and real.DRAWS.initial_seed() == 7
    assert capsys.readouterr().out.count("cut 1.000, gap ") == 2        # the model never ends


def test_ctrl_c_twice_ends_a_command_once_with_the_model_saved(llama):
    """As do the signals of a scheduler. Under nohup, which ignores SIGHUP, the end of a terminal
    does not end it. Next to kernels/, which transformers would import, and without the packages of
    the scripts."""
    Path("mine.py").write_text(small_source(P=2, T=3, STEPS=10_000))
    shutil.copytree(rungs.ROOT / "kernels", "kernels")
    Path("site").mkdir()
    Path("site/tiktoken.py").write_text("raise ModuleNotFoundError('no tiktoken')")
    child = subprocess.Popen(["nohup", sys.executable, "mine.py", llama, sums()], text=True,
                             env=os.environ | {"PYTHONPATH": "site"},
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in child.stdout:
        if "step 0:" in line:
            child.send_signal(signal.SIGHUP)
        if "step 2:" in line:
            child.send_signal(signal.SIGINT)
            child.send_signal(signal.SIGINT)
            break
    said, error = child.communicate()
    assert child.returncode == 130 and "steps, the model is in" in said
    assert "Traceback" not in error and Path("trained-unfinished/model.safetensors").exists()
    ends = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU
    before = {number: signal.getsignal(number) for number in ends}
    with pytest.raises(SystemExit):
        real.stop(signal.SIGTERM, None)
    assert {signal.signal(*each) for each in before.items()} == {signal.SIG_IGN}


def test_a_saved_model_has_the_precision_of_its_folder_and_no_file_is_written_in_place():
    """A kill while a file is written would leave half of it."""
    from safetensors.torch import load_file
    folder = random_model()
    real.load(folder).bfloat16().save_pretrained(folder)
    policy = real.load(folder)
    real.save(policy, "saved")
    files = [(path.open("rb"), path.read_bytes()) for path in Path("saved").iterdir()]
    policy.get_input_embeddings().weight.data.mul_(1.7)
    real.save(policy, "saved")
    assert all(file.read() == content for file, content in files)
    weights = policy.bfloat16().state_dict()
    for name, saved in load_file("saved/model.safetensors").items():
        assert saved.dtype == torch.bfloat16 and torch.equal(saved, weights[name])


@pytest.mark.parametrize("verify, words", [
    (lambda answer, text: None if text else 0.0, "not None: '1', '1'"),
    (lambda answer, text: 0.0 if text else float("nan"), "not nan: '1', ''"),
    (lambda answer, text: "1", "not '1': '1', ''")])
def test_a_verify_that_returns_no_number_ends_a_run_before_a_model_is_loaded(verify, words, change):
    change(verify=verify)
    write_rows({"prompt": f"{i}", "answer": 1} for i in range(10))
    with pytest.raises(SystemExit, match=re.escape(words)):
        real.main("missing", "data.jsonl")


def test_a_full_disk_keeps_the_last_checkpoint(llama, change, monkeypatch):
    calls = []

    def full(policy, folder):
        calls.append(folder)
        if len(calls) >= 3:                             # after the start and one checkpoint
            Path(folder).mkdir()
            Path(folder, "half").touch()
            raise OSError(28, "No space left on device")
        Path(folder).mkdir()
        Path(folder, f"model-{len(calls)}").touch()
    monkeypatch.setattr(type(real.load(llama)), "save_pretrained", full)
    change(P=2, T=3, SAVE_STEPS=2)
    with pytest.raises(SystemExit, match="trained-unfinished: the model cannot be saved: .*No spa"):
        real.main(llama, steps=9)
    lines = Path("trained-unfinished/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4]
    names = {path.name for path in Path("trained-unfinished").iterdir()}
    assert "model-2" in names and "half" not in names
    assert [path.name for path in Path().glob("trained*")] == ["trained-unfinished"]


@pytest.mark.parametrize("reward, slope, message", [
    (1.0, float("nan"), "step 2: the gradient is not finite"),
    *((x, 1.0, f"verify has to return a number, not {x!r}: '7', 'text'") for x in (
        float("nan"), None, "1.0", {"right": 1.0, "form": float("inf")}))])
def test_what_is_not_finite_ends_a_run_in_one_line_with_a_good_model_that_is_unfinished(
        llama, change, reward, slope, message):
    verdicts, surrogate_loss = iter([1.0, 0.0] * 16 + [reward] * 99), real.surrogate_loss
    slopes = iter([1.0] * 4 + [slope] * 9)              # two steps of P * G = 16, two updates each
    write_rows({"prompt": str(i), "answer": 7} for i in range(20))
    change(T=3, evaluate=lambda *_: "",
           surrogate_loss=lambda *args: surrogate_loss(*args) * next(slopes),
           verify=lambda answer, text: next(verdicts) if text == "text" else 0.0,
           decode=lambda tokens: ["text"] * len(tokens))
    with pytest.raises(SystemExit, match=f"^{re.escape(message)}$"):
        real.main(llama, "data.jsonl", steps=9)
    assert not Path("trained").exists()
    assert all(x.isfinite().all() for x in real.load("trained-unfinished").parameters())


@pytest.mark.parametrize("values, template, words", [
    ({"SAVE_STEPS": 0}, "", "SAVE_STEPS = 0: has to be above 0"),
    ({"TEMPERATURE": 0}, "", "TEMPERATURE = 0: has to be above 0"),
    ({}, "{% for part in messages[0].content %}{{ part.text }}{% endfor %}A:",
     "different questions become one prompt, such as 'A:': the chat template leaves them out"),
    ({}, "{{ messages[0].content[:1] }}", "different questions become one prompt, such as "),
    ({}, "{{ raise_exception('no user') }}", "the chat template fails: no user: mend TOKENIZER")])
def test_a_setting_or_a_template_that_cannot_work_ends_in_one_line_that_names_it(
        values, template, words, change):
    folder = random_model()
    (folder / "chat_template.jinja").write_text(template)
    change(**values)
    with pytest.raises(SystemExit) as stopped:
        real.main(folder, sums(), steps=1)
    assert words in stopped.value.code and "\n" not in stopped.value.code


def test_what_cannot_be_trained_is_refused_in_one_line(monkeypatch):
    with monkeypatch.context() as patch:        # before a model is loaded
        patch.setattr("os.access", lambda *_: False)
        with pytest.raises(SystemExit, match="nothing can be saved in this folder"):
            real.main("missing")
    folder = random_model()
    Path("empty").mkdir()
    shutil.copytree(folder, "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("empty", "weightless", "missing"):
        with pytest.raises(SystemExit, match="cannot be loaded: .{9}") as stop:
            real.load(name)
        assert "\n" not in str(stop.value)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: config[key] for key in config
                                               if not key.startswith("eos")}))
    with pytest.raises(SystemExit, match="has no eos_token_id"):
        real.load(folder)


def test_an_adapter_by_the_lines_of_the_page_is_saved_as_a_plain_model_and_resumes(llama, change):
    pytest.importorskip("peft", reason=NEEDS)
    lines = re.findall(r"^ *(from peft.*|policy = get_peft.*)\n", PAGE, re.M)
    space, load = {}, real.load

    def with_adapter(model):
        space["policy"] = load(model)
        exec("\n".join(lines), space)
        return space["policy"]
    change(load=with_adapter, RATE=1e-2, SAVE_STEPS=1,
           verify=lambda answer, text: len(text) % 2 == 0)      # a bool
    x = torch.arange(9)[None]
    for model, folder in ((llama, "trained"), ("trained", "trained-2")):
        real.main(model, sums(), steps=2)
        policy = space["policy"]
        with torch.no_grad():
            before, wanted, found = (one(x).logits for one in (
                load(model), policy, real.AutoModelForCausalLM.from_pretrained(folder)))
            same(found, wanted, atol=1e-4, rtol=0)
            assert (wanted - before).abs().max() > 1e-2
            with policy.disable_adapter():          # saving has not changed what it adapts
                same(policy(x).logits, before, atol=0, rtol=0)


def test_rewards_with_names_are_added_and_logged_and_a_verify_that_prefers_nothing_is_named(
        llama, change, capsys, watch):
    """A line has the means of its own step."""
    seen = [watch(real, name, lambda *_, **__: 0) for name in ("load", "log")]
    change(T=3, P=2, verify=lambda answer, text: {"now": sum(map(len, seen)), "empty": text == ""})
    real.main(llama, sums(), steps=2)
    lines = [*map(json.loads, Path("trained/metrics.jsonl").read_text().splitlines())]
    assert [line.get("rewards/now/mean", line.get("eval_rewards/now/mean")) for line in lines] == [
        1, 2, 3, 4]
    for line in lines[1:3]:
        assert line["reward"] == pytest.approx(
            line["rewards/now/mean"] + line["rewards/empty/mean"])
    assert 0 < lines[1]["entropy"] < 6 and "entropy" not in lines[0]
    assert "answers as texts get 0.000, empty texts 1.000; " in capsys.readouterr().out
    change(verify=lambda answer, text: float(text == answer))       # numbers are texts
    real.main(llama, sums(), steps=0)
    assert "Look at verify" not in capsys.readouterr().out


@pytest.mark.parametrize("seeded", [torch.manual_seed, random.seed])
def test_a_run_depends_on_its_seed_alone_and_not_on_what_verify_seeds(llama, seeded, change, watch):
    draws = watch(torch, "rand", lambda *_, **__: 0)
    for judge in (len, lambda text: seeded(0) and None or len(text)):
        change(P=2, RATE=1e-2, verify=lambda answer, text, judge=judge: judge(text))    # an int
        seeded(len(draws))
        real.main(llama, sums(), steps=3)
    logs, weights = ([path.read_bytes() for path in sorted(Path().glob(f"trained*/{name}"))]
                     for name in ("metrics.jsonl", "model.safetensors"))
    start = (llama / "model.safetensors").read_bytes()
    assert weights[0] == weights[1] != start and logs[0] == logs[1]


def test_each_step_and_evaluation_is_a_line_that_report_check_reads(llama, change, watch):
    """Also if a run is stopped; what it says is so."""
    rewards = watch(real, "advantages", lambda rewards: rewards)
    lengths = watch(real, "decode", lambda tokens: (tokens[:, real.W:] != real.PAD).sum(1).float())
    descend, calls, norms = real.descend, [], []

    def stopped(*args):
        calls.append(args[2:])
        if len(calls) == 8:                                     # in the fourth step
            raise SystemExit(130)
        descend(*args)
        norms.append(torch.cat([w.grad.flatten() for w in args[0].parameters()]).norm().item())
    change(P=2, G=4, SAVE_STEPS=2, RATE=1e-3, descend=stopped,
           verify=lambda answer, text: float("7" in text))
    with pytest.raises(SystemExit):
        real.main(llama, sums(), steps=4)
    folder = "trained-unfinished"
    before, after = (real.load(one).get_input_embeddings().weight for one in (llama, folder))
    assert (before - after).abs().max() > 1e-3                  # saved as it was when stopped
    lines = list(map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines()))
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and lines[0].keys() == {
        "step", "eval_reward"}
    for step, line in enumerate(lines[1:]):
        groups = rewards[step]
        assert line["reward"] == pytest.approx(groups.mean().item())
        assert line["reward_std"] == pytest.approx(groups.std(1).mean().item())
        assert line["frac_reward_zero_std"] == sum(len({*row}) == 1 for row in groups.tolist()) / 2
        loss, rate = calls[2 * step + 1]
        assert (line["loss"], line["learning_rate"]) == (loss.item(), rate)
        assert min(line["grad_norm"], 1) == pytest.approx(norms[2 * step + 1], rel=1e-4)
        assert line["completions/mean_length"] == pytest.approx(lengths[step + 1].mean().item())
        assert line["completions/clipped_ratio"] == (lengths[step + 1] == 24).float().mean()
        assert 0 <= line["sampling/sampling_logp_difference/mean"] < 1e-5
    assert "3 steps" in check.described(check.read(folder))


def test_a_control_token_in_the_text_of_a_question_is_named_and_other_tokens_are_text():
    real.load(random_model("gpt2"))
    real.TOKENIZER.add_tokens(["<tool>", "\n\n"])
    real.TOKENIZER.add_tokens([f"<unused{i}>" for i in range(6000)], special_tokens=True)
    for text in ("1+1=<|eos|>", "<|eos|>", "what does <unused5999> mean", "<|pad|>1"):
        with pytest.raises(SystemExit, match=re.escape(re.search("<.*>", text)[0])) as stop:
            real.encode(["12", text], 32)
        assert repr(text) in stop.value.code
    rows = real.encode(["<tool> a\n\nb", "<|EOS|> <unused6000> \u0663"], 64)
    assert rows.max() < len(real.TOKENIZER)


def numbered(lengths, answer=2):
    """Write problems whose prompts have these lengths. -> text of a file"""
    return "\n".join(json.dumps({"prompt": "1" * n, "answer": answer}) for n in lengths)


@pytest.mark.parametrize("text, words", [
    (None, "No such file"), ('\ufeff{"prompt": "", "answer": ""}\n\n{', "line 3: "),
    ("[1]", "'[1]'; write"), ("[" * 9999, "line 1: "),
    ('{"prompt": "", "answer": 1}\n{"answer": 2}', "line 2: the key 'prompt' is missing"),
    (b'{"prompt": "", "answer": 1}\n\xe9', "line 2: 'utf-8'"),
    ('{"prompt": [1], "answer": 2}', "write {"),
    ('{"prompt": "1+", "answer": 2}\n{"prompt": " 1+\\n", "answer": "x"}', "has two answers, '2'"),
    ('{"prompt": "1+1=", "answer": 2}', "fewer than 10 different prompts"),
    (r'{"prompt": "\ud800", "answer": 2}', "surrogates not allowed"),
    (numbered(range(11)), "a prompt of 0 tokens"), (numbered(range(1, 11), "x"), "'x' is"),
    (numbered(range(1, 99)), "a prompt of 98 tokens, not 1 to W = 90: '1111")])
def test_problems_that_cannot_be_used_end_in_one_line(llama, text, words, capsys):
    if text:
        Path("data.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit) as stopped:
        real.main(llama, "data.jsonl")
    assert words in stopped.value.code and "\n" not in stopped.value.code
    assert "gap" not in capsys.readouterr().out                 # it has not sampled yet
