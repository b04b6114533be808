"""NVRTC, the CUDA compiler as a library: source text in, machine code for one architecture out.

It needs neither a GPU nor a driver, so the tests compile every kernel where there is none. torch's wheels for
CUDA bring the library along (the package nvidia-cuda-nvrtc); `pagedkv.ops.cuda_kernels` calls it.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedkv.errors import BackendUnavailable

# Where the wheels of CUDA 13 and 12 keep it, below the namespace package "nvidia".
_FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")
# Names that the loader finds where a CUDA toolkit is installed.
_SYSTEM_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


class CompileError(Exception):
    """The compiler refused a source; the message is its log."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a source for one architecture."""

    cubin: bytes
    ptx: str
    log: str  # registers, stack and spills of every kernel, if the option --ptxas-options=-v was given


class Nvrtc:
    """The loaded library. Its calls release the GIL, and may be made by several threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def compile(self, name: str, sources: Mapping[str, str], arch: str, options: Sequence[str]) -> Compiled:
        """Compiles one file.

        Args:
            name: Which of the sources; the others are headers that it may include.
            sources: Text by file name.
            arch: "sm_90", for instance.
            options: More options of NVRTC.

        Raises:
            CompileError: With the compiler's log.
        """
        headers = {other: text for other, text in sources.items() if other.endswith(".cuh")}
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program),
                sources[name].encode(),
                name.encode(),
                len(headers),
                _strings(headers.values()),
                _strings(headers),
            )
        )
        try:
            options = [f"--gpu-architecture={arch}", *options]
            status = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != 0:
                raise CompileError(f"{name} for {arch}: {self._error(status)}\n{log}")
            ptx = self._text(program, "PTX").rstrip(b"\0").decode()
            return Compiled(self._text(program, "CUBIN"), ptx, log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(self._library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(self._library[f"nvrtcGet{what}"](program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status != 0:
            raise CompileError(f"NVRTC failed: {self._error(status)}")

    def _error(self, status: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(status)
        return text.decode()


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


@functools.cache
def load() -> Nvrtc:
    """Finds and loads the library: of torch's wheels, else of an installed toolkit.

    Raises:
        BackendUnavailable: There is none.
    """
    for folder in _wheel_folders():
        for path in sorted(folder.glob("libnvrtc.so.*")):
            # The library opens its built-in functions by name only, so they must have been loaded before.
            for builtins in folder.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return Nvrtc(ctypes.CDLL(str(path)))
    for name in _SYSTEM_NAMES:
        try:
            return Nvrtc(ctypes.CDLL(name))
        except OSError:
            continue
    raise BackendUnavailable(
        "the CUDA kernels are compiled by NVRTC, and no libnvrtc was found; pip install nvidia-cuda-nvrtc"
    )


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return [folder for place in places for name in _FOLDERS if (folder := Path(place) / name).is_dir()]
