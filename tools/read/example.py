"""The worked example: one question and four answers of 3, 2, 3 and 2 tokens, of which the third is
right. Each script's own functions are called on it, in the order in which main calls them.

Only the network is replaced: log-probabilities, values of the critic and squared gradients are
given here. The policy has moved since it sampled, as after the first optimizer step of a batch.
"""
import contextlib
import importlib
import shlex
from unittest import mock

import torch
from torch import nn

import common
from tools.read.watch import Watch

QUESTIONS = dict.fromkeys(("reinforce", "ppo", "grpo", "gspo"), "6+7=") | {"dpo": "3*4="}
ANSWERS = [["1", "2", "⏎"], ["9", "⏎"], ["1", "3", "⏎"], ["7", "⏎"]]      # and their tokens
END = 0.0                                   # a slot behind the end of an answer
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, END], [1.0, 1.0, 1.0], [1.0, 1.0, END]])
REWARDS = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
GRADED = torch.tensor([[1.0, 0.6, 0.0, 0.3]])           # dpo.py: from which two pairs can be made
OLD_LOGPS = torch.tensor([[-1.6, -0.4, -0.7], [-0.9, -0.6, END],
                          [-1.4, -0.5, -0.3], [-1.1, -0.2, END]])
MOVED = torch.tensor([[0.5, -0.1, 0.1], [-0.4, 0.1, END], [0.4, -0.3, 0.1], [0.1, -0.1, END]])
REF_LOGPS = OLD_LOGPS + torch.tensor([[-0.2, 0.1, 0.1], [0.1, -0.1, END],
                                      [-0.3, 0.0, 0.1], [0.2, -0.1, END]])
TEACHER_LOGPS = torch.tensor([[-2.9, -1.2, -0.8], [-1.4, -2.1, END],
                              [-0.6, -0.3, -0.1], [-0.9, -1.7, END]])
ENTROPY = torch.tensor([[0.9, 0.6, 0.8], [0.7, 0.5, END], [1.0, 0.8, 0.6], [0.9, 0.4, END]])
VALUES = torch.tensor([[0.2, 0.1, 0.1], [0.3, 0.2, END], [0.4, 0.6, 0.8], [0.2, 0.1, END]])
NEW_VALUES = VALUES + torch.tensor([[-0.1, 0.1, 0.0], [-0.3, 0.1, END],
                                    [0.3, 0.1, 0.1], [0.1, 0.0, END]])
SQUARED_GRADIENTS = torch.tensor([[2.0, 1.0, 4.0, 1.0]])
ROWS = torch.arange(4)

# Flags with which lines run that do not by default, in the order of the code.
OF_GROUPS = """
    --scale_rewards batch
    --scale_rewards mean
    --overlong_buffer 2
    --delta 1.5
    --loss_type dapo
    --loss_type cispo
    --loss_type sapo
    --beta 0.04
    --beta 0.04 --kl_estimator k1
    --beta 0.04 --kl_estimator k2
    --beta 0.04 --kl_estimator k3_ratio
    --loss_type dr_grpo
    --mask_truncated_completions
"""
VARIANTS = {
    "reinforce": """
        --baseline batch
        --baseline mean
        --baseline rloo
        --baseline optimal
        --view token
        --teacher RUN --view token --gamma 0
        --method rejection
        --beta 0.02""",
    "ppo": """
        --length_adaptive
        --trust_region penalty
        --nll_coef 0.1
        --beta 0.02 --kl_target 0.01
        --beta 0.02 --kl_target 0.005""",
    "grpo": OF_GROUPS,
    "gspo": "--importance_sampling_level sequence_token" + OF_GROUPS,
    "dpo": """
        --loss_type ipo --beta 0.5
        --loss_type hinge
        --loss_type simpo --beta 2
        --loss_type robust --label_smoothing 0.1
        --nll_coef 1"""}


class Network(nn.Module):
    """In place of a policy or a critic: it has a number for each token of the example."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers = nn.Parameter(numbers.clone())

    def forward(self, prompts, tokens):
        rows = prompts[:, 0]                            # a prompt is the number of its row
        return self.numbers[rows, :tokens.shape[1]]


def score(network, prompts, tokens, _temperature, _kernel):
    """Log-probs and entropies of tokens, as the scripts' own score has them. -> (B, T), (B, T)"""
    return network(prompts, tokens), ENTROPY[prompts[:, 0], :tokens.shape[1]]


def make_batch(rewards=REWARDS):
    """The four answers as a batch. -> common.Batch"""
    return common.Batch(
        tokens=torch.tensor([[5, 6, 7], [5, 7, 0], [8, 6, 7], [6, 7, 0]]), mask=MASK.clone(),
        logps=OLD_LOGPS.clone(), entropy=ENTROPY, lengths=MASK.sum(dim=1).long(),
        is_truncated=torch.tensor([False, False, False, True]), problems=[None] * 4,
        prompts=ROWS[:, None], texts=[""] * 4, verdicts=[0.0, 0.0, 1.0, 0.0],
        is_correct=REWARDS > 0, rewards=rewards.clone(), pass_rates=[])


