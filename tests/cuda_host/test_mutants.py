"""The checks notice a bug in each kernel; `make mutants` tries many more."""

import subprocess
import sys

from host_device import HERE
from mutants import MUTANTS
from pagedkv.ops.cuda_kernels import all_kernels


def test_a_bug_in_each_kernel_is_noticed():
    result = subprocess.run(
        [sys.executable, str(HERE / "mutants.py"), "--quick"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


def test_there_is_one_for_each_kernel():
    files = {mutant.file for mutant in MUTANTS if mutant.quick}
    assert files == {f"{kernel.name}.cu" for kernel in all_kernels()}
