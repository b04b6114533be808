"""A GPU as `pagedkv.ops.cuda` sees it: compiled kernels kept on disk, loaded and launched through CuPy.

CuPy is used for the driver's calls alone; memory and streams are torch's. This is the only module that
imports it. Machine code rather than PTX is kept: a driver may be older than the compiler, and could not read
its PTX.
"""

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pagedkv import _core
from pagedkv.config import kernel_cache_dir
from pagedkv.errors import BackendUnavailable
from pagedkv.ops import nvrtc
from pagedkv.ops.cuda_kernels import OPTIONS, Kernel

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
# The attention kernels are made for two blocks a multiprocessor.
BLOCKS_PER_MULTIPROCESSOR = 2
# What a block gets without asking.
DEFAULT_SHARED_BYTES = 48 << 10


class GpuKernel:
    """A kernel in the memory of a GPU."""

    def __init__(self, driver: Any, module: Any, name: str, max_shared_bytes: int) -> None:
        self._driver = driver
        self._module = module  # The driver unloads it with the last reference.
        self._function = module.get_function(name).ptr
        driver.funcSetAttribute(
            self._function, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, max_shared_bytes
        )

    def launch(self, grid: tuple[int, int], num_threads: int, shared_bytes: int, params: bytearray) -> None:
        """Starts a grid on torch's current stream. The driver copies the parameters before it returns."""
        buffer = (ctypes.c_char * len(params)).from_buffer(params)
        pointers = ctypes.c_void_p(ctypes.addressof(buffer))
        stream = torch.cuda.current_stream().cuda_stream
        self._driver.launchKernel(
            self._function, *grid, 1, num_threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointers), 0
        )


class Gpu:
    """torch's current GPU.

    Attributes:
        arch: what the kernels are compiled for, "sm_90" for instance.
        capacity: blocks of an attention kernel that run at once.
        sources: the sources that are compiled.
    """

    def __init__(self, cache_dir: Path | None = None) -> None:
        """Looks at the GPU; kernels are loaded when they are first needed, or by `prepare`.

        Args:
            cache_dir: Where machine code is kept; by default the user's directory for caches.

        Raises:
            BackendUnavailable: The GPU is too old, or CuPy cannot be imported.
        """
        try:
            from cupy.cuda.function import Module
            from cupy_backends.cuda.api import driver
        except ImportError as error:
            raise BackendUnavailable(
                f"CuPy loads the CUDA kernels, and cannot be imported ({error}); pip install pagedkv[cuda13] "
                "(or cuda12, as torch is)"
            ) from error
        capability = torch.cuda.get_device_capability()
        if capability < MIN_CAPABILITY:
            raise BackendUnavailable(
                f"the GPU has compute capability {capability[0]}.{capability[1]}, allowed: 8.0 and newer"
            )
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.arch = f"sm_{capability[0]}{capability[1]}"
        self.capacity = BLOCKS_PER_MULTIPROCESSOR * properties.multi_processor_count
        self.sources: Mapping[str, str] = _core.cuda_sources()
        self._max_shared_bytes = properties.shared_memory_per_block_optin
        self._cache = KernelCache(cache_dir or kernel_cache_dir(), self.sources, self.arch)
        self._driver, self._module_type = driver, Module
        self._loaded: dict[Kernel, GpuKernel] = {}

    def load(self, kernel: Kernel) -> GpuKernel:
        """Loads a kernel, unless it was loaded before; compiles it unless it is kept on disk."""
        loaded = self._loaded.get(kernel)
        if loaded is None:
            module = self._module_type()
            module.load(self._cache.cubin(kernel))
            loaded = GpuKernel(self._driver, module, kernel.name, self._max_shared_bytes)
            self._loaded[kernel] = loaded
        return loaded

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Loads kernels before the first step, which must not wait for a compiler."""
        wanted = list(kernels)
        self._cache.fill(wanted)
        for kernel in wanted:
            self.load(kernel)


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
