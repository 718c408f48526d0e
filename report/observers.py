"""Observers of a run: they log metrics, samples and answers, print warnings, and write the report.
A run uses them if this file is present. To add your own, put it into the list in `observers`. An
observer has some of these methods:

  start(run)                            called first; the policy is the base, even in a resumed run
  evaluate(run, scores)                 called with the scores of the base, or of a later policy
  step(run, batch, advantages, metrics) called before a step's metrics are logged; may add some
  finish(run, summary)                  called last; summary["base"] and ["trained"] are scores
"""
import dataclasses
import importlib
import json
import shlex
import uuid

import torch

import common
import plumbing
from report import command, escape, short
from report.check import warnings
from report.logs import finite, read_counts, records
from report.page import write_report
from tasks import Task, pass_rates
from tasks.scores import part_of


def observers(cfg, score):
    """Create the observers of a run, whose script scores samples with `score`. -> list"""
    chosen = [Metrics(), Samples(score), Answers(), Warnings(), Report()]
    if cfg.report_to != "none":         # last, so that it gets the metrics that other observers add
        chosen.append(Tracker(cfg.report_to))
    return chosen


# ---- 1. metrics ------------------------------------------------------------------------------

class Metrics:
    """Adds the share of right completions, the surprise of the samples and, for each difficulty,
    the shares of groups in which no output is right, some are, or all are."""

    def step(self, run, batch, advantages, metrics):
        if run.task.is_judged:
            is_correct = torch.cat([one.is_correct for one in batch.sampled or [batch]])
            metrics["accuracy"] = is_correct.double().mean().item()
        # some samplers report no entropy, dynamic sampling chooses among samples by their rewards,
        # and examples/lag.py replaces the log-probabilities
        is_plain = batch.sampled is None and getattr(run.cfg, "sampler_lag", 0) == 0
        if batch.entropy.any() and is_plain:
            surprise = -(batch.logps * batch.mask).sum() / batch.mask.sum()
            metrics["sampling/surprise"] = surprise.item()
        by_level = {}
        for problem, rate in pass_rates(batch):
            if part_of(run.task, problem).is_judged:
                by_level.setdefault(f"{problem.task}-{problem.difficulty}", []).append(rate)
        for name, rates in sorted(by_level.items()) if len(by_level) > 1 else ():
            wrong = rates.count(0.0) / len(rates)
            right = rates.count(1.0) / len(rates)
            metrics[f"frontier/{name}/wrong"] = wrong
            metrics[f"frontier/{name}/mixed"] = 1 - wrong - right
            metrics[f"frontier/{name}/right"] = right


# ---- 2. logs ---------------------------------------------------------------------------------

def is_shown(run):
    """Whether the samples of this step are logged: the first step, and steps with an evaluation."""
    return run.step == 1 or run.step % run.cfg.eval_steps == 0


def sample_rows(batch, A):
    """Describe the group whose rewards differ most: reward, advantage, prompt and text of each of
    its G completions. -> list of lists"""
    G = batch.rewards.shape[1]
    group = int((batch.rewards.amax(dim=1) - batch.rewards.amin(dim=1)).argmax())
    rewards = batch.rewards.flatten().tolist()
    return [[round(rewards[row], 3), round(A[row].item(), 3), escape(batch.problems[row].prompt),
             escape(batch.texts[row])] for row in range(group * G, group * G + G)]


def end_of(text, size):
    """Shorten a text to its last `size` characters. -> str"""
    return text if len(text) <= size else f"...{text[3 - size:]}"


class Samples:
    """Logs four groups of some steps in samples.jsonl, and prints the best and the worst completion
    of the group whose rewards differ most."""

    def __init__(self, score):
        self.score = score

    def step(self, run, batch, advantages, metrics):
        if not is_shown(run):
            return
        A = per_completion(advantages, batch.mask)                              # (B,)
        for record in sample_records(run, batch, A, self.score):
            run.append("samples.jsonl", {"step": run.step} | record)
        rows = sample_rows(batch, A)
        for best_or_worst in (max, min):
            reward, advantage, prompt, text = best_or_worst(rows, key=lambda row: row[0])
            prompt = end_of(prompt, max(20, 62 - len(text)))
            text = end_of(text, 62 - len(prompt))
            print(f"      {reward:5.2f} {advantage:+5.2f} {prompt}{text}", flush=True)


