"""TRPO: trust region policy optimization (1502.05477), as another update of ppo.py.

The clip of PPO only stands for a constraint: the new policy should be near the old one. TRPO keeps
the constraint itself. Of all policies near the old one, it takes the one with the highest L, where
rho_t = pi / pi_old is the ratio, and A_t comes from the critic of ppo.py:

  L     = 1/N sum_t rho_t A_t                                                        (1)
  D     = 1/N sum_t KL(pi_old(. | q, o_<t) || pi(. | q, o_<t))                       (2)
  maximize L subject to D <= max_kl                                                  (3)

For a small step s of the weights, L changes by about g^T s, and D is about s^T F s / 2. Here g is
the gradient of L, and F is the Fisher matrix, the second derivative of D, with --damping added to
its diagonal. With these approximations, (3) has the solution

  s     = sqrt(2 max_kl / (x^T F x)) x,       F x = g                                (4)

F has one row per weight, so it is too large to store. But F v is the gradient of (grad D)^T v, and
conjugate gradients need only such products to solve for x. D is not exactly s^T F s / 2, so the
step is shortened to 0.8, 0.64 .. of its length until it keeps (3) and raises L. If none of ten
lengths does both, the weights do not change.

The policy takes one step per batch, with the graph of all rows in memory at once; --num_iterations
and --num_mini_batches apply to the critic.

Usage: python examples/trpo.py --task arithmetic     1 to 3 minutes on a CPU, once there is a base
"""
import dataclasses
import sys
from pathlib import Path

if not __package__:     # started as a file: the scripts are in the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # isort: split

import torch
import torch.nn.functional as F
from torch import nn

import plumbing
import ppo

# Shapes: as in ppo.py; n is the number of weights of the policy.
UNUSED = ("epsilon", "epsilon_high", "trust_region", "penalty_coef", "target_kl",
          "entropy_coef", "nll_coef", "learning_rate")


@dataclasses.dataclass(frozen=True)
class Config(ppo.Config):
    max_kl: float = common.flag(0.002, "size of the trust region in (3) (paper: 0.01)")
    damping: float = common.flag(0.1, "added to the diagonal of F")
    max_steps: int = common.flag(12, "maximal number of batches, 5 seconds each")

    def rules(self):
        yield from super().rules()
        yield self.max_kl > 0, f"--max_kl {self.max_kl}: must be above 0"
        for name in UNUSED:
            is_default = getattr(self, name) == getattr(ppo.Config, name)
            yield is_default, f"--{name}: TRPO does not use it"


def conjugate_gradients(product, b, iterations=10):
    """Solve M x = b for x. M is a positive definite matrix, and product(v) is M v. (n,) -> (n,)"""
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


def trust_region_step(weights, objective, max_kl=0.002, damping=0.1):
    """Move `weights` by (4), or by a shorter step that keeps (3) and raises L, or not at all.
    objective() returns L and D, both twice differentiable. -> metrics"""
    L, D = objective()
    g = flatten(torch.autograd.grad(L, weights, retain_graph=True))
    kl_gradient = flatten(torch.autograd.grad(D, weights, create_graph=True))

    def fisher(v):                                          # F v, the change of kl_gradient along v
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


def update(policy, batch, A, cfg):
    """Take one step of the policy. -> metrics"""
    num_tokens = batch.mask.sum()
    rows = torch.arange(len(A), device=A.device)
    parts = common.micro_batches(rows, batch.lengths, cfg.micro_batch_size)     # of similar lengths

    def log_probs(part):
        """Compute log pi of every token in the vocabulary, for the rows `part`. -> (b, T, V)"""
        T = int(batch.lengths[part].max())
        tokens = batch.tokens[part, :T]                                         # (b, T)
        hidden = ppo.completion_states(policy, batch.prompts[part], tokens)
        return F.log_softmax(F.linear(hidden, policy.embed.weight) / cfg.temperature, dim=-1)

    def objective():
        L = D = 0.0
        for part, old_log_p in zip(parts, old_log_ps):
            log_p = log_probs(part)                                             # (b, T, V)
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
            old_log_ps = [log_probs(part) for part in parts]
        return trust_region_step(list(policy.parameters()), objective, cfg.max_kl, cfg.damping)


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    task = common.load_task(cfg, ppo.verify)
    policy = ppo.GPT(cfg).to(cfg.device)
    with plumbing.Run(cfg, task, policy, ppo.COLUMNS, ppo.observers(cfg)) as run:
        reference = run.begin(ppo.sample_batch)
        critic = ppo.Critic(policy)
        optimizer = plumbing.AdamW(critic.parameters(), lr=cfg.critic_learning_rate)
        if not run.resumed:
            ppo.pretrain_critic(policy, critic, optimizer, reference, task, cfg)
        run.state = {"beta": cfg.beta} | run.state
        run.start(ppo.evaluate, policy=policy, critic=critic, optimizer=optimizer)
        for step in range(run.step, cfg.max_steps):
            beta = run.state["beta"]
            batch = ppo.sample_batch(policy, task, cfg, step)
            A, returns, batch.values, metrics = ppo.compute_advantages(
                critic, reference, task, batch, cfg, beta)
            metrics |= ppo.fit_critic(critic, optimizer, batch, returns, cfg, "shuffle", step)
            metrics |= update(policy, batch, A, cfg) | {"beta": beta}
            run.state["beta"] = ppo.adapt_coefficient(beta, metrics["kl"], cfg.kl_target)
            run.log(batch, A, metrics)
        return run.finish()


if __name__ == "__main__":
    main()
