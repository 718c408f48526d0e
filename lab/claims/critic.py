"""Critic: whether VAPO's critic pays, and which of its parts makes it do so

DAPO, PPO, VAPO, and VAPO with one part left out, on countdown. docs/lab/critic.md says more.
"""
from lab.draw import BLUE, GREEN, GREY, ORANGE, RED, SKY, curves
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
LAST = 5                                # batches, for the reward at the end
GAIN = 0.05                             # of a reward, what counts as one
EXPERIMENT = Experiment(__file__, seeds=range(8))
EXPERIMENT.runs("runs", RUNS, ["reward"])


def page(runs):
    last = {name: found["reward"][:, -LAST:].mean(axis=1) for name, found in runs.items()}
    said = ", ".join(f"{name} {last[name].mean():.2f}" for name in ("VAPO", "DAPO", "PPO"))
    wins = Claim("on countdown, VAPO ends with a higher reward than DAPO", "VAPO",
                 (last["VAPO"], last["DAPO"]), at_least=GAIN, unit="reward",
                 contradicted=f"VAPO, with a critic, earns no more than DAPO, without: {said}")
    yield wins
    for name in list(RUNS)[1:]:
        if name != "VAPO":
            yield Claim(f"on countdown, VAPO ends with a higher reward than {name}", "VAPO",
                        (last["VAPO"], last[name]), at_least=GAIN, unit="reward")
    yield curves({name: columns["reward"] for name, columns in runs.items()}, wins.finding,
                 ylabel="reward on countdown",
                 given=dict(zip(RUNS, (BLUE, RED, GREEN, GREY, SKY, ORANGE))))
    yield numbers({name: {f"reward of the last {LAST} batches": last[name]} for name in RUNS},
                  by="countdown")
