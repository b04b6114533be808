"""A GPU as `pagedkv.ops.device` describes one: kernels are kept on disk and launched through CuPy.

CuPy is used for the driver's calls alone; memory, streams and graphs are torch's. Only this module imports
it. Machine code rather than PTX is kept: a driver may be older than the compiler, and could not read its PTX.
"""

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pagedkv import _core
from pagedkv.config import kernel_cache_dir
from pagedkv.errors import BackendUnavailable
from pagedkv.ops import CUPY_INSTALL, nvrtc
from pagedkv.ops.cuda_kernels import OPTIONS, Kernel

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
# The attention kernels are made for two blocks a multiprocessor.
BLOCKS_PER_MULTIPROCESSOR = 2


class GpuKernel:
    """A kernel in the memory of a GPU."""

    def __init__(
        self, driver: Any, module: Any, name: str, max_shared_bytes: int, device: torch.device
    ) -> None:
        self._driver = driver
        self._device = device
        self._module = module  # The driver unloads it with the last reference.
        self._function = module.get_function(name).ptr
        driver.funcSetAttribute(
            self._function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, max_shared_bytes
        )

    def launch(self, grid: tuple[int, int], num_threads: int, shared_bytes: int, params: bytearray) -> None:
        """Starts a grid on torch's current stream. The driver copies the parameters before it returns."""
        buffer = (ctypes.c_char * len(params)).from_buffer(params)
        pointers = ctypes.c_void_p(ctypes.addressof(buffer))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._driver.launchKernel(
            self._function, *grid, 1, num_threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointers), 0
        )


class Gpu:
    """One GPU, by torch's number of it.

    Attributes:
        torch_device: the GPU as torch names it.
        arch: what the kernels are compiled for, "sm_90" for instance.
        capacity: blocks of an attention kernel that run at once.
        sources: the sources that are compiled.
    """

    def __init__(self, device: torch.device, cache_dir: Path | None = None) -> None:
        """Looks at a GPU; kernels are loaded when they are first needed, or by `prepare`.

        Args:
            device: Which one, with its number.
            cache_dir: Where machine code is kept; by default the user's directory for caches.

        Raises:
            BackendUnavailable: There is no such GPU, it is too old, or CuPy cannot be imported.
        """
        try:
            from cupy.cuda.function import Module
            from cupy_backends.cuda.api import driver
        except ImportError as error:
            raise BackendUnavailable(
                f"CuPy loads the CUDA kernels, and cannot be imported ({error}); {CUPY_INSTALL}"
            ) from error
        num_devices = torch.cuda.device_count()
        if device.index >= num_devices:
            raise BackendUnavailable(f"device is {device}, allowed: cuda:0 to cuda:{num_devices - 1}")
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            raise BackendUnavailable(
                f"the GPU has compute capability {capability[0]}.{capability[1]}, allowed: 8.0 and newer"
            )
        properties = torch.cuda.get_device_properties(device)
        self.torch_device = device
        self.arch = f"sm_{capability[0]}{capability[1]}"
        self.capacity = BLOCKS_PER_MULTIPROCESSOR * properties.multi_processor_count
        self.sources: Mapping[str, str] = _core.cuda_sources()
        self._max_shared_bytes = properties.shared_memory_per_block_optin
        self._cache = KernelCache(cache_dir or kernel_cache_dir(), self.sources, self.arch)
        self._driver, self._module_type = driver, Module
        self._loaded: dict[Kernel, GpuKernel] = {}
        self._graph_memory: Any = None

    def load(self, kernel: Kernel) -> GpuKernel:
        """Loads a kernel, unless it was loaded before; compiles it unless it is kept on disk."""
        loaded = self._loaded.get(kernel)
        if loaded is None:
            module = self._module_type()
            module.load(self._cache.cubin(kernel))
            loaded = GpuKernel(self._driver, module, kernel.name, self._max_shared_bytes, self.torch_device)
            self._loaded[kernel] = loaded
        return loaded

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Loads kernels before the first step, which must not wait for a compiler."""
        wanted = list(kernels)
        self._cache.fill(wanted)
        for kernel in wanted:
            self.load(kernel)

    def active(self) -> torch.cuda.device:
        """See `pagedkv.ops.device.Device.active`. Each thread has a current device of its own."""
        return torch.cuda.device(self.torch_device)

    def pinned(self, num_words: int) -> Tensor:
        """See `pagedkv.ops.device.Device.pinned`."""
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)

    def upload(self, source: Tensor, target: Tensor) -> "CopyEvent":
        """See `pagedkv.ops.device.Device.upload`."""
        target.copy_(source, non_blocking=True)
        return CopyEvent()

    def download(self, source: Tensor) -> tuple[Tensor, "CopyEvent"]:
        """See `pagedkv.ops.device.Device.download`."""
        # torch keeps pinned memory that was given back, and reuses it once the copies to it are done.
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        target.copy_(source, non_blocking=True)
        return target, CopyEvent()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """See `pagedkv.ops.device.Device.capture`."""
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile, which only a capture that looks at its own thread allows.
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            work()
        return graph

    def memory(self) -> tuple[int, int]:
        """See `pagedkv.ops.device.Device.memory`."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See `pagedkv.ops.device.Device.peak_bytes`."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_reserved(self.torch_device)
        work()
        torch.cuda.synchronize(self.torch_device)
        # What is reserved includes the gaps between tensors, for which there must be room too.
        return torch.cuda.max_memory_reserved(self.torch_device) - before

    def probe(self) -> None:
        """See `pagedkv.ops.device.Device.probe`. A GPU that met an illegal access computes no more."""
        torch.ones(8, device=self.torch_device).sum().item()


class CopyEvent:
    """The end of what the current stream was given so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        """See `pagedkv.ops.device.Event.wait`."""
        self._event.synchronize()


class KernelCache:
    """Machine code of kernels in a directory, found by all that it depends on."""

    def __init__(self, directory: Path, sources: Mapping[str, str], arch: str) -> None:
        self._directory = directory
        self._sources = sources
        self._arch = arch

    def path(self, kernel: Kernel) -> Path:
        """Where the machine code of a kernel is, or would be."""
        key = (sorted(self._sources.items()), self._arch, OPTIONS, kernel.options, nvrtc.load().version)
        digest = hashlib.sha256(repr(key).encode()).hexdigest()
        return self._directory / f"{kernel.name}-{self._arch}-{digest[:24]}.cubin"

    def cubin(self, kernel: Kernel) -> bytes:
        """The machine code, compiled and kept if it was not there."""
        path = self.path(kernel)
        try:
            return path.read_bytes()
        except OSError:  # It is not there, or the directory cannot be read: see below.
            cubin = kernel.compile(nvrtc.load(), self._sources, self._arch).cubin
        try:
            self._write(path, cubin)
        except OSError as error:
            logger.warning("the compiled kernel %s cannot be kept in %s: %s", kernel, path.parent, error)
        return cubin

    def fill(self, kernels: Iterable[Kernel]) -> None:
        """Compiles those that are not there, side by side, and shows how far it is."""
        missing = [kernel for kernel in kernels if not self.path(kernel).exists()]
        if not missing:
            return
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
            compiled = threads.map(self.cubin, missing)
            for _ in tqdm(compiled, total=len(missing), desc="compiling CUDA kernels", unit="kernel"):
                pass

    def _write(self, path: Path, cubin: bytes) -> None:
        """Another process may write or read the same file at this time: it appears whole, or not at all."""
        self._directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._directory, prefix=path.stem)
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        Path(name).replace(path)
