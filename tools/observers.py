"""What looks at a run where this file is there: metrics of difficulties, samples, answers, warnings
and the report. Each is an Observer; one of your own, as for a tracker, goes into `observers`.
"""
import importlib
import json
import math
import shlex

import torch

import common
from tasks import pass_rates
from tools.scores import part_of


def observers(cfg):
    """Those of a run. -> list of Observer"""
    found = [Metrics(), Frontier(), Checks(), Samples(), Answers(), Warnings(), Report()]
    if "model" in cfg.reward.split("+"):
        found.append(importlib.import_module("tasks.preferences").Trainer())
    if cfg.report_to != "none":                 # last, so that it sees what the others add
        found.append(importlib.import_module("tools.trackers").tracker(cfg.report_to))
    return found


def escape(text):
    """The text on one line, so that no control character of a completion reaches the terminal."""
    return text.encode("unicode_escape").decode()


class Observer:
    """What looks at a run, for logs, pictures, a tracker. A run calls those methods that there are;
    the class stands here only to say which."""

    def start(self, run):
        """The policy is the base, also of a resumed run; nothing is evaluated."""

    def evaluate(self, run, scores):
        """The base was evaluated, the policy after a step, or at the end."""

    def step(self, run, batch, advantages, metrics):
        """After a step, before its metrics are logged; some may be added."""

    def finish(self, run, summary):
        """After training; `summary` has the scores of "base" and "trained"."""


# ---- 1. metrics ------------------------------------------------------------------------------

def describe(batch):
    """What the samples of a step are like, in TRL's words. -> metrics"""
    found = common.describe(batch)
    return found | {"reward_std": batch.rewards.std(dim=1).mean().item(),
                    "frac_reward_zero_std": 1 - found["signal"],
                    "completions/clipped_ratio": batch.is_truncated.float().mean().item()}


class Metrics(Observer):
    """What the samples of a step are like."""

    def step(self, run, batch, advantages, metrics):
        metrics |= describe(batch)


class Frontier(Observer):
    """Of each difficulty, if there are several: which share of its groups is all wrong, mixed, and
    all right."""

    def step(self, run, batch, advantages, metrics):
        by_level = {}
        for problem, rate in pass_rates(batch):
            if part_of(run.task, problem).is_judged:
                name = f"{problem.task}-{problem.difficulty}"
                by_level.setdefault(name, []).append(rate)
        for name, rates in sorted(by_level.items()) if len(by_level) > 1 else ():
            wrong = rates.count(0.0) / len(rates)
            right = rates.count(1.0) / len(rates)
            metrics[f"frontier/{name}/wrong"] = wrong
            metrics[f"frontier/{name}/mixed"] = 1 - wrong - right
            metrics[f"frontier/{name}/right"] = right


class Checks(Observer):
    """How often a completion of arithmetic checks itself, and how often it is then right."""

    def step(self, run, batch, advantages, metrics):
        if run.task.name != "arithmetic":
            return
        is_correct = batch.is_correct.flatten().tolist()
        checked = [c for c, text in zip(is_correct, batch.texts) if ";wait," in text]
        metrics["checks/share"] = len(checked) / len(batch.texts)
        if checked:
            metrics["checks/repaired"] = sum(checked) / len(checked)


# ---- 2. logs ---------------------------------------------------------------------------------

class Samples(Observer):
    """samples.jsonl: four groups of the first step, and of steps with an evaluation. The best and
    the worst completion of the group whose rewards differ most are printed."""

    def step(self, run, batch, advantages, metrics):
        step = run.state["steps"]
        if step > 1 and step % run.cfg.eval_steps != 0:
            return
        A = per_completion(advantages, batch.mask)                              # (B,)
        for record in sample_records(run, batch, A):
            run.append("samples.jsonl", {"step": step} | record)

        group = int((batch.rewards.amax(dim=1) - batch.rewards.amin(dim=1)).argmax())
        rewards = batch.rewards[group]                                          # (G,)
        for g in (int(rewards.argmax()), int(rewards.argmin())):
            row = group * len(rewards) + g
            text = escape(batch.problems[row].prompt + batch.texts[row])
            print(f"      {rewards[g].item():5.2f} {A[row].item():+5.2f} {text}"[:80], flush=True)


def per_completion(advantages, mask):
    """The advantage of each completion, the mean over its tokens if they have their own. (B,),
    (B, 1) or (B, T) -> (B,)"""
    if advantages.numel() == len(mask):
        return advantages.flatten()
    return (advantages * mask).sum(dim=1) / mask.sum(dim=1)


