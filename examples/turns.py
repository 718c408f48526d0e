"""Turns: which turn of an episode deserves the reward? Three kinds of advantages for grpo.py.

In a task with turns (tasks/calls.py), an output is an episode: the policy acts, the environment
responds, and so on. Turn k of output i gets the reward r_ik. grpo.py gives all turns the advantage
of the whole episode, so it also reinforces the bad turns of a good episode (--adv_estimator grpo).
Here, mean and std are those of all episodes in the group:

  A_i   = (sum_k r_ik - mean) / (std + 1e-4)                                         (1)

A turn cannot change the rewards before it, and the sooner a reward follows, the more likely it was
this turn that caused it. So the return of a turn counts only the rewards from turn k on, and
discounts them. Mean and std are now those of the turns with number k (--adv_estimator
reward_to_go):

  R_ik  = sum_{l >= k} gamma^(l - k) r_il                                            (2)
  A_ik  = (R_ik - mean) / (std + 1e-4)                                               (3)

But at turn k, one episode is in a better state than another, because of its earlier turns. Only
turns in equal states show which action is better. So GiGPO (2505.10978, --adv_estimator gigpo) adds
an advantage S with a weight omega to (1). Its mean and std are those of all turns of the group that
are in the same state, whatever their numbers. S is 0 if no other turn is in this state:

  S_ik  = (R_ik - mean) / (std + 1e-4)                                               (4)
  A_ik  = A_i + omega S_ik                                                           (5)

A turn is what the policy wrote between two responses, and all its tokens get the advantage of the
turn. Text after the end of an episode belongs to no turn: in --adv_estimator reward_to_go its
advantage is 0, and in gigpo only (1) applies to it.

Departures: the paper divides by std or by 1, and so does --scale_rewards group or none. In (1), the
paper's code counts an episode once for each of its turns, but we count it once, as the paper does.
std has ddof 1, and 1e-4 is added to it, as in grpo.py. What --reward or --overlong_buffer adds to
the rewards of the turns goes to the last turn.

Usage: python examples/turns.py --task number --adv_estimator gigpo
"""
import dataclasses
import sys
from pathlib import Path
from typing import Literal

if not __package__:     # started as a file: the scripts are in the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # isort: split

import torch

import grpo
import plumbing
from tasks.flags import find

# Shapes: as in grpo.py; K is the largest number of turns of an output in the batch.


@dataclasses.dataclass(frozen=True)
class Config(grpo.Config):
    adv_estimator: Literal["grpo", "reward_to_go", "gigpo"] = common.flag(
        "gigpo", "(1), (3) or (5)")
    gamma: float = common.flag(0.95, "discount of a turn in (2)")
    step_advantage_w: float = common.flag(1.0, "weight of equal states in (5) (omega)")
    scale_rewards: Literal["group", "none"] = common.flag(
        "group", "divisor in (1), (3), (4): std, or 1")

    def rules(self):
        yield from super().rules()
        yield self.gamma <= 1, f"--gamma {self.gamma}: must be at most 1"
        for name, users in (("gamma", ("reward_to_go", "gigpo")), ("step_advantage_w", ("gigpo",))):
            has_use = self.adv_estimator in users or getattr(self, name) == getattr(Config, name)
            yield has_use, f"--{name}: needs --adv_estimator {' or '.join(users)}"
        has_turns = "," not in self.task and hasattr(find(self.task.partition(":")[0]), "play")
        yield has_turns, (f"--task {self.task}: has no turns; choose --task number, or see "
                          "tasks/calls.py")


def turn_numbers(mask):
    """Number the turns: sampled tokens up to a response are one turn. In masked slots, the number
    of the turn before, or -1. (B, T) -> (B, T)"""
    before = torch.nn.functional.pad(mask, (1, -1))                             # (B, T)
    is_first = (mask > 0) & (before == 0)
    return is_first.cumsum(dim=1) - 1


