"""A device that executes the kernels' PTX on the CPU: compile, translate to C++, build, launch.

It stands where `pagedkv.ops.cuda_device` stands on a GPU. What was built is kept by the hash of all it was
built from, under target/.
"""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ptx_to_cpp
from pagedkv.ops import nvrtc
from pagedkv.ops.cuda_kernels import Kernel, ParamLayout

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "target" / "cuda_host"
# What a block may ask for; below 48 KiB without asking.
MAX_SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
CXX_FLAGS = ("-std=c++17", "-march=native", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", f"-I{HERE}")
SANITIZE = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g1")
FIELDS = (
    "mma",
    "ldmatrix",
    "bank_conflicts",
    "async_bytes",
    "load_bytes",
    "store_bytes",
    "shuffles",
    "barriers",
)


def checkout_sources() -> dict[str, str]:
    """The kernels as they are in this checkout."""
    return {path.name: path.read_text() for path in sorted((ROOT / "cuda").glob("*.cu*"))}


class LaunchError(Exception):
    """The machine found something that a GPU would leave undefined."""


@dataclass(frozen=True)
class HostKernel:
    """A kernel that can be launched. Its counters are summed over all launches."""

    function: ctypes._CFuncPtr
    launch_grid: ctypes._CFuncPtr
    num_param_bytes: int
    max_shared_bytes: int
    counters: dict[str, int]
    seed: int

    def launch(self, grid: tuple[int, int], num_threads: int, shared_bytes: int, params: bytearray) -> None:
        """Runs a grid to its end. Raises LaunchError."""
        assert len(params) == self.num_param_bytes, (
            "the packed parameters have another size than the kernel's"
        )
        assert all(size > 0 for size in grid), "a grid without blocks"
        assert grid[1] <= 65535, "too many blocks along y"
        assert 0 < num_threads <= 1024, "more threads than a block may have"
        assert shared_bytes <= self.max_shared_bytes, "more shared memory than a block may have"
        counters = (ctypes.c_uint64 * len(FIELDS))()
        error = ctypes.create_string_buffer(512)
        failed = self.launch_grid(
            self.function,
            (ctypes.c_ubyte * len(params)).from_buffer_copy(params),
            (ctypes.c_uint32 * 3)(*grid, 1),
            ctypes.c_uint32(num_threads),
            ctypes.c_uint32(shared_bytes),
            ctypes.c_uint32(self.seed),
            counters,
            error,
        )
        for name, value in zip(FIELDS, counters, strict=True):
            self.counters[name] = self.counters.get(name, 0) + value
        if failed:
            raise LaunchError(error.value.decode())


class HostDevice:
    """Builds kernels from PTX for one architecture, and holds those that were loaded.

    Attributes:
        capacity: thread blocks that run at once, as the planner is told.
        sanitize: whether kernels are built with the address sanitizer, which must have been loaded first.
    """

    sanitize = False

    def __init__(
        self,
        arch: str = "sm_90",
        *,
        sources: Mapping[str, str] | None = None,
        seed: int = 0,
        capacity: int = 16,
    ) -> None:
        self.arch = arch
        self.sources = dict(sources if sources is not None else checkout_sources())
        self.seed = seed
        self.capacity = capacity
        self._flags = (*CXX_FLAGS, *(SANITIZE if self.sanitize else ()))
        self._loaded: dict[Kernel, HostKernel] = {}

    def load(self, kernel: Kernel) -> HostKernel:
        """Compiles and builds a kernel, unless it was loaded before."""
        if kernel not in self._loaded:
            library = ctypes.CDLL(str(self._build(kernel)))
            self._loaded[kernel] = HostKernel(
                function=library[kernel.name],
                launch_grid=library["launch_grid"],
                num_param_bytes=ParamLayout(kernel.name, self.sources).num_bytes,
                max_shared_bytes=MAX_SHARED_BYTES[self.arch],
                counters={},
                seed=self.seed,
            )
        return self._loaded[kernel]

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Loads several kernels."""
        for kernel in kernels:
            self.load(kernel)

    def counters(self, name: str) -> dict[str, int]:
        """The counters of all variants of a kernel, summed."""
        loaded = [host for kernel, host in self._loaded.items() if kernel.name == name]
        return {field: sum(host.counters.get(field, 0) for host in loaded) for field in FIELDS}

    def _build(self, kernel: Kernel) -> Path:
        key = repr((self.sources, self.arch, kernel, nvrtc.load().version, self._tools()))
        target = BUILD / f"{kernel.name}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
        if not target.exists():
            compiled = kernel.compile(nvrtc.load(), self.sources, self.arch, line_info=True)
            source = target.with_suffix(".cc")
            BUILD.mkdir(parents=True, exist_ok=True)
            source.write_text(ptx_to_cpp.translate(compiled.ptx))
            machine = [str(self._machine(name)) for name in ("machine.cc", "instructions.cc")]
            self._cxx("-O1", "-w", "-shared", str(source), *machine, output=target)
        return target

    def _machine(self, name: str) -> Path:
        digest = hashlib.sha256(self._tools().encode()).hexdigest()[:20]
        target = BUILD / f"{Path(name).stem}-{digest}.o"
        if not target.exists():
            BUILD.mkdir(parents=True, exist_ok=True)
            self._cxx("-O2", "-Wall", "-Wextra", "-Werror", "-c", str(HERE / name), output=target)
        return target

    def _tools(self) -> str:
        names = ("fibers.h", "instructions.cc", "machine.cc", "machine.h")
        names += ("ptx_instructions.py", "ptx_to_cpp.py")
        return repr((self._flags, [(HERE / name).read_text() for name in names]))

    def _cxx(self, *arguments: str, output: Path) -> None:
        # Two runs at once must not see half a file.
        partial = output.with_suffix(f".{os.getpid()}.part")
        command = ["g++", *self._flags, *arguments, "-o", str(partial)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr[:4000]}"
        partial.replace(output)
