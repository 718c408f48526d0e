"""common.py decides how wide torch computes, so that AMD's processors give the same bits."""
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import common

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2"}                   # what a processor without AVX-512 has


PROCESSOR = common.CPU.read_text() if common.CPU.is_file() else ""


LATE = "import torch; torch.randn(100).exp(); import os; os.environ['ATEN_CPU_CAPABILITY'] = 'avx2'"


@pytest.mark.parametrize("before, variables, expected", [
    ("", {}, "AVX2"), (LATE, {"ATEN_CPU_CAPABILITY": "default"}, "DEFAULT")])
def test_avx512_is_not_used_unless_the_user_chooses_and_a_base_belongs_to_what_torch_uses(
        before, variables, expected):
    """torch reads the variable once, when it computes for the first time."""
    if not variables and "avx512f" not in PROCESSOR:
        pytest.skip("needs a processor with AVX-512")
    usual = {name: value for name, value in os.environ.items() if name not in AVX2}
    program = f"{before}\nimport common; print(*common.ARITHMETIC[1:])"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, text=True,
                           env=usual | variables, capture_output=True).stdout
    assert shown.split() == [expected]
    assert (torch.__version__, torch.backends.cpu.get_cpu_capability()) == common.ARITHMETIC
