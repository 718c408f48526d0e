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
from lab.docs import run_once
from lab.draw import BLUE, GREY, ORANGE, curves
from lab.experiment import Experiment, numbers
from lab.training import load_base
from lab.verdict import OURS, Claim
from plumbing import encode_examples
from tasks import preferences
from tasks.problems import passes

FLIPS = 0.4                             # fraction of the pairs that are flipped
GAIN = 0.02                             # smallest difference of a pass@1 that matters
EVALUATION = "--num_eval_problems 256 --num_eval_samples"
FRESH = f"dpo.py {EVALUATION} 2 --max_steps 40"
LEARNING = {"offline": FRESH, "offline, beta 0.5": f"{FRESH} --beta 0.5",
            "online": f"{FRESH} --online"}
GREEDY = "eval/greedy"                  # metrics that exist only for every tenth step
CHOSEN = "eval/pairs/rewards/chosen"
REJECTED = "eval/pairs/rewards/rejected"
SIZE = 64                               # pairs of a step
FIXED = f"dpo.py {EVALUATION} 2 --max_steps 30"
CLEAN = "DPO, no flips"
LOSSES = {CLEAN: FIXED, "DPO": FIXED, "cDPO": f"{FIXED} --label_smoothing {FLIPS}",
          "robust DPO": f"{FIXED} --label_smoothing {FLIPS} --loss_type robust",
          "IPO": f"{FIXED} --loss_type ipo --beta 0.5", "RPO": f"{FIXED} --nll_coef 1"}
PPO = f"ppo.py {EVALUATION} 4 --reward model --max_steps 30"
METHODS = {"DPO": f"dpo.py {EVALUATION} 4 --max_steps 30",
           "PPO": PPO, "PPO, beta 0.1": f"{PPO} --beta 0.1"}
EXPERIMENT = Experiment(__file__, seeds=range(5), one_base=True,
                        rate="5e-4 for ppo.py and 1e-4 for dpo.py")
EXPERIMENT.runs("fresh", LEARNING, [GREEDY, CHOSEN, REJECTED], ["pass@1"])
EXPERIMENT.commands += [*LOSSES.values(), *METHODS.values()]


def readable(batch, chosen, rejected):
    """Make texts of the pairs of these rows, (N,) each. Leaves out a pair if one of them would
    be read as other tokens, because it was truncated, isn't UTF-8, or spells out a special token.
    -> list of dicts"""
    texts = []
    for ids, n, text in zip(batch.tokens.tolist(), batch.lengths.tolist(), batch.texts):
        again = [*common.TOKENIZER.encode(text, allowed_special="all"), common.EOS]
        texts.append(text if ids[:n] == again else None)
    rows = zip(chosen.tolist(), rejected.tolist())
    pairs = [{"prompt": batch.problems[one].prompt, "chosen": texts[one], "rejected": texts[other]}
             for one, other in rows]
    return [pair for pair in pairs if None not in pair.values()]


@functools.cache
def pairs_of_the_base():
    """Make the pairs that dpo.py's first 30 steps make of samples of the base. -> list of dicts"""
    cfg, task, policy = load_base(dpo)
    batches = [dpo.sample_batch(policy, task, cfg, step) for step in range(cfg.max_steps)]
    return [pair for batch in batches
            for pair in readable(batch, *dpo.preferences(batch.rewards))]


def run_on(pairs, command, seed):
    """Train with a command line of dpo.py, but on these pairs. -> columns"""
    _, *flags = command.split()
    cfg, task, policy = load_base(dpo, f"{' '.join(flags)} --seed {seed}")
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate, weight_decay=0.0)
    outputs = [common.Problem(pair["prompt"], "", completion=pair[name])
               for name in ("chosen", "rejected") for pair in pairs]
    batch = SimpleNamespace(**dict(zip(
        ("prompts", "tokens", "mask", "lengths"), encode_examples(outputs, task, cfg.device))))
    times = []
    for step in range(cfg.max_steps):
        began = time.perf_counter()
        chosen = torch.tensor(passes(range(len(pairs)), step * SIZE, SIZE, cfg.seed))
        dpo.update(policy, reference, optimizer, batch, chosen, chosen + len(pairs), cfg, step)
        times.append(time.perf_counter() - began)
    return {"pass@1": dpo.evaluate(policy, task, cfg)["pass@1"], "step_time": times}


