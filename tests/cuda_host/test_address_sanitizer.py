"""No kernel touches memory that is not its own, and the sanitizer would tell."""

import os
import subprocess
import sys

from host_device import HERE


def run(*arguments):
    library = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    # Python leaks on purpose, and fibers are stacks that the sanitizer does not know.
    options = "detect_leaks=0:detect_stack_use_after_return=0:verify_asan_link_order=0"
    return subprocess.run(
        [sys.executable, str(HERE / "address_sanitizer.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": options},
    )


def test_every_kernel_keeps_to_its_memory():
    result = run()
    assert result.returncode == 0, result.stderr[-3000:]
    assert "no error was found" in result.stdout


def test_an_access_beyond_is_reported_with_its_line():
    result = run("--beyond")
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
    assert "copy_blocks" in result.stderr