# ---- what main does, on the example ----------------------------------------------------------

def run_groups(script, cfg, policy):
    """grpo.py and gspo.py."""
    batch = make_batch()
    if cfg.overlong_buffer > 0:                         # else it adds 0
        lengths = batch.lengths.view_as(batch.rewards)
        batch.rewards += script.overlong_penalty(
            lengths, cfg.max_completion_length, cfg.overlong_buffer)
    A = script.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1)
    script.backward(policy, batch, REF_LOGPS, A, ROWS, cfg)


def run_reinforce(script, cfg, policy):
    batch = make_batch()
    teacher = Network(TEACHER_LOGPS) if cfg.teacher else None
    rewards = script.token_rewards(common.Task(cfg), teacher, batch, cfg)
    A, _ = script.compute_advantages(policy, Network(REF_LOGPS), batch, rewards, cfg)
    script.backward(policy, batch, A, ROWS, cfg)
    script.kl(policy.numbers, REF_LOGPS)                # (4), of which a run has other uses


def run_ppo(script, cfg, policy):
    batch = make_batch()
    script.kl(policy.numbers, REF_LOGPS)                # (4), of which a run has other uses
    A, returns, metrics = script.compute_advantages(
        Network(VALUES), Network(REF_LOGPS), common.Task(cfg), batch, cfg, cfg.beta)
    policy.critic = Network(NEW_VALUES)                 # a part of it, where its gradient is found
    optimizer = torch.optim.SGD(policy.critic.parameters(), lr=0.0)
    script.fit_critic(policy.critic, optimizer, batch, returns, cfg, "example")
    script.backward(policy, batch, A, ROWS, cfg, cfg.penalty_coef)
    if cfg.kl_target > 0:
        script.adapt_coefficient(cfg.beta, metrics["kl"], cfg.kl_target)


def run_dpo(script, cfg, policy):
    batch = make_batch(GRADED)
    chosen, rejected = script.preferences(batch.rewards)
    script.backward(policy, Network(REF_LOGPS), batch, chosen, rejected, cfg)
    script.kl(policy.numbers, REF_LOGPS)                # (4), of which a run has other uses


STORIES = {"reinforce": run_reinforce, "ppo": run_ppo, "grpo": run_groups, "gspo": run_groups,
           "dpo": run_dpo}


# What is given, as the page shows it.
COMMON = {"mask": MASK, "old_logps": OLD_LOGPS, "logps": OLD_LOGPS + MOVED, "ref_logps": REF_LOGPS,
          "entropy": ENTROPY}
INPUTS = {
    "reinforce": {"rewards": REWARDS} | COMMON | {
        "teacher": TEACHER_LOGPS, "sq_grad_norms": SQUARED_GRADIENTS},
    "ppo": {"rewards": REWARDS} | COMMON | {"old_values": VALUES, "values": NEW_VALUES},
    "grpo": {"rewards": REWARDS} | COMMON,
    "gspo": {"rewards": REWARDS} | COMMON,
    "dpo": {"rewards": GRADED, "mask": MASK, "logps": OLD_LOGPS + MOVED, "ref_logps": REF_LOGPS}}


# ---- running it ------------------------------------------------------------------------------

def parse(script, flags):
    """The flags of a run of the example. -> Config"""
    small = ["--device", "cpu", "--num_generations", "4", "--max_completion_length", "4"]
    default_task = ["--task", "arithmetic"]
    return common.parse_flags(script.Config, [*small, *default_task, *shlex.split(flags)])


@contextlib.contextmanager
def without_network(script):
    """Within, the example's numbers stand for what the script's network would say."""
    replaced = {"score": score, "squared_gradient_norms": lambda *_: SQUARED_GRADIENTS}
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            if hasattr(script, name):
                stack.enter_context(mock.patch.object(script, name, function))
        yield


def run(name, flags="", watched=()):
    """Call the functions of a script on the example. -> list of watch.Call, of the functions
    `watched`"""
    script = importlib.import_module(name)
    cfg = parse(script, flags)
    policy = Network(OLD_LOGPS + MOVED)
    gradients = {"backward": ("∂L/∂log π", lambda: policy.numbers.grad),
                 "fit_critic": ("∂LV/∂V", lambda: policy.critic.numbers.grad)}
    with without_network(script), Watch(script.__file__, watched, gradients) as watch:
        STORIES[name](script, cfg, policy)
    return watch.calls


def variants(name):
    """The flags with which the example is run, the default ones first. -> list"""
    return ["", *[line.strip() for line in VARIANTS[name].strip().splitlines()]]
