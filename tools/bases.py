"""Where a run begins: at the trained policy of another (--init_from), or at a base, which runs share, so that
only the first makes it: runs/base/TASK-sSEED-HASH.pt."""
import dataclasses
import inspect
import zlib
from pathlib import Path

import torch

import common


def path(cfg, code):
    """Where a base is kept: its name has a hash of all that shapes it, the sources of `code` (functions,
    classes, tuples of constants) and of its problems included."""
    tasks = map(common.load_task, cfg.task.split(","))
    code = (*code, *tasks, common.sample_problems, common.sample_corpus, common.generator)
    sources = [x if isinstance(x, tuple) else inspect.getsource(x) for x in code]
    flags = [getattr(cfg, f.name) for f in dataclasses.fields(common.Config)
             if f.metadata["group"] == common.GROUPS[-1]]
    key = repr((cfg.options, cfg.device, cfg.num_threads, torch.__version__, flags, sources))
    return Path(f"runs/base/{cfg.task}-s{cfg.base_seed}-{zlib.crc32(key.encode()):08x}.pt")


def begin(run, train, code):
    """Give the run's model its first weights, of which those of --init_from are there already. `train` is a
    script's warm_start; `code` as in `path`."""
    cfg, model = run.cfg, run.model
    if not cfg.init_from:
        cached(model, cfg, code, lambda: train(model, cfg, common.tools.progress))
    elif cfg.cold_start:
        textbook = dataclasses.replace(cfg, base_steps=cfg.cold_start, textbook=1.0)
        train(model, textbook, common.tools.progress)


def cached(model, cfg, code, make):
    """Give `model` the weights that are kept for it, or those that make() gives it, and keep these."""
    kept, fresh = path(cfg, code), {name: weight.clone() for name, weight in model.state_dict().items()}
    try:
        model.load_state_dict(common.load(kept, cfg.device))
        print(f"base: {kept}", flush=True)
    except Exception:                                   # none there, or damaged and perhaps half loaded
        model.load_state_dict(fresh)
        make()
        kept.parent.mkdir(parents=True, exist_ok=True)
        common.write(kept, model.state_dict())
