"""The CUDA kernels as the host sees them: sources, variants, parameter structs, shapes of thread blocks.

A kernel is one file of `cuda/`, compiled with definitions that fix its types and sizes; the function has the
name of the file and takes one packed struct. `pagedkv.ops.cuda` launches them; the tests compile and execute
all of them without a GPU.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pagedkv.ops.nvrtc import Compiled, Nvrtc

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
# Bulk copies and the barriers that count their bytes came with this architecture.
MIN_BULK_ARCH = 90
# Head sizes with a bulk copy kernel: whole groups of eight chunks.
BULK_HEAD_DIMS = (64, 128, 256)
# The definition of a swizzled cache; without it a cache is plain.
SWIZZLED: Mapping[bool, tuple[tuple[str, int], ...]] = {False: (), True: (("PKV_SWIZZLED", 1),)}
# Kernels of attention, by the bytes of a cached element.
ATTENTION_KERNELS = (("attention", 2), ("attention_fp8", 1))
ROW_KERNELS = ("merge_parts", "add_rms_norm", "silu_mul")
# Names of element types in the sources.
ELEMENTS = ("bf16", "half")
OPTIONS = ("--std=c++17", "--fmad=true", "--ptxas-options=-v")

# A member's type in a struct of parameters, as struct.pack names it; pointers are P's 8 bytes.
_FORMATS = {"int": "i", "float": "f", "int64_t": "q"}
_STRUCT = re.compile(r"^struct (\w+Params) \{\n(.*?)^\};", re.M | re.S)
_MEMBER = re.compile(r"^\s*(?:const )?(\w+)(\*?) (\w+);", re.M)


@dataclass(frozen=True)
class Kernel:
    """One variant of a kernel: a file and the definitions that it is compiled with."""

    name: str  # of the function, and of the file without ".cu"
    defines: tuple[tuple[str, str | int], ...] = ()

    def compile(
        self, compiler: Nvrtc, sources: Mapping[str, str], arch: str, *, line_info: bool = False
    ) -> Compiled:
        """Compiles it, with the lines of the source for a debugger or profiler if wanted.

        Raises `pagedkv.ops.nvrtc.CompileError`.
        """
        options = [*OPTIONS, *self.options, *(["--generate-line-info"] if line_info else [])]
        return compiler.compile(f"{self.name}.cu", sources, arch, options)

    def runs_on(self, arch: str) -> bool:
        """Whether an architecture, "sm_80" for instance, has the instructions that it uses."""
        return self.name != "attention_bulk" or int(arch.removeprefix("sm_")) >= MIN_BULK_ARCH

    @property
    def options(self) -> list[str]:
        """The definitions as options of the compiler."""
        return [f"-D{name}={value}" for name, value in self.defines]

    def __str__(self) -> str:
        """The name with the values of the definitions, as tables show it."""
        return f"{self.name}<{','.join(str(value) for _, value in self.defines)}>"


class ParamLayout:
    """The packed struct of parameters of a kernel, read from the source that declares it.

    So there is one declaration. The sources order members by size, 8 bytes before 4, and have no gaps.
    """

    def __init__(self, name: str, sources: Mapping[str, str]) -> None:
        """Reads the struct of kernel `name`; it may be declared in a header that the file includes."""
        text = _with_headers(f"{name}.cu", sources)
        declared = _STRUCT.search(text)
        assert declared, f"{name}.cu declares no struct of parameters"
        members = _MEMBER.findall(declared[2])
        self.names = tuple(member for _, _, member in members)
        self._packed = struct.Struct(
            "="
            + "".join("P" if pointer else _FORMATS[kind] for kind, pointer, _ in members).replace("P", "Q")
        )
        # The compiler rounds up to the alignment of the largest member.
        self.num_bytes = -(-self._packed.size // 8) * 8

    def pack(self, **values: int | float) -> bytearray:
        """The struct with these members, all of which must be given."""
        buffer = bytearray(self.num_bytes)
        self._packed.pack_into(buffer, 0, *(values.pop(name) for name in self.names))
        assert not values, f"no such parameters: {', '.join(values)}"
        return buffer


def _with_headers(name: str, sources: Mapping[str, str]) -> str:
    text = sources[name]
    return text + "".join(
        _with_headers(header, sources) for header in re.findall(r'^#include "(.*)"', text, re.M)
    )


@dataclass(frozen=True)
class AttentionShape:
    """The shape of a thread block of an attention kernel, see `cuda/attention.cuh`."""

    row_warps: int
    kv_warps: int
    tile: int
    stages: int

    @property
    def rows(self) -> int:
        """Query rows of a work item, at most."""
        return 16 * self.row_warps

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * self.row_warps * self.kv_warps

    def shared_bytes(self, head_dim: int, stored_bytes: int) -> int:
        """Shared memory of a block: the ring of tiles and the query, or later the results of all warps."""
        stored_row = (head_dim * stored_bytes // 16 | 1) * 16
        ring = 2 * self.stages * self.tile * stored_row
        query = self.rows * (head_dim + 8) * 2
        results = self.rows * self.kv_warps * (head_dim + 8 + 2) * 4
        return max(ring + query, results)

    def bulk_shared_bytes(self, head_dim: int) -> int:
        """The same for `attention_bulk`, which has rows without padding, and two barriers a stage."""
        ring = 2 * self.stages * self.tile * head_dim * 2
        query = self.rows * (head_dim + 8) * 2
        results = self.rows * self.kv_warps * (head_dim + 8 + 2) * 4
        return max(ring + query + 2 * 8 * self.stages, results)

    def kernel(
        self, name: str, element: str, head_dim: int, stored_bytes: int, *, swizzled: bool = False
    ) -> Kernel:
        """The attention kernel `name` in this shape."""
        return Kernel(
            name,
            (
                ("PKV_ELEMENT", element),
                ("PKV_HEAD_DIM", head_dim),
                ("PKV_STORED_BYTES", stored_bytes),
                ("PKV_ROW_WARPS", self.row_warps),
                ("PKV_KV_WARPS", self.kv_warps),
                ("PKV_TILE", self.tile),
                ("PKV_STAGES", self.stages),
                *SWIZZLED[swizzled],
            ),
        )


def narrow_shape(head_dim: int, stored_bytes: int) -> AttentionShape:
    """For decodes, 16 rows: four warps share the keys of a tile; as many tiles are in flight as fit."""
    tile = 64 if stored_bytes == 2 or head_dim > 128 else 128
    return AttentionShape(row_warps=1, kv_warps=4, tile=tile, stages=3 if head_dim <= 128 else 2)


def wide_shape(head_dim: int) -> AttentionShape:
    """For prompts, 64 rows: each of four warps has rows of its own and all keys."""
    return AttentionShape(row_warps=4, kv_warps=1, tile=64 if head_dim <= 128 else 32, stages=2)


def all_kernels() -> Iterator[Kernel]:
    """Every variant that the backend may use."""
    for element in ELEMENTS:
        for head_dim in HEAD_DIMS:
            for name, stored_bytes in ATTENTION_KERNELS:
                for shape in (narrow_shape(head_dim, stored_bytes), wide_shape(head_dim)):
                    yield shape.kernel(name, element, head_dim, stored_bytes)
        for head_dim in BULK_HEAD_DIMS:
            narrow, wide = narrow_shape(head_dim, 2), wide_shape(head_dim)
            yield narrow.kernel("attention_bulk", element, head_dim, 2, swizzled=True)
            yield wide.kernel("attention", element, head_dim, 2, swizzled=True)
        yield rope_cache_kernel(element, 2, swizzled=True)
        for name in ROW_KERNELS:
            yield row_kernel(name, element)
        for stored_bytes in (2, 1):
            yield rope_cache_kernel(element, stored_bytes)
    yield COPY_BLOCKS
    yield SAMPLE


def model_kernels(
    element: str, head_dim: int, stored_bytes: int, *, swizzled: bool = False
) -> Iterator[Kernel]:
    """What a model needs whose cache has elements of so many bytes."""
    wide_name = "attention_fp8" if stored_bytes == 1 else "attention"
    narrow_name = "attention_bulk" if swizzled else wide_name
    narrow, wide = narrow_shape(head_dim, stored_bytes), wide_shape(head_dim)
    yield narrow.kernel(narrow_name, element, head_dim, stored_bytes, swizzled=swizzled)
    yield wide.kernel(wide_name, element, head_dim, stored_bytes, swizzled=swizzled)
    yield rope_cache_kernel(element, stored_bytes, swizzled=swizzled)
    for name in ROW_KERNELS:
        yield row_kernel(name, element)
    yield COPY_BLOCKS
    yield SAMPLE


def row_kernel(name: str, element: str) -> Kernel:
    """A kernel that is compiled for an element type alone."""
    return Kernel(name, (("PKV_ELEMENT", element),))


def rope_cache_kernel(element: str, stored_bytes: int, *, swizzled: bool = False) -> Kernel:
    """The fused rotation and cache write; 1 stored byte is an fp8 cache."""
    defines: tuple[tuple[str, str | int], ...] = (
        ("PKV_ELEMENT", element),
        ("PKV_STORED_BYTES", stored_bytes),
        *SWIZZLED[swizzled],
    )
    return Kernel("rope_cache", defines)


COPY_BLOCKS = Kernel("copy_blocks")
SAMPLE = Kernel("sample")
SAMPLE_THREADS = 1024
# A histogram of 256 weights, a partial sum for each warp, two results; 8 bytes each.
SAMPLE_SHARED_BYTES = 8 * (256 + SAMPLE_THREADS // 32 + 2)


def norm_shared_bytes(size: int, num_threads: int) -> int:
    """The row, and a float for each warp."""
    return 2 * size + 4 * (num_threads // 32)
