"""What the compiler makes of every kernel, and the registers that each may use: limits.txt.

`python tests/cuda_host/limits.py` writes the file anew; the difference belongs into the commit that made it.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from host_device import HERE, checkout_sources
from pagedkv.ops import nvrtc
from pagedkv.ops.cuda_kernels import Kernel, all_kernels

ARCHS = ("sm_80", "sm_90", "sm_100")
PATH = HERE / "limits.txt"
HEADER = "# Registers a thread, as NVRTC {}.{} assigns them: kernel " + " ".join(ARCHS)
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel."""

    registers: int
    stack_bytes: int
    spill_bytes: int


def usage(log: str) -> Usage:
    """Reads the assembler's report, which the option --ptxas-options=-v asks for."""
    stack, stores, loads = map(int, _FRAME.search(log).groups())
    return Usage(int(re.search(r"Used (\d+) registers", log)[1]), stack, stores + loads)


def compile_all() -> dict[tuple[Kernel, str], nvrtc.Compiled]:
    """Compiles every kernel for every architecture; the compiler runs in two threads."""
    compiler, sources = nvrtc.load(), checkout_sources()
    variants = [(kernel, arch) for kernel in all_kernels() for arch in ARCHS if kernel.runs_on(arch)]
    with ThreadPoolExecutor(max_workers=2) as threads:
        results = threads.map(lambda variant: variant[0].compile(compiler, sources, variant[1]), variants)
        return dict(zip(variants, results, strict=True))


def read() -> tuple[tuple[int, int], dict[tuple[str, str], int]]:
    """The compiler's version, and registers by kernel and architecture."""
    header, *lines = PATH.read_text().splitlines()
    version = re.search(r"NVRTC (\d+)\.(\d+)", header)
    limits = {}
    for line in lines:
        name, *registers = line.split()
        counts = zip(ARCHS, registers, strict=True)
        limits |= {(name, arch): int(count) for arch, count in counts if count != "-"}
    return (int(version[1]), int(version[2])), limits


def write() -> None:
    """Writes what the kernels use now."""
    compiled = compile_all()
    lines = [HEADER.format(*nvrtc.load().version)]
    for kernel in all_kernels():
        results = [compiled.get((kernel, arch)) for arch in ARCHS]
        counts = [str(usage(result.log).registers) if result else "-" for result in results]
        lines.append(f"{kernel} {' '.join(counts)}")
    PATH.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