def returns(rewards, gamma):
    """Compute the discounted reward to go of each turn. (B, K) -> (B, K)"""
    R = rewards.clone()
    for k in reversed(range(rewards.shape[1] - 1)):
        R[:, k] = rewards[:, k] + gamma * R[:, k + 1]                           # (B,)  eq. (2)
    return R


def compared(R, labels, scale_rewards):
    """Compare each return with all returns that have the same label; 0 without a label (-1), or if
    no other return has it. (B, K) each -> (B, K)"""
    A = torch.zeros_like(R)
    found, counts = labels[labels >= 0].unique(return_counts=True)
    for label in found[counts > 1]:
        same = labels == label
        A[same] = grpo.advantages(R[same][None], scale_rewards)[0]              # for (3), (4)
    return A


def read_turns(task, batch):
    """Read the turns of each output. -> rewards (B, K); labels of the turns (B, K) that are equal
    if two turns have the same question and number, and labels that are equal if they also have the
    same state. A label is -1 where an output has no turn."""
    numbers = turn_numbers(batch.mask.cpu())
    lengths = 1 + numbers[:, -1]                                # (B,) turns with sampled tokens
    shape = len(lengths), int(lengths.max())
    rewards = torch.zeros(shape, dtype=batch.rewards.dtype)
    by_number = torch.full(shape, -1)
    by_state = torch.full(shape, -1)
    G = batch.rewards.shape[1]
    labels = {}
    for row, (problem, text) in enumerate(zip(batch.problems, batch.texts)):
        last = int(lengths[row]) - 1
        for k, turn in enumerate(task.play(problem, text)[:last + 1]):
            rewards[row, k] = turn.reward
            by_number[row, k] = labels.setdefault((row // G, k), len(labels))
            by_state[row, k] = labels.setdefault((row // G, "state", turn.state), len(labels))
        rest = batch.rewards.flatten()[row] - rewards[row].sum()
        rewards[row, last] += rest
    return rewards, by_number, by_state


def advantages(task, batch, cfg):
    """Compute the advantages of all tokens; 0 for those of the environment. -> (B, T), metrics"""
    rewards, by_number, by_state = read_turns(task, batch)                      # (B, K) each
    R = returns(rewards, cfg.gamma)                                             # (B, K)
    whole = grpo.advantages(batch.rewards, cfg.scale_rewards).view(-1, 1)       # (B, 1)  eq. (1)
    if cfg.adv_estimator == "grpo":
        A = whole.expand_as(R)
    elif cfg.adv_estimator == "reward_to_go":
        A = compared(R, by_number, cfg.scale_rewards)                           # (B, K)  eq. (3)
    else:
        S = compared(R, by_state, cfg.scale_rewards)                            # (B, K)  eq. (4)
        A = whole + cfg.step_advantage_w * S                                    # (B, K)  eq. (5)
    A = A.to(batch.mask)
    numbers = turn_numbers(batch.mask).clamp(min=0)                             # (B, T)
    is_turn = by_number >= 0
    _, label, counts = by_state[is_turn].unique(return_inverse=True, return_counts=True)
    return A.gather(1, numbers) * batch.mask, {
        "turns/mean": is_turn.sum(dim=1).double().mean().item(),
        "turns/shared_states": (counts[label] > 1).double().mean().item()}


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg).to(cfg.device)
    columns = grpo.COLUMNS | {"turns": "turns/mean"}
    with plumbing.Run(cfg, task, policy, columns, grpo.observers(cfg)) as run:
        reference = run.begin(grpo.sample_batch)
        optimizer = plumbing.AdamW(policy.parameters(), lr=cfg.learning_rate)

        run.start(grpo.evaluate, policy=policy, optimizer=optimizer)
        for step in range(run.step, cfg.max_steps):
            batch = grpo.sample_with_signal(policy, task, cfg, step)
            A, turns = advantages(task, batch, cfg)                                 # (B, T)
            ref_logps, mean_kl = grpo.score_reference(reference, batch, cfg)
            metrics = grpo.update(policy, ref_logps, optimizer, batch, A, cfg, step)
            run.log(batch, A, metrics | turns | {"kl": mean_kl})
        return run.finish()


if __name__ == "__main__":
    main()
