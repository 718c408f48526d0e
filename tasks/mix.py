"""Several tasks as one (--task A,B), and what the run does with tasks besides arithmetic: their flags, what
their environments say, what a completion is worth, how far each difficulty is solved."""
import dataclasses
import importlib
import inspect
from types import SimpleNamespace

import common
import tasks


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of tasks besides arithmetic, and of rewards: they come with this folder."""
    reward: str = common.run_flag("accuracy", "rows of tasks.REWARDS, added: accuracy+format, fine ...")
    numbers: str = common.task_flag("3-4", "countdown: numbers in a problem, or a range")
    slip: float = common.task_flag(0.0, "gridworld: how often a move goes astray", low=0, high=1)
    curriculum: str = common.sample_flag("no", "yes: by p(1 - p), p: how often a difficulty goes well",
                                         choices=("no", "yes"))
    mask_tool_tokens: str = common.sample_flag("yes", "no: what tools say is learned, too (a mistake)",
                                               choices=("no", "yes"))


def check(cfg):
    """ValueError if a flag is not for the task of `cfg`, or --reward is not."""
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if f.metadata["group"] == "task" and value != f.default and f.name not in cfg.options:
            raise ValueError(f"--{f.name} {value}: is not for {cfg.task}")
    named = [name for name in cfg.reward.split("+") if name not in getattr(cfg, "MODELS", ())]
    modules = {name: common.load_task(name) for name in cfg.task.split(",")}
    named and tasks.rows("+".join(named), modules)
    if not named and cfg.dynamic_sampling:
        raise ValueError(f"--dynamic_sampling {cfg.dynamic_sampling}: looks for signal before the reward "
                         "model has spoken; leave it out, or take --reward accuracy+model")


def load(name):
    """The module tasks/NAME.py, or for A,B `mixed`. Exits with one line where that is no task."""
    path = common.HERE / "tasks" / f"{name}.py"
    if "," in name and all(name.split(",")):
        return mixed(name.split(","))
    if not (name.isidentifier() and path.is_file()):
        others = sorted(x.stem for x in path.parent.glob("*.py") if "\ndef sample(" in x.read_text())
        common.fail(f"--task {name}: there is no {path}; put it there, or take one of arithmetic, "
                    f"{', '.join(others)}")
    task = importlib.import_module(f"tasks.{name}")
    missing = [part for part in ("width", "sample", "corpus", "verify") if not hasattr(task, part)]
    if missing:
        common.fail(f"--task {name}: {path} is no task, for it has no {', '.join(missing)}")
    return task


def mixed(names):
    """The tasks `names`, each with the same share of the problems, in the shape of one file of tasks/."""
    parts = {name: common.load_task(name) for name in names}
    takes = {name: inspect.signature(part.sample).parameters for name, part in parts.items()}
    flags = [getattr(part, "FLAGS", {}) for part in parts.values()]

    def pick(name, options):
        return {option: value for option, value in options.items() if option in takes[name]}

    def width(**options):
        return max(part.width(**pick(name, options)) for name, part in parts.items())

    def sample(rng, **options):
        name = rng.choice(names)
        return parts[name].sample(rng, **pick(name, options))

    def corpus(problem, rng, phase):
        return parts[problem.task].corpus(problem, rng, phase)

    options = {name: parameter for some in takes.values() for name, parameter in some.items()}
    sample.__signature__ = inspect.Signature(
        [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in options.values()])
    return SimpleNamespace(                             # of what they ask for the largest
        FLAGS={name: max(some.get(name, getattr(common.Config, name, 0)) for some in flags)
               for name in {name for some in flags for name in some}},
        CORPUS={name: x for part in parts.values() for name, x in getattr(part, "CORPUS", {}).items()},
        width=width, sample=sample, corpus=corpus)


def calls(problems):
    """The tokens, as text, after which the environments of these problems may have something to insert."""
    return sorted({text for task in {problem.task for problem in problems}
                   for text in getattr(common.load_task(task), "CALLS", ())})


def respond(problem, text):
    """What the environment of a problem inserts into a completion that is at one of its `calls`."""
    task = common.load_task(problem.task)
    token = any(text.endswith(call) for call in getattr(task, "CALLS", ()))
    return task.respond(problem, text) if token else ""


def reward(names, step, problem, text, verdict):
    """What --reward NAMES makes of a completion: the sum of rows of tasks.REWARDS. -> float"""
    progress = min(1.0, step / 50) if isinstance(step, int) else 0.0   # not by --max_steps: a run may go on
    return sum(tasks.REWARDS[name](problem, text, verdict, progress) for name in names.split("+")
               if name != "model")                      # which ppo.py adds


def judge(*arguments):
    """tasks.preferences.judge, which only --reward model needs."""
    from tasks import preferences
    return preferences.judge(*arguments)


def judged(batch, parts):
    """The batch, with the rewards of the reward model added, where the `parts` of the run have one."""
    if "judge" not in parts:
        return batch
    rewards = parts["judge"].rewards(batch)                                                     # (P, G)
    return SimpleNamespace(**vars(batch) | {"rewards": batch.rewards + rewards, "judged": rewards})


def is_right(problem, verdict):
    """Whether a verdict is the best there is: 1.0, or for a list of rewards the best return. -> bool"""
    if isinstance(verdict, list):
        return sum(verdict) >= common.load_task(problem.task).best(problem) - 1e-6
    return verdict == 1


def level(problem):
    """What problems of one difficulty have in common."""
    return f"{problem.task}-{problem.difficulty}"


def shares(problems, right):
    """Level -> the share of right completions of each of its groups. P problems, right (P, G) -> dict"""
    found = {}
    for problem, share in zip(problems, right.float().mean(1).tolist()):
        found.setdefault(level(problem), []).append(share)
    return dict(sorted(found.items()))


def describe(batch, names, step):
    """The metrics of a step that only some tasks have: the frontier (which groups are all wrong, mixed, all
    right, for each difficulty), calls of the tool, completions that check themselves, and the means of the
    rows of --reward NAMES."""
    found, metrics, G = shares(batch.problems, batch.right), {}, batch.right.shape[1]
    rows = [(batch.problems[i // G], *row) for i, row in enumerate(zip(batch.texts, batch.verdicts))]
    for name in names.split("+") if "+" in names else ():
        if name == "model":
            metrics["rewards/model/mean"] = batch.judged.mean().item()
            continue
        metrics[f"rewards/{name}/mean"] = sum(reward(name, step, *row) for row in rows) / len(rows)
    for name, groups in found.items() if len(found) > 1 else ():
        wrong, right = (sum(share == end for share in groups) / len(groups) for end in (0, 1))
        metrics |= {f"frontier/{name}/wrong": wrong, f"frontier/{name}/mixed": 1 - wrong - right,
                    f"frontier/{name}/right": right}
    if calls(batch.problems):
        count = sum(text.count("<search>") for text in batch.texts)
        metrics["tools/call_frequency"] = count / len(batch.texts)
    checks = [right for text, right in zip(batch.texts, batch.right.view(-1).tolist()) if ";wait," in text]
    if any(problem.task == "arithmetic" for problem in batch.problems):
        metrics |= {"checks/share": len(checks) / len(batch.texts),
                    "checks/repaired": sum(checks) / len(checks) if checks else None}
    return metrics


def rates(before, batch):
    """Level -> share of right completions, a running mean over about five steps."""
    now = {name: sum(groups) / len(groups) for name, groups in shares(batch.problems, batch.right).items()}
    return before | {name: 0.8 * before.get(name, rate) + 0.2 * rate for name, rate in now.items()}


def weights(rates):
    """The curriculum: level -> how often to take one of its problems, 4 p (1 - p), but never below 5%."""
    return {name: max(0.05, 4 * p * (1 - p)) for name, p in rates.items()}


def learned(cfg, state, batch):
    """What the state of a run keeps of a batch: the rates, and with --curriculum the weights, else None."""
    found = rates(state.get("rates", {}), batch)
    return {"rates": found, "weights": weights(found) if cfg.curriculum == "yes" else None}