def per_completion(advantages, mask):
    """Average the advantage of each completion over its tokens. (B,), (B, 1) or (B, T) -> (B,)"""
    mask = mask.to(advantages)
    return ((advantages.reshape(len(mask), -1) * mask).sum(dim=1) / mask.sum(dim=1)).cpu()


def sample_records(run, batch, A, score):
    """Make the records of samples.jsonl for the first four groups. The report shades their tokens
    by a critic's values or, without a critic, by the ratio pi / pi_old. -> list of dicts"""
    G = batch.rewards.shape[1]
    first = slice(0, 4 * G)
    shade = batch.values
    if shade is None:
        with torch.no_grad():
            logps, _ = score(
                run.policy, batch.prompts[first], batch.tokens[first], run.cfg.temperature)
        shade = (logps - batch.logps[first]).exp()                              # (4 G, T)
    records = []
    for row, shades in enumerate(shade[first].tolist()):
        problem = batch.problems[row]
        if row % G == 0:
            records.append({"prompt": problem.prompt, "answer": problem.answer, "completions": [],
                            "shade": "ratio" if batch.values is None else "value"})
        length = int(batch.lengths[row])
        tokens = batch.tokens[row, :length].tolist()
        records[-1]["completions"].append({
            "text": batch.texts[row],
            "reward": finite(batch.rewards[row // G, row % G].item()),
            "advantage": finite(A[row].item()),
            "length": int(batch.mask[row].sum()),
            "tokens": [common.decode([i]) for i in tokens],
            "mask": batch.mask[row, :length].int().tolist(),
            "shade": [finite(round(x, 4)) for x in shades[:length]]})
        part = part_of(run.task, problem)
        if isinstance(part, Task) and (remark := part.remark(problem, batch.texts[row])):
            records[-1]["completions"][-1]["remark"] = remark
    return records


class Answers:
    """Logs the greedy answers to a fixed set of held-out problems: in greedy.jsonl at every
    evaluation, and in evaluation.jsonl those of the base next to those of the trained policy. Also
    logs in steps.json how often each step of the thoughts of both is right."""

    examples = ()                   # from the last evaluation; a resumed run may not have one

    def evaluate(self, run, scores):
        self.examples = scores.get("examples", [])
        step = run.step
        if "steps" in scores:
            counts = read_counts(run.folder) if step > 0 else {}
            counts["trained" if step > 0 else "base"] = scores["steps"]
            plumbing.write(run.folder / "steps.json", json.dumps(counts))
        if step % run.cfg.eval_steps == 0 and step != run.state.get("greedy_step"):
            run.append("greedy.jsonl", {"step": step, "examples": self.examples})
            run.state["greedy_step"] = step

    def finish(self, run, summary):
        before = next(records(run.folder / "greedy.jsonl"), {}).get("examples", [])
        lines = []
        for base, trained in zip(before, self.examples or before):
            lines.append(json.dumps({"prompt": base["prompt"], "answer": base["answer"],
                                     "base": base, "trained": trained}) + "\n")
        plumbing.write(run.folder / "evaluation.jsonl", "".join(lines))


# ---- 3. warnings and the report --------------------------------------------------------------

ENOUGH = 0.15           # the best score of a base is above 0.19 with every task: docs/lab/bases.md


class Warnings:
    """Prints a warning, once in a run, if a metric shows that learning cannot work, and why the
    console shows no clip."""

    def __init__(self):
        self.printed = set()

    def evaluate(self, run, scores):
        if run.step > 0:
            return
        found = [scores.get(name) for name in ("greedy", "greedy_forced_think", "pass@1")]
        found = [score for score in found if score is not None]
        if found and max(found) < ENOUGH:
            print(f"warning: at best {max(found):.1%} of the base's outputs are right, so RL has "
                  "little to reinforce: try another --base_seed, half the --base_learning_rate, or "
                  "more --base_steps", flush=True)
        most = run.cfg.num_eval_problems
        if scores["problems"] < most:
            print(f"{scores['problems']} different problems are held out, fewer than {most} "
                  "(--num_eval_problems)", flush=True)

    def step(self, run, batch, advantages, metrics):
        found = ["warning: " + message.replace("(#", "(docs/why.md#")
                 for message in warnings(metrics, run.cfg)]
        if "clip" in run.columns and run.columns["clip"] not in metrics:
            found.append("clip is empty: it counts the tokens beyond the range of --epsilon, which "
                         "this loss does not use")
        for message in found:
            if message not in self.printed:
                print(message, flush=True)
                self.printed.add(message)


class Report:
    """Writes report.html and curve.png at the end, and prints how to read it and ask the policy."""

    def finish(self, run, summary):
        try:
            report = short(write_report(run.folder))
            print(f"Open the report in a browser:\n  {shlex.quote(report)}")
        except (OSError, ValueError) as error:
            print(f"no report.html: {escape(str(error))}")
        try:
            importlib.import_module("report.curve").draw_curve(run.folder)
        except Exception as error:      # with a user's own settings, matplotlib raises anything
            print(f"no curve.png: {escape(str(error))}")
        prompt = common.sample_problems(run.task, 1, "example", "test")[0].prompt
        print(f"Ask the policy:\n  {command('report.ask', run.folder, prompt)}", flush=True)


# ---- 4. trackers -----------------------------------------------------------------------------

COLUMNS = ["reward", "advantage", "prompt", "completion"]


class Tracker:
    """Sends flags, metrics and samples to what --report_to names. Step 0 is the base.

    python grpo.py --report_to tensorboard; tensorboard --logdir runs
    WANDB_MODE=offline python grpo.py --report_to wandb
    python grpo.py --report_to trackio; trackio show
    """

    def __init__(self, name):
        self.is_board = name == "tensorboard"
        try:
            self.module = importlib.import_module(
                "torch.utils.tensorboard" if self.is_board else name)
        except ImportError:
            common.fail(f"--report_to {name}: needs a package: pip install {name}")

    def start(self, run):
        flags = dataclasses.asdict(run.cfg)
        if self.is_board:
            first = run.step + 1 if run.resumed else None       # later steps are logged again
            self.writer = self.module.SummaryWriter(run.folder / "tensorboard", purge_step=first)
            self.writer.add_text("config", "".join(f"    {key}: {x}\n" for key, x in flags.items()))
            return
        name, key = run.folder.name, run.state.setdefault("wandb_id", uuid.uuid4().hex)
        options = {"name": f"{name}-{key[:8]}"}         # by which trackio finds a run again
        if self.module.__name__ == "wandb":             # finds it by its id
            options = {"name": name, "id": key, "dir": str(run.folder)}
        begun = self.module.init(project=run.script.stem, config=flags, resume="allow", **options)
        # trackio has steps after the checkpoint of a run that was killed; wandb ignores them itself
        self.first = getattr(begun, "_next_step", 0) if run.resumed else 0

    def evaluate(self, run, scores):
        self.send(run.step, plumbing.logged(scores))

    def step(self, run, batch, advantages, metrics):
        A = per_completion(advantages, batch.mask)                              # (B,)
        self.send(run.step, metrics, sample_rows(batch, A) if is_shown(run) else [])

    def send(self, step, values, rows=()):
        """Send metrics, and samples with these COLUMNS."""
        if not self.is_board and step >= self.first:
            table = {"samples": self.module.Table(columns=COLUMNS, data=rows)} if rows else {}
            self.module.log(values | table, step=step)
        if not self.is_board:
            return
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        if rows:                # in Markdown, indented lines keep tags such as <think>
            lines = ["    " + "  ".join(map(str, row)) + "\n" for row in [COLUMNS, *rows]]
            self.writer.add_text("samples", "".join(lines), step)
        self.writer.flush()                     # if the run is killed, no step is lost

    def finish(self, run, summary):
        if self.is_board:
            self.writer.close()
        else:
            self.module.finish()
