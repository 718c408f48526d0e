"""AMD's processors with AVX2 give the same bits: common.py decides how wide torch computes."""
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from small_runs import SMALL, arguments, leaves, policy_of

import common

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2"}                   # what a processor without AVX-512 has


def run_with(folder, **variables):
    """Run grpo.py in a process of its own with these variables. -> hashes of its policy"""
    usual = {name: value for name, value in os.environ.items() if name not in AVX2}
    flags = SMALL | {"base_steps": 20, "max_steps": 2, "output_dir": "run"}
    folder.mkdir()
    subprocess.run([sys.executable, f"{ROOT}/grpo.py", *arguments(flags)], cwd=folder, check=True,
                   env=usual | variables, stdout=subprocess.DEVNULL)
    return leaves(policy_of(folder / "run"))


PROCESSOR = common.CPU.read_text() if common.CPU.is_file() else ""


@pytest.mark.skipif("avx512f" not in PROCESSOR or "AuthenticAMD" not in PROCESSOR,
                    reason="needs an AMD processor with AVX-512")
def test_a_run_has_the_same_bits_with_and_without_avx512(tmp_path):
    usual = run_with(tmp_path / "usual")
    assert run_with(tmp_path / "without", **AVX2) == usual
    assert run_with(tmp_path / "with", ATEN_CPU_CAPABILITY="avx512") != usual


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
