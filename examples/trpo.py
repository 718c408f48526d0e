"""TRPO: trust region policy optimization (1502.05477), as another update of ppo.py.

PPO's clip stands for a constraint. TRPO keeps it: of all policies near the old one, take that which
promises most. In L the ratio is rho_t = pi / pi_old, and A_t comes from the critic of ppo.py:

  L     = 1/N sum_t rho_t A_t                                                        (1)
  D     = 1/N sum_t KL(pi_old(. | q, o_<t) || pi(. | q, o_<t))                       (2)
  maximize L subject to D <= max_kl                                                  (3)

Near theta_old, L is g^T s and D is s^T F s / 2 for a step s of the weights, where g is the gradient
of L and F, Fisher's matrix, the second derivative of D, here plus --damping on its diagonal. Then
(3) has the solution

  s     = sqrt(2 max_kl / (x^T F x)) x,       F x = g                                (4)

F has as many rows as there are weights, but F v is the gradient of (grad D)^T v, and conjugate
gradients need no more to solve for x. As D is only near s^T F s / 2, the step is shortened to .8,
.64 .. of it until it keeps (3) and raises L; if none of ten does, the weights stay.

The policy takes one step a batch, of all rows in memory at once; --num_iterations and
--num_mini_batches are the critic's.

Usage: python examples/trpo.py --task arithmetic     a minute on a CPU, once there is a base
"""
import dataclasses
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import ppo

# Shapes: as in ppo.py; n weights of the policy.
NOT_OF_TRPO = ("epsilon", "epsilon_high", "trust_region", "penalty_coef", "target_kl",
               "entropy_coef", "nll_coef")


@dataclasses.dataclass(frozen=True)
class Config(ppo.Config):
    max_kl: float = 0.002                   # the trust region in (3) (paper: 0.01)
    damping: float = 0.1                    # added to the diagonal of F
    max_steps: int = 12                     # batches to train on at most, 5 seconds each

    def rules(self):
        yield from super().rules()
        yield self.max_kl > 0, "--max_kl 0: must be above 0"
        for name in NOT_OF_TRPO:
            yield getattr(self, name) == getattr(ppo.Config, name), f"--{name}: TRPO has none"


def conjugate_gradients(product, b, iterations=10):
    """x with M x = b for a positive definite matrix M, of which product(v) is M v. (n,) -> (n,)"""
    x = torch.zeros_like(b)
    residual = direction = b                                # b - M x
    for _ in range(iterations):
        image = product(direction)
        size = residual @ residual
        step = size / (direction @ image).clamp(min=1e-30)
        x = x + step * direction
        residual = residual - step * image
        direction = residual + residual @ residual / size.clamp(min=1e-30) * direction
    return x


def flatten(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])                  # (n,)


def trust_region_step(weights, objective, max_kl=0.01, damping=0.1):
    """Move `weights` by (4), or by a part of it that keeps (3) and helps, if any does. objective()
    -> L and D, both twice differentiable. -> metrics"""
    L, D = objective()
    g = flatten(torch.autograd.grad(L, weights, retain_graph=True))
    kl_gradient = flatten(torch.autograd.grad(D, weights, create_graph=True))

    def fisher(v):                                          # F v: how kl_gradient changes along v
        change = torch.autograd.grad(kl_gradient @ v, weights, retain_graph=True)
        return flatten(change) + damping * v

    x = conjugate_gradients(fisher, g)
    s = (2 * max_kl / (x @ fisher(x)).clamp(min=1e-20)).sqrt() * x              # (n,)  eq. (4)
    start = flatten(weights).detach()
    for backtracks in range(11):
        end = start + 0.8 ** backtracks * s if backtracks < 10 else start
        for weight, part in zip(weights, end.split([weight.numel() for weight in weights])):
            weight.data.copy_(part.view_as(weight))
        with torch.no_grad():
            new_L, new_D = objective()
        if new_D <= max_kl and new_L > L:                                       # eq. (3)
            break
    return {"loss": -L.item(), "grad_norm": g.norm().item(), "policy_kl": new_D.item(),
            "trpo/backtracks": float(backtracks)}


def update(policy, optimizer, batch, A, cfg, step, penalty_coef):
    """One step of the policy, in the place of ppo.update. -> metrics"""
    num_tokens = batch.mask.sum()
    rows = torch.arange(len(A), device=A.device)
    parts = common.micro_batches(rows, batch.lengths, cfg.micro_batch_size)     # of like lengths

    def read(part):
        """log pi of all tokens of the vocabulary, for some rows. -> (b, T, V)"""
        T = int(batch.lengths[part].max())
        tokens = batch.tokens[part, :T]                                         # (b, T)
        hidden = ppo.completion_states(policy, batch.prompts[part], tokens)
        return F.log_softmax(F.linear(hidden, policy.embed.weight) / cfg.temperature, dim=-1)

    def objective():
        L = D = 0.0
        for part, old_log_p in zip(parts, old_log_ps):
            log_p = read(part)                                                  # (b, T, V)
            T = log_p.shape[1]
            mask = batch.mask[part, :T]
            logps = log_p.gather(-1, batch.tokens[part, :T, None])[..., 0]      # (b, T)
            log_rho = ppo.log_ratio(logps, batch.logps[part, :T], mask)
            gain = log_rho.exp() * A[part, :T]
            token_kl = (old_log_p.exp() * (old_log_p - log_p)).sum(dim=-1)      # (b, T)
            L = L + ppo.aggregate(gain, mask, "token_mean", num_tokens=num_tokens)      # eq. (1)
            D = D + ppo.aggregate(token_kl, mask, "token_mean", num_tokens=num_tokens)  # eq. (2)
        return L, D

    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):        # differentiable twice
        with torch.no_grad():
            old_log_ps = [read(part) for part in parts]
        return trust_region_step(list(policy.parameters()), objective, cfg.max_kl, cfg.damping)


def main(argv=None):
    return ppo.main(argv, Config, update)


if __name__ == "__main__":
    main()
