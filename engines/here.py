"""Try a loss in a minute, before you take it to another trainer: GRPO on a task of this project.

  python -m engines.here --loss "mine.py:my_loss slope=0.1" --task arithmetic

This is grpo.py with another loss: any that `engines.load` reads, with its average. All flags of
grpo.py work, except those that belong to its own loss. The update is that of examples/zoo.py.
"""
import dataclasses
import sys
from pathlib import Path

if not __package__:     # started as a file, as in the command that continues a run
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # isort: split

import engines
import grpo
import plumbing
from engines import record
from examples import zoo


@dataclasses.dataclass(frozen=True)
class Config(grpo.Config):
    loss: str = common.flag("grpo:policy_loss", "loss with its settings, as engines.load reads it")

    def rules(self):
        yield from super().rules()
        for name in ("loss_type", "epsilon", "epsilon_high", "delta"):
            yield getattr(self, name) == getattr(grpo.Config, name), (
                f"--{name}: belongs to grpo.py's own loss; write it into --loss")


def main(argv=None):
    cfg = plumbing.parse_flags(Config, argv)
    try:
        loss, how = engines.load(cfg.loss)
        ran, files = record.of_run(cfg.loss, loss, how)
        if cfg.resume_from_checkpoint:
            record.refuse_other(cfg.resume_from_checkpoint, ran)
    except ValueError as error:
        common.fail(f"--loss {cfg.loss}: {error}")
    print(record.line(ran))
    task = common.load_task(cfg, grpo.verify)
    policy = grpo.GPT(cfg).to(cfg.device)
    with plumbing.Run(cfg, task, policy, grpo.COLUMNS, grpo.observers(cfg)) as run:
        reference = run.begin(grpo.sample_batch)
        record.write(run.folder, ran, files)
        optimizer = plumbing.AdamW(policy.parameters(), lr=cfg.learning_rate)

        run.start(grpo.evaluate, policy=policy, optimizer=optimizer)
        for step in range(run.step, cfg.max_steps):
            batch = grpo.sample_with_signal(policy, task, cfg, step)
            A = grpo.advantages(batch.rewards, cfg.scale_rewards).to(cfg.device)    # (P, G)
            A = A.view(-1, 1).expand_as(batch.mask)                                 # (B, T)
            ref_logps, mean_kl = grpo.score_reference(reference, batch, cfg)
            metrics = zoo.update(policy, ref_logps, optimizer, batch, A, cfg, step, loss, how)
            del metrics["clip_ratio/region_mean"]           # of grpo.py's own loss
            run.log(batch, A, metrics | {"kl": mean_kl})
        return run.finish()


if __name__ == "__main__":
    main()
