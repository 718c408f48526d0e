"""Hints: what a policy learns from itself if, as the teacher, it has seen the answer"""
import torch

import common
import reinforce
from lab.bench import OURS, Claim, at_best, numbers, steps_to
from lab.docs import run_once
from lab.training import continued, load_base
from report import chart

SEEDS, TUNING = range(5), range(5, 8)
STEPS, LONG, SAMPLES_A_STEP = 20, 60, 32 * 8
LEVEL, WINDOW, LAST = 0.75, 3, 5        # accuracy to reach, in a mean of 3 steps; the last 5 steps
NEAR = 0.1                              # shares that differ by less count as equal
SCORED = "--eval_steps 1000 --num_eval_problems 256 --num_eval_samples 4"
SELF = "examples/distill.py --teacher self"
METRICS, SCORES = ["reward"], ["pass@1", "think_share", "greedy"]
OF_SELF, OF_GRPO = "self-distillation", "GRPO"
SIDES = {OF_SELF: (f"{SELF} --task key --max_steps 40 {SCORED}", 1e-3),
         OF_GRPO: (f"grpo.py --task key --max_steps 40 {SCORED}", 1e-3)}
NEEDED = f"thousand samples to {LEVEL:.0%} accuracy"
COMPARED = [(side, NEEDED) for side in SIDES]
LEVELS = {"work": "the work", "half": "the work in half of the cases", "answer": "the answer alone"}
DIRECTIONS = {"reverse": "--beta 1", "forward": "--beta 0"}
KINDS = ("base", "ema", "live")
MODES = {"full": "", "sampled": "--distillation_mode sampled_token"}
RUNS = {f"{level}, {direction}": f"{SELF} --task key:{level} {beta}"
        for level in LEVELS for direction, beta in DIRECTIONS.items()}
RUNS |= {f"{kind}, {mode}": f"{SELF} --hint sibling --task key --teacher_model_kind {kind} {flag}"
         for kind in KINDS for mode, flag in MODES.items()}
RUNS |= {f"half, {name}": f"{SELF} --task key:half {MODES['sampled']} {flag}"
         for name, flag in {"sampled": "", "with a reward": "--teacher_coef 0.1"}.items()}
RUNS |= {f"{level}, GRPO": f"grpo.py --task key:{level}" for level in LEVELS}
CASES = [*RUNS]


def measure(case, seed):
    """Train with a case's command, and compute how often the base thinks if it sees a hint."""
    level = case.partition(", ")[0]
    steps = LONG if level in KINDS else STEPS
    flags = f"--max_steps {steps} {SCORED} --base_seed {seed}"
    columns = run_once(f"{RUNS[case]} {flags}", seed, METRICS, SCORES)
    if level in LEVELS:
        columns["teacher thinks"] = share_with_hint(f"--task key:{level} --base_seed {seed}")
    return columns


def share_with_hint(flags, n=512):
    """Sample n outputs of the base to problems with their answer. -> share that thinks"""
    cfg, task, base = load_base(reinforce, flags)
    problems = common.sample_problems(task, n, "hints")
    hinted = [task.hinted(problem, f"<answer>{problem.answer}</answer>") for problem in problems]
    prompts = common.encode_prompts(hinted, task, cfg.device)
    uniforms = torch.rand(n, cfg.max_completion_length, generator=common.generator("hints"))
    nothing = torch.zeros(n, 0, dtype=torch.long)
    *_, texts = continued(reinforce, base, cfg, problems, prompts, nothing, uniforms)
    return sum("<think>" in text for text in texts) / n


def score(columns, what):
    """Count the samples that each run needed; higher is better. -> minus thousands, (S,)"""
    return -(1 + steps_to(columns["reward"], LEVEL, WINDOW)) * SAMPLES_A_STEP / 1000


def page(x):
    ends = {side: columns for (side, _), columns in at_best("hints", x).items()}
    samples = {side: -score(columns, NEEDED) for side, columns in ends.items()}
    last = {case: x[case]["reward"][:, -LAST:].mean(axis=1) for case in CASES}
    thinks = {case: x[case]["think_share"] for case in CASES}
    own = {case: x[case]["teacher thinks"] for case in RUNS if "teacher thinks" in x[case]}

    yield ("A policy that teaches itself thinks as often as its teacher, which sees a hint: in "
           f"{thinks['half, reverse'].mean():.0%} of its outputs, if the work follows the hint "
           "in half of the cases. If the teacher changes with it, all runs collapse.")
    for level, direction in (("half", "reverse"), ("half", "forward"), ("answer", "reverse"),
                             ("work", "reverse")):
        case = f"{level}, {direction}"
        yield Claim("the student thinks as often as its teacher with the hint "
                    f"({level}, {direction} KL)", OURS, (thinks[case], own[case]),
                    at_least=-NEAR, at_most=NEAR)
    yield Claim("self-distillation needs fewer samples than GRPO from the same bases", "after SDPO",
                (samples[OF_GRPO], samples[OF_SELF]), ratio=True, at_least=1.2,
                rates=(ends[OF_GRPO]["rate"], ends[OF_SELF]["rate"]))
    for kind, teacher in {"live": "a live teacher", "ema": "a teacher that follows slowly"}.items():
        for mode, compared in {"full": "full vocabulary", "sampled": "sampled token"}.items():
            yield Claim(f"with {teacher}, a policy ends lower than with a frozen one ({compared})",
                        OURS, (last[f"{kind}, {mode}"], last[f"base, {mode}"]), at_most=-0.05)
    for kind in KINDS:
        yield Claim(f"the sampled token ends lower than the full vocabulary (teacher: {kind})",
                    OURS, (last[f"{kind}, sampled"], last[f"{kind}, full"]), at_most=-0.05)
    yield Claim("a reward keeps the thoughts that the hint does not call up", OURS,
                (thinks["half, with a reward"], thinks["half, sampled"]), at_least=0.2)
    rows = {f"{shown}, {STEPS} steps": {
        "teacher thinks": own[f"{level}, reverse"], "student thinks": thinks[f"{level}, reverse"],
        "student is right": last[f"{level}, reverse"]} for level, shown in LEVELS.items()}
    yield numbers(rows | {f"{kind}, {mode}, {LONG} steps": {
        "": "", "student thinks": thinks[f"{kind}, {mode}"], "right": last[f"{kind}, {mode}"]}
        for kind in KINDS for mode in MODES}, "hint; or kind of teacher", ".2f")

    drawn = ("work, reverse", "half, reverse", "answer, reverse", "answer, GRPO")
    yield lambda axis: chart.curves(axis, {case: x[case]["reward"] for case in drawn},
                                    ylabel="accuracy", ylim=(0, 1))
