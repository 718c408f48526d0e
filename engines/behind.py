"""Move this checkout from the front of the import path to its end.

`python -m` searches the current folder first. Our folder kernels/ would then hide the package
`kernels`, which transformers imports if it is installed, and no model could be loaded. So an engine
imports this module before anything else. Then a package of the environment wins against a file of
ours, which only matters if both have the name of a module that an engine needs: that ends the
program with one line.
"""
import importlib.util
import sys
from pathlib import Path

from engines import HERE

sys.path[:] = [*(path for path in sys.path if Path(path).resolve() != HERE), str(HERE)]
for name in ("common", "plumbing", "reinforce", "ppo", "grpo", "gspo", "dpo", "real", "tasks",
             "report", "vectors"):
    spec = importlib.util.find_spec(name)
    [folder, *_] = spec.submodule_search_locations or [Path(spec.origin).parent]
    if not Path(folder).resolve().is_relative_to(HERE):
        raise SystemExit(f"error: {folder}: has our module's name, {name}; uninstall the package "
                         "that it belongs to, or use an environment without it")
