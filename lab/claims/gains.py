"""Gains: what RL adds to the base on countdown, lookup and gridworld

Claim. RL from outcomes teaches what a base does too rarely: to search (TinyZero, on countdown) and
to call a tool (Search-R1, 2503.09516). If each move has a reward, it gets the credit for what
follows it (Williams, 1992; PPO, 1707.06347); a policy that does not explore stays with what it has.

Prediction. Countdown's pass@1 more than doubles, and its pass@8 rises, too, by less. Lookup is
nearly solved, for all it takes is to call the tool. On the grid both scripts come near the best
return; with a temperature of 0.1 most walks end at the near prize. (The tables of three seeds at
commit 0516fa1 were known, from other bases.)

Method. A run for each row and seed, by its command; each seed has its own base. Held-out problems
of countdown are asked once each, while in training those with many solutions come more often, so
that accuracy there is higher. Returns are divided by that of the best walk. Seconds are those of
the steps, without base and evaluations.

Outcome. As predicted, but for the grid: that PPO comes near the best return is not sure (.91 to
.99), and with a temperature of 0.1 four greedy walks in ten, not most, miss the best.
"""
import numpy

from lab.draw import BLUE, GREY, dots
from lab.experiment import Block, Experiment, numbers
from lab.verdict import OURS, Claim

SEARCH = "grpo.py --task countdown --loss_type dapo"
CALL = "grpo.py --task lookup"
TOKEN = "reinforce.py --task gridworld --view token --stop_at 2"
COLD = f"{TOKEN} --temperature 0.1"
CRITIC = "ppo.py --task gridworld --stop_at 2"
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(5))
EXPERIMENT.runs("answers", {command: command for command in (SEARCH, CALL)}, ["step_time"],
                ["base: pass@1", "base: pass@8", "pass@1", "pass@8", "greedy"])
EXPERIMENT.runs("walks", {command: command for command in (TOKEN, COLD, CRITIC)}, ["step_time"],
                ["base: return", "return", "best_return", "greedy"])


def page(answers, walks):
    seconds = {command: {"seconds": numpy.nansum(found["step_time"], axis=1)}
               for command, found in (answers | walks).items()}
    share = {command: {"base": found["base: return"] / found["best_return"],
                       "trained": found["return"] / found["best_return"]}
             for command, found in walks.items()}
    trained = {command: found["pass@1"] for command, found in answers.items()}
    ratio = trained[SEARCH] / answers[SEARCH]["base: pass@1"]
    said = (f"RL makes pass@1 of countdown {numpy.exp(numpy.log(ratio).mean()):.1f} times that of "
            f"the base, that of lookup {trained[CALL].mean():.2f}, and walks on the grid earn "
            f"{share[TOKEN]['trained'].mean():.0%} of the best return")
    yield Claim("on countdown, pass@1 at least doubles", OURS, ratio, at_least=2, times=True,
                shown=said, contradicted=said, undecided=said)
    yield Claim("on lookup, pass@1 is 0.9 or more", OURS, trained[CALL], at_least=0.9)
    yield Claim("on the grid, a temperature of 0.1 costs a tenth of the best return or more", OURS,
                (share[TOKEN]["trained"], share[COLD]["trained"]), at_least=0.1)

    rows = {"countdown, base": answers[SEARCH]["base: pass@1"], "countdown": trained[SEARCH],
            "lookup, base": answers[CALL]["base: pass@1"], "lookup": trained[CALL],
            "gridworld, base": share[TOKEN]["base"], "gridworld": share[TOKEN]["trained"],
            "gridworld, temperature 0.1": share[COLD]["trained"]}
    grey = dict.fromkeys([name for name in rows if name.endswith("base")], GREY)
    yield dots(rows, said, given=dict.fromkeys(rows, BLUE) | grey, xlim=(0, 1.02),
               xlabel="pass@1, or share of the best return; a dot for each seed and its base")
    tables = [
        numbers({command: found | seconds[command] for command, found in answers.items()},
                {"base: pass@1": "pass@1, base", "base: pass@8": "pass@8, base",
                 "pass@1": "pass@1", "pass@8": "pass@8", "greedy": "greedy",
                 "seconds": "seconds"}, ".2f", by="answers"),
        numbers({command: found | share[command] | seconds[command]
                 for command, found in walks.items()},
                {"base: return": "return, base", "return": "return", "trained": "of the best",
                 "greedy": "optimal walks, greedy", "seconds": "seconds"}, ".2f", by="gridworld")]
    yield from tables
    yield Block("tasks", "\n".join([*tables, "Mean and span of seeds, each with its own base; "
                                    "[the experiment](lab/gains.md)\n"]))
