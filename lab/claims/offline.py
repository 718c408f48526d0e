"""Offline DPO: chosen answers that lose probability, flipped pairs, and PPO on the same pairs"""
import copy
import functools
import random
import time
from types import SimpleNamespace

import torch

import common
import dpo
import ppo
from common import encode_examples
from lab.bench import OURS, Claim, numbers
from lab.training import load_base
from report import chart
from tasks import preferences
from tasks.problems import passes

SEEDS, ONE_BASE = range(5), True
FLIPS = 0.4                             # fraction of the pairs that are flipped
GAIN = 0.02                             # smallest difference of a pass@1 that matters
EVALUATION = "--num_eval_problems 256 --num_eval_samples"
FRESH = f"dpo.py {EVALUATION} 2 --max_steps 40"
PPO = f"ppo.py {EVALUATION} 4 --reward model --max_steps 30"
RUNS = {"offline": FRESH, "offline, beta 0.5": f"{FRESH} --beta 0.5", "online": f"{FRESH} --online",
        "PPO": PPO, "PPO, beta 0.1": f"{PPO} --beta 0.1"}
GREEDY = "eval/greedy"                  # metrics that exist only for every tenth step
CHOSEN = "eval/pairs/rewards/chosen"
REJECTED = "eval/pairs/rewards/rejected"
METRICS, SCORES = [GREEDY, CHOSEN, REJECTED, "step_time"], ["pass@1"]
# Training of dpo.py on fixed pairs: case -> flags
CLEAN, SAME = "DPO, no flips", "DPO, on PPO's pairs"
FLAGS = {CLEAN: f"{EVALUATION} 2", "DPO": f"{EVALUATION} 2",
         "cDPO": f"{EVALUATION} 2 --label_smoothing {FLIPS}",
         "robust DPO": f"{EVALUATION} 2 --label_smoothing {FLIPS} --loss_type robust",
         "IPO": f"{EVALUATION} 2 --loss_type ipo --beta 0.5",
         "RPO": f"{EVALUATION} 2 --nll_coef 1", SAME: f"{EVALUATION} 4"}
CASES = list(FLAGS)
STEPS, SIZE = 30, 64                    # steps of training, and pairs in each of them


def readable(batch, *rows):
    """Pair the chosen rows with the rejected ones, (N,) each. Leaves out a pair if a text would be
    read as other tokens, because it was truncated, isn't UTF-8, or spells out a special token.
    -> list of pairs of problems with a completion"""
    def output(row):
        ids = batch.tokens[row, :batch.lengths[row]].tolist()
        again = common.TOKENIZER.encode(batch.texts[row], allowed_special="all")
        return ids == [*again, common.EOS] and common.Problem(
            batch.problems[row].prompt, "", completion=batch.texts[row])
    pairs = zip(*(map(output, part.tolist()) for part in rows))
    return [pair for pair in pairs if all(pair)]


@functools.cache
def pairs_of_the_base():
    """Make the pairs that dpo.py makes of samples of the base. -> list"""
    cfg, task, policy = load_base(dpo)
    batches = [dpo.sample_batch(policy, task, cfg, step) for step in range(STEPS)]
    return [pair for batch in batches
            for pair in readable(batch, *dpo.preferences(batch.rewards))]


def compared_pairs(seed):
    """Make the pairs that the reward model of a run with this seed learns from. -> list"""
    cfg, task, policy = load_base(ppo, f"--seed {seed}")
    generator = common.generator(seed, "mistakes")
    batches = [ppo.sample_batch(policy, task, cfg, f"preferences {number}")
               for number in range(preferences.BATCHES)]
    return [pair for batch in batches for pair in readable(
        batch, *preferences.pairs(batch, preferences.MISTAKES, generator))]


def measure(case, seed):
    """Train DPO on fixed pairs: those that the reward model of PPO learns from, or pairs of the
    base, some of them flipped unless the case is CLEAN."""
    cfg, task, policy = load_base(dpo, f"{FLAGS[case]} --seed {seed}")
    rng = random.Random(seed)
    pairs = compared_pairs(seed) if case == SAME else [
        pair[::-1] if case != CLEAN and rng.random() < FLIPS else pair
        for pair in pairs_of_the_base()]
    outputs = encode_examples([output for side in zip(*pairs) for output in side], task, cfg.device)
    batch = SimpleNamespace(**dict(zip(("prompts", "tokens", "mask", "lengths"), outputs)))
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate, weight_decay=0.0)
    times = []
    for step in range(STEPS):
        began = time.perf_counter()
        chosen = torch.tensor(passes(range(len(pairs)), step * SIZE, SIZE, cfg.seed))
        dpo.update(policy, reference, optimizer, batch, chosen, chosen + len(pairs), cfg, step)
        times.append(time.perf_counter() - began)
    return {"pass@1": dpo.evaluate(policy, task, cfg)["pass@1"], "step_time": times}


def page(x):
    end = {case: columns["pass@1"] for case, columns in x.items()}
    beta = {"offline": 0.1, "offline, beta 0.5": 0.5, "online": 0.1}
    chosen, rejected = ({case: x[case][column] / beta[case] for case in beta}           # nats
                        for column in (CHOSEN, REJECTED))
    lost = -chosen["offline"][:, -1]
    yield Claim("in offline DPO, chosen answers lose log-probability", "Razin and others", lost,
                at_least=1, finding="In 40 steps of offline DPO, chosen answers lose "
                f"{lost.mean():.1f} nats of log-probability")
    lines = {case: values[:, 9::10] for case, values in chosen.items()}
    yield lambda axis: chart.curves(axis, lines, range(10, 41, 10),
                                    ylabel="nats gained by chosen answers")
    flipped = f"with {FLIPS:.0%} of the pairs flipped,"
    for text, source, one, other, region in (
            ("online DPO ends with a higher pass@1 than offline DPO", "Guo and others",
             "online", "offline", {"at_least": GAIN}),
            (f"{flipped} DPO ends with a lower pass@1", OURS, "DPO", CLEAN, {"at_most": -GAIN}),
            (f"{flipped} robust DPO ends with a higher pass@1 than DPO", "robust DPO",
             "robust DPO", "DPO", {"at_least": GAIN}),
            ("from the same pairs, DPO's pass@1 at the end is at least as high as PPO's", "DPO",
             SAME, "PPO", {"at_least": -GAIN}),
            ("PPO ends with a higher pass@1 if the KL is penalized", "InstructGPT",
             "PPO, beta 0.1", "PPO", {"at_least": GAIN})):
        yield Claim(text, source, (end[one], end[other]), **region)
    yield numbers({case: {
        "pass@1": end[case], "greedy accuracy": x[case][GREEDY][:, -1],
        "change of log pi, chosen (nats)": chosen[case][:, -1],
        "change of log pi, rejected (nats)": rejected[case][:, -1]} for case in beta},
        "DPO on fresh pairs")
    yield numbers({case: {"pass@1": end[case]} for case in CASES if case != SAME},
                  f"loss ({FLIPS:.0%} of the pairs are flipped, except in the first row)")
    yield numbers({case: {"pass@1": end[case],
                          "seconds of training": x[case]["step_time"].sum(axis=1)}
                   for case in (SAME, "PPO", "PPO, beta 0.1")}, "method, on the same pairs")
