"""Try a loss in a minute, before you take it to another trainer: GRPO on a task of this project.

  python -m engines.here --loss "mine.py:my_loss slope=0.1" --task arithmetic

This is grpo.py with another loss: any that `engines.load` reads, with its average. All flags of
grpo.py work, except those that belong to its own loss.
"""
import dataclasses

import common  # isort: split

import torch
from torch import nn

import engines
import grpo
import plumbing


@dataclasses.dataclass(frozen=True)
class Config(grpo.Config):
    loss: str = common.flag("grpo:policy_loss", "loss with its settings, as engines.load reads it")

    def rules(self):
        yield from super().rules()
        for name in ("loss_type", "epsilon", "epsilon_high", "delta"):
            is_default = getattr(self, name) == grpo.Config.__dataclass_fields__[name].default
            yield is_default, f"--{name}: belongs to grpo.py's own loss; write it into --loss"


def backward(policy, batch, ref_logps, A, rows, cfg, loss, how):
    """Accumulate the gradient of (5) of grpo.py over `rows`, in micro-batches, with `loss` for L_t
    and `how` for its average. -> metrics"""
    if cfg.mask_truncated_completions:
        rows = rows[~batch.is_truncated[rows]]
    num_sequences = len(rows)                           # in the whole optimizer step
    num_tokens = batch.mask[rows].sum().clamp(min=1)
    if cfg.beta == 0 and cfg.entropy_coef == 0:
        rows = rows[A[rows].any(dim=1)]                 # other rows have no gradient
    loss_sum = max_log_ratio = 0.0
    for part in common.micro_batches(rows, batch.lengths, cfg.micro_batch_size):
        T = int(batch.lengths[part].max())
        mask = batch.mask[part, :T]                                                 # (b, T)
        old_logps = batch.logps[part, :T]
        logps, entropy = grpo.score(policy, batch.prompts[part], batch.tokens[part, :T],
                                    cfg.temperature, cfg.kernel)
        log_rho = grpo.log_ratio(logps, old_logps, mask)
        token_loss = loss(logps, old_logps, A[part, :T], mask)
        if cfg.beta > 0:
            token_kl = grpo.kl(logps * mask, ref_logps[part, :T] * mask, cfg.kl_estimator, log_rho)
            token_loss = token_loss + cfg.beta * token_kl
        token_loss = token_loss - cfg.entropy_coef * entropy
        mean_loss = grpo.aggregate(
            token_loss, mask, how, num_sequences, num_tokens, cfg.max_completion_length)
        mean_loss.backward()
        loss_sum += mean_loss.item()
        max_log_ratio = max(max_log_ratio, log_rho.detach().abs().max().item())
    return {"loss": loss_sum, "max_log_ratio": max_log_ratio}


def update(policy, ref_logps, optimizer, batch, A, cfg, step, loss, how):
    """Pass over the batch num_iterations times, in num_mini_batches steps each. -> metrics"""
    history = []
    for rows in common.mini_batches(batch, cfg, "shuffle", step):
        optimizer.zero_grad(set_to_none=False)          # zeros: Adam also steps without signal
        metrics = backward(policy, batch, ref_logps, A, rows, cfg, loss, how)
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm or torch.inf)
        optimizer.step()
        history.append(metrics | {"grad_norm": grad_norm.item()})
    return common.mean_metrics(history) | {
        "sampling/sampling_logp_difference/max": history[0]["max_log_ratio"]}


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    try:
        loss, how = engines.load(cfg.loss)
    except ValueError as error:
        common.fail(f"--loss {error}")
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg).to(cfg.device)
    with plumbing.Run(cfg, task, policy, grpo.COLUMNS, grpo.score, grpo.sample_batch) as run:
        reference = run.begin()
        optimizer = plumbing.AdamW(policy.parameters(), lr=cfg.learning_rate)

        run.start(grpo.evaluate, policy=policy, optimizer=optimizer)
        for step in range(run.step, cfg.max_steps):
            batch = grpo.sample_with_signal(policy, task, cfg, step)
            A = grpo.advantages(batch.rewards, cfg.scale_rewards).to(cfg.device)    # (P, G)
            A = A.view(-1, 1).expand_as(batch.mask)                                 # (B, T)
            ref_logps, mean_kl = grpo.score_reference(reference, batch, cfg)
            metrics = update(policy, ref_logps, optimizer, batch, A, cfg, step, loss, how)
            run.log(batch, A, metrics | {"kl": mean_kl})
        return run.finish()


if __name__ == "__main__":
    main()
