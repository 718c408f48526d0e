"""Move this checkout from the front of the import path to its end.

`python -m` searches the current folder first. Our folder kernels/ would then hide the package
`kernels`, which transformers imports if it is installed, and no model could be loaded. So an engine
imports this module before transformers.
"""
import sys
from pathlib import Path

from engines import HERE

sys.path[:] = [*(path for path in sys.path if Path(path).resolve() != HERE), str(HERE)]
