"""Critic: does VAPO's critic help, and which of its parts matter?"""
from lab.bench import UNSCORED, Claim
from report import chart

SEEDS = range(8)
COUNTDOWN = f"--task countdown:3 {UNSCORED} --num_prompts 8 --max_steps 16"
WHOLE = (f"ppo.py {COUNTDOWN} --epsilon_high 0.28 --nll_coef 0.1 --length_adaptive --critic_lam 1 "
         "--critic_pretrain_steps 10")
RUNS = {"DAPO": f"grpo.py {COUNTDOWN} --loss_type dapo", "PPO": f"ppo.py {COUNTDOWN}",
        "VAPO": WHOLE,
        "VAPO without value pretraining": f"{WHOLE} --critic_pretrain_steps 0",
        "VAPO without the critic's own lambda": f"{WHOLE} --critic_lam 0.95",
        "VAPO without length-adaptive lambda": f"{WHOLE} --no-length_adaptive"}
METRICS = ["reward"]
LAST = 5                        # number of batches that the final reward is averaged over


def page(x):
    last = {name: columns["reward"][:, -LAST:].mean(axis=1) for name, columns in x.items()}
    finding = (f"In the last {LAST} batches, VAPO gets a reward of {last['VAPO'].mean():.3f} with "
               f"a critic, and DAPO gets {last['DAPO'].mean():.3f} without one")
    for name in RUNS:
        if name != "VAPO":
            yield Claim(f"on countdown, VAPO ends with a higher reward than {name}", "VAPO",
                        (last["VAPO"], last[name]), at_least=0.05,
                        finding=finding * (name == "DAPO"))
    yield lambda axis: chart.dots(axis, last, xlabel=f"mean reward of the last {LAST} batches")
