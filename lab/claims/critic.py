"""Critic: whether VAPO's critic pays, and which of its parts makes it do so

Claim. PPO's critic is not needed: DAPO (2503.14476) does without. Trained well, a critic wins after
all: on AIME 2024 VAPO (2504.05118) has 60.4 points, DAPO 50 and PPO 5. Without value pretraining
VAPO falls to 11, without a lambda of 1 for the critic to 33, without a lambda by length to 45.

Prediction. On countdown searches have 50 tokens, and 0.95^49 = 8% of a reward reaches the first,
where it is decided whether to search: PPO learns little, and VAPO nearly as much as DAPO, not more,
for so few batches teach a critic little. The lambda by length is the part that counts, since with
it even a critic of zeros shows the first token 1/e of the reward; without pretraining or the
critic's own lambda, VAPO is as good. A pilot of one seed and 12 steps had shown VAPO begin to
search, and one of 8 steps PPO not.

Method. Countdown with three numbers, 8 prompts a step, 16 steps: DAPO without its dynamic sampling,
PPO, VAPO, and VAPO with one part left out. The critic begins from the base, too. The lambda by
length is 1 - 1 / (alpha n) for n tokens, with alpha 1 here; VAPO has 0.05, for texts of thousands
of tokens.

Outcome. PPO earns least in the mean, and VAPO as much as DAPO, not more, as predicted. Predicted
wrongly: PPO learns, too, only later, and the lambda by length is not what counts: leaving out any
one part costs less than 0.05. With 16 steps and 10 of pretraining, where the paper has 50, this
says little of long runs.
"""
from lab.draw import BLUE, GREEN, GREY, ORANGE, RED, SKY, curves
from lab.experiment import Experiment, numbers
from lab.verdict import Claim

VAPO = "[VAPO](https://arxiv.org/abs/2504.05118)"
COUNTDOWN = ("--task countdown:3 --stop_at 2 --num_eval_problems 1 --num_eval_samples 1 "
             "--eval_steps 1000 --num_prompts 8 --max_steps 16")
WHOLE = (f"ppo.py {COUNTDOWN} --epsilon_high 0.28 --nll_coef 0.1 --length_adaptive --critic_lam 1 "
         "--critic_pretrain_steps 10")
RUNS = {"DAPO": f"grpo.py {COUNTDOWN} --loss_type dapo", "PPO": f"ppo.py {COUNTDOWN}",
        "VAPO": WHOLE,
        "VAPO without its pretraining": f"{WHOLE} --critic_pretrain_steps 0",
        "VAPO without its critic's lambda": f"{WHOLE} --critic_lam 0.95",
        "VAPO without its lambda by length": f"{WHOLE} --no-length_adaptive"}
GAIN = 0.05                             # of a reward, what counts as one
EXPERIMENT = Experiment(__file__, __doc__, seeds=range(8))
EXPERIMENT.runs("runs", RUNS, ["reward"])


def page(runs):
    last = {name: found["reward"][:, -5:].mean(axis=1) for name, found in runs.items()}
    said = ", ".join(f"{name} {last[name].mean():.2f}" for name in ("VAPO", "DAPO", "PPO"))
    wins = Claim("on countdown, VAPO ends with a higher reward than DAPO", VAPO,
                 (last["VAPO"], last["DAPO"]), at_least=GAIN, unit="reward",
                 shown=f"VAPO, with a critic, earns more than DAPO, without: {said}",
                 contradicted=f"VAPO, with a critic, earns no more than DAPO, without: {said}",
                 undecided=f"Rewards at the end on countdown: {said}")
    yield wins
    for name in list(RUNS)[1:]:
        if name != "VAPO":
            yield Claim(f"on countdown, VAPO ends with a higher reward than {name}", VAPO,
                        (last["VAPO"], last[name]), at_least=GAIN, unit="reward")
    yield curves({name: columns["reward"] for name, columns in runs.items()}, wins.finding,
                 ylabel="reward on countdown",
                 given=dict(zip(RUNS, (BLUE, RED, GREEN, GREY, SKY, ORANGE))))
    yield numbers({name: {"last": last[name]} for name in RUNS},
                  {"last": "reward of the last 5 batches"}, by="countdown")
