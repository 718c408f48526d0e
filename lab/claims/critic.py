"""Critic: does VAPO's critic help, and which of its parts matter?

We compare DAPO, PPO, VAPO, and VAPO with one part left out, on countdown. docs/lab/critic.md
explains the claims and the outcome.
"""
from lab.draw import RED, dots
from lab.experiment import UNSCORED, Experiment, numbers
from lab.verdict import Claim

COUNTDOWN = f"--task countdown:3 {UNSCORED} --num_prompts 8 --max_steps 16"
WHOLE = (f"ppo.py {COUNTDOWN} --epsilon_high 0.28 --nll_coef 0.1 --length_adaptive --critic_lam 1 "
         "--critic_pretrain_steps 10")
RUNS = {"DAPO": f"grpo.py {COUNTDOWN} --loss_type dapo", "PPO": f"ppo.py {COUNTDOWN}",
        "VAPO": WHOLE,
        "VAPO without its pretraining": f"{WHOLE} --critic_pretrain_steps 0",
        "VAPO without its critic's lambda": f"{WHOLE} --critic_lam 0.95",
        "VAPO without its lambda by length": f"{WHOLE} --no-length_adaptive"}
LABELS = {"VAPO without its pretraining": "VAPO without value pretraining",
          "VAPO without its critic's lambda": "VAPO without the critic's own lambda",
          "VAPO without its lambda by length": "VAPO without length-adaptive lambda"}
LAST = 5                        # number of batches that the final reward is averaged over
GAIN = 0.05                     # smallest difference of the reward that matters
EXPERIMENT = Experiment(__file__, seeds=range(8))
EXPERIMENT.runs("runs", RUNS, ["reward"])


def page(runs):
    last = {name: columns["reward"][:, -LAST:].mean(axis=1) for name, columns in runs.items()}
    wins = Claim("on countdown, VAPO ends with a higher reward than DAPO", "VAPO",
                 (last["VAPO"], last["DAPO"]), at_least=GAIN, unit="reward",
                 contradicted=f"In the last {LAST} batches, VAPO gets a reward of "
                 f"{last['VAPO'].mean():.3f} with a critic, and DAPO gets "
                 f"{last['DAPO'].mean():.3f} without one")
    yield wins
    for name in list(RUNS)[1:]:
        if name != "VAPO":
            yield Claim("on countdown, VAPO ends with a higher reward than "
                        f"{LABELS.get(name, name)}", "VAPO", (last["VAPO"], last[name]),
                        at_least=GAIN, unit="reward")
    column = f"mean reward of the last {LAST} batches"
    yield dots({LABELS.get(name, name): values for name, values in last.items()}, wins.finding,
               form=".3f", given={"PPO": RED}, xlabel=f"{column}, on countdown; a dot is a seed")
    yield numbers({LABELS.get(name, name): {column: last[name]} for name in RUNS},
                  by="method, on countdown")
