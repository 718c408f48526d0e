"""Code is easy to read where a line holds one thought: limits on how dense the text may be."""
import density
import pytest
from conftest import ROOT

LESSONS = density.Density(nodes=9.0, deep=0.03, tuples=0.04, columns=100)
OTHERS = density.Density(nodes=9.3, deep=0.04, tuples=0.05, columns=100)
LIMITS = dict.fromkeys(["*.py", "examples/*.py"], LESSONS) | dict.fromkeys(
    ["tasks/*.py", "tools/**/*.py", "lab/*.py", "kernels/*.py"], OTHERS)
FILES = {path.relative_to(ROOT).as_posix(): limit for pattern, limit in LIMITS.items()
         for path in sorted(ROOT.glob(pattern))}


@pytest.mark.parametrize("name", FILES)
def test_a_file_keeps_within_its_limits(name):
    found = density.measure((ROOT / name).read_text())
    for measure, value, limit in zip(found._fields, found, FILES[name]):
        assert value <= limit, measure