def sample_records(run, batch, A):
    """The first four groups, as samples.jsonl has them. Their tokens are shaded by a critic's
    values, or else by the ratio pi / pi_old. -> list of dicts"""
    G = batch.rewards.shape[1]
    first = slice(0, 4 * G)
    shade = batch.values
    if shade is None:
        with torch.no_grad():
            logps, _ = run.task.machinery.score(
                run.policy, batch.prompts[first], batch.tokens[first], run.cfg.temperature,
                run.cfg.kernel)
        shade = (logps - batch.logps[first]).exp()                              # (4 G, T)
    records = []
    for row, shades in enumerate(shade[first].tolist()):
        if row % G == 0:
            problem = batch.problems[row]
            records.append({"prompt": problem.prompt, "answer": problem.answer, "completions": [],
                            "shade": "ratio" if batch.values is None else "value"})
        length = int(batch.lengths[row])
        tokens = batch.tokens[row, :length].tolist()
        records[-1]["completions"].append({
            "text": batch.texts[row],
            "reward": finite(batch.rewards[row // G, row % G].item()),
            "advantage": finite(A[row].item()),
            "length": int(batch.mask[row].sum()),
            "tokens": [run.task.machinery.decode([i]) for i in tokens],
            "mask": batch.mask[row, :length].int().tolist(),
            "shade": [finite(round(x, 4)) for x in shades[:length]]})
    return records


def finite(x):
    """The number, or None for what JSON cannot hold."""
    return x if math.isfinite(x) else None


class Answers(Observer):
    """greedy.jsonl, what the policy answers to the same held-out problems whenever it is evaluated,
    and evaluation.jsonl, what the base and the trained policy did, side by side."""

    def start(self, run):
        self.is_due = not run.resumed           # is the next evaluation one to be logged?
        self.examples = None

    def step(self, run, batch, advantages, metrics):
        self.is_due = run.state["steps"] % run.cfg.eval_steps == 0

    def evaluate(self, run, scores):
        self.examples = scores.pop("examples", None)
        if self.is_due and self.examples:
            run.append("greedy.jsonl", {"step": run.state["steps"], "examples": self.examples})
        self.is_due = False

    def finish(self, run, summary):
        logged = (run.folder / "greedy.jsonl").read_text().splitlines()
        before = json.loads(logged[0])["examples"] if logged else []
        lines = []
        for base, trained in zip(before, self.examples or before):
            lines.append(json.dumps({"prompt": base["prompt"], "answer": base["answer"],
                                     "base": base, "trained": trained}) + "\n")
        common.write(run.folder / "evaluation.jsonl", "".join(lines))


# ---- 3. what a person is told ----------------------------------------------------------------

class Warnings(Observer):
    """Says, once in a run, what shows that learning cannot work."""

    def __init__(self):
        self.said = set()

    def say(self, message):
        if message not in self.said:
            print(f"warning: {message}", flush=True)
            self.said.add(message)

    def evaluate(self, run, scores):
        if run.state["steps"] == 0 and scores.get("pass@1") == 0:
            better = "another --model" if hasattr(run.cfg, "model") else "more --base_steps"
            self.say(f"no sample of the base is right: try {better}, or easier tasks")

    def step(self, run, batch, advantages, metrics):
        for message in warnings(metrics):
            self.say(message)


def warnings(metrics):
    """What to say of a step. Yields sentences"""
    is_equal = metrics["signal"] == 0 and "teacher_kl" not in metrics   # who rewards each token
    if is_equal and metrics.get("accuracy", 0) < 0.5:
        yield "no group has signal: raise --num_generations, or take a better base"
    if metrics["completions/clipped_ratio"] > 0.5:
        yield "most completions are truncated: raise --max_completion_length"
    if metrics["entropy"] < 0.005 and metrics.get("accuracy", 1) < 0.9:
        yield "entropy has collapsed: lower --learning_rate, or raise --entropy_coef"
    if metrics.get("rewards/chosen", 0) < 0:
        yield "chosen answers lose probability, too: try a lower --learning_rate"
    has_lag = "sampling/importance_sampling_ratio/mean" in metrics      # older weights sampled
    if not has_lag and metrics.get("sampling/sampling_logp_difference/max", 0) > 1e-3:
        yield "the first ratio is not 1: try --kernel torch"
    if not has_lag and metrics.get("sampling/sampling_logp_difference/mean", 0) > 0.01:
        yield "sampler and trainer differ: --importance_sampling_correction truncate"


class Report(Observer):
    """report.html and curve.png at the end, and how to ask the policy."""

    def finish(self, run, summary):
        for name, function in (("report.html", "write_report"), ("curve.png", "draw_curve")):
            try:
                getattr(importlib.import_module("tools.report"), function)(run.folder)
            except (ImportError, OSError, ValueError) as error:
                print(f"no {name}: {escape(str(error))}")
        prompt = common.sample_problems(run.task, 1, "example", "test")[0].prompt
        print("Ask the policy:\n  python -m tools.ask", shlex.quote(str(run.folder)),
              shlex.quote(prompt), flush=True)