@EXPERIMENT.measure(LOSSES)
def flipped(seed, name):
    """Train on pairs of the base, some of them flipped unless the name is CLEAN."""
    rng = random.Random(seed)
    pairs = []
    for pair in pairs_of_the_base():
        if name != CLEAN and rng.random() < FLIPS:
            pair = pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}
        pairs.append(pair)
    return {"pass@1": run_on(pairs, LOSSES[name], seed)["pass@1"]}


def compared_pairs(seed):
    """Make the pairs that the reward model of a run with this seed learns from, as far as texts can
    contain them. -> list of dicts"""
    cfg, task, policy = load_base(ppo, f"--seed {seed}")
    generator = common.generator(seed, "mistakes")
    results = []
    for number in range(preferences.BATCHES):
        batch = ppo.sample_batch(policy, task, cfg, f"preferences {number}")
        rows = preferences.pairs(batch, preferences.MISTAKES, generator)
        results += readable(batch, *rows)
    return results


@EXPERIMENT.measure(METHODS)
def same(seed, method):
    """Train DPO on pairs, or PPO against the reward model that learned from them."""
    if method == "DPO":
        return run_on(compared_pairs(seed), METHODS[method], seed)
    return run_once(METHODS[method], seed, ["step_time"], ["pass@1"])


def page(fresh, flipped, same):
    beta = {"offline": 0.1, "offline, beta 0.5": 0.5, "online": 0.1}
    gained = {name: columns[CHOSEN] / beta[name] for name, columns in fresh.items()}    # nats
    lost = -gained["offline"][:, -1]
    yield Claim("in offline DPO, chosen answers lose log-probability", "Razin and others", lost,
                at_least=1, unit="nats", said="In 40 steps of offline DPO, chosen answers lose "
                f"{lost.mean():.1f} nats of log-probability")
    yield curves({name: values[:, 9::10] for name, values in gained.items()}, range(10, 41, 10),
                 given=dict(zip(gained, (BLUE, GREY, ORANGE))),
                 ylabel="nats gained by chosen answers")
    yield numbers({name: {
        "pass@1": columns["pass@1"], "greedy accuracy": columns[GREEDY][:, -1],
        "change of log pi, chosen (nats)": gained[name][:, -1],
        "change of log pi, rejected (nats)": columns[REJECTED][:, -1] / beta[name]}
        for name, columns in fresh.items()}, by="DPO on fresh pairs")
    yield Claim("online DPO ends with a higher pass@1 than offline DPO", "Guo and others",
                (fresh["online"]["pass@1"], fresh["offline"]["pass@1"]), at_least=GAIN)

    score = {name: columns["pass@1"] for name, columns in flipped.items()}
    yield Claim(f"with {FLIPS:.0%} of the pairs flipped, DPO ends with a lower pass@1", OURS,
                (score["DPO"], score[CLEAN]), at_most=-GAIN)
    yield Claim(f"with {FLIPS:.0%} of the pairs flipped, robust DPO ends with a higher pass@1 than "
                "DPO", "robust DPO", (score["robust DPO"], score["DPO"]), at_least=GAIN)
    yield numbers(flipped,
                  by=f"loss ({FLIPS:.0%} of the pairs are flipped, except in the first row)")

    end = {name: columns["pass@1"] for name, columns in same.items()}
    yield Claim("from the same pairs, DPO's pass@1 at the end is at least as high as PPO's", "DPO",
                (end["DPO"], end["PPO"]), at_least=-GAIN)
    yield Claim("PPO ends with a higher pass@1 if the KL is penalized", "InstructGPT",
                (end["PPO, beta 0.1"], end["PPO"]), at_least=GAIN)
    yield numbers({name: {"pass@1": end[name],
                          "seconds of training": columns["step_time"].sum(axis=1)}
                   for name, columns in same.items()}, by="method, on the same pairs")
