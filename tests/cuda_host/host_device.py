"""A device that executes the kernels' PTX on the CPU: compile, translate to C++, build, launch.

It stands where `pagedkv.ops.cuda_device` stands on a GPU. What was built is kept by the hash of all it was
built from, under target/.
"""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import ptx_to_cpp
from host_graph import HostGraph
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
    graphs: list[HostGraph]  # The one that is being captured, if any.

    def launch(self, grid: tuple[int, int], num_threads: int, shared_bytes: int, params: bytearray) -> None:
        """Runs a grid to its end, and adds it to a graph that is being captured. Raises LaunchError."""
        for graph in self.graphs:
            graph.record(partial(self._run, grid, num_threads, shared_bytes, bytearray(params)))
        self._run(grid, num_threads, shared_bytes, params)

    def _run(self, grid: tuple[int, int], num_threads: int, shared_bytes: int, params: bytearray) -> None:
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


@dataclass
class HostEvent:
    """The end of a copy, which is as late as it can be: nothing may be relied upon before the host waits.

    Attributes:
        source: what is copied, and must not change before.
        value: what it was.
        target: where it goes to only now, if that is the host.
    """

    source: Tensor
    value: Tensor
    target: Tensor | None = None
    num_waits: int = field(default=0)

    def wait(self) -> None:
        """See `pagedkv.ops.device.Event.wait`."""
        self.num_waits += 1
        if self.target is None:
            assert torch.equal(self.source, self.value), "pinned memory was written while it was being copied"
        else:
            with torch.inference_mode():
                self.target.copy_(self.value)


class HostDevice:
    """Builds kernels from PTX for one architecture, and holds those that were loaded.

    Attributes:
        capacity: thread blocks that run at once, as the planner is told.
        memory_bytes: free and all bytes, as if the CPU's memory were a GPU's.
        sanitize: whether kernels are built with the address sanitizer, which must have been loaded first.
    """

    sanitize = False
    torch_device = torch.device("cpu")

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
        self.memory_bytes = (1 << 30, 1 << 30)
        self.num_uploads = 0
        self.num_captures = 0
        self._num_active = 0
        self._graphs: list[HostGraph] = []
        self._shared: list[Tensor] = []
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
                graphs=self._graphs,
            )
        return self._loaded[kernel]

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Loads several kernels."""
        for kernel in kernels:
            self.load(kernel)

    @contextmanager
    def active(self) -> Iterator[None]:
        """See `pagedkv.ops.device.Device.active`. Copies and captures are refused elsewhere."""
        self._num_active += 1
        yield
        self._num_active -= 1

    def pinned(self, num_words: int) -> Tensor:
        """See `pagedkv.ops.device.Device.pinned`."""
        return torch.full((num_words,), -(1 << 30), dtype=torch.int32)

    def upload(self, source: Tensor, target: Tensor) -> HostEvent:
        """See `pagedkv.ops.device.Device.upload`. Target is another memory than the source, as on a GPU."""
        assert self._num_active, "another device may be the current one"
        assert source.data_ptr() != target.data_ptr()
        self.num_uploads += 1
        target.copy_(source)
        return HostEvent(source, source.clone())

    def download(self, source: Tensor) -> tuple[Tensor, HostEvent]:
        """See `pagedkv.ops.device.Device.download`."""
        assert self._num_active, "another device may be the current one"
        target = torch.full_like(source, -7)
        return target, HostEvent(source, source.clone(), target)

    def capture(self, work: Callable[[], None]) -> HostGraph:
        """See `pagedkv.ops.device.Device.capture`."""
        assert self._num_active, "another device may be the current one"
        self.num_captures += 1
        graph = HostGraph(self._shared)
        self._graphs.append(graph)
        try:
            with graph:
                work()
        finally:
            self._graphs.remove(graph)
        return graph

    def memory(self) -> tuple[int, int]:
        """See `pagedkv.ops.device.Device.memory`."""
        return self.memory_bytes

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See `pagedkv.ops.device.Device.peak_bytes`. The CPU does not tell."""
        work()
        return 0

    def probe(self) -> None:
        """See `pagedkv.ops.device.Device.probe`."""

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
