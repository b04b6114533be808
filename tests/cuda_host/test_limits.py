"""Every kernel compiles for every architecture, within its registers, and keeps them all in registers."""

import pytest

from host_device import MAX_SHARED_BYTES
from limits import ARCHS, compile_all, read, usage
from pagedkv.ops import nvrtc
from pagedkv.ops.cuda_kernels import HEAD_DIMS, all_kernels, narrow_shape, wide_shape

REGISTERS_OF_A_MULTIPROCESSOR = 1 << 16
# Shared memory of a multiprocessor; a block costs 1 KiB more than it asks for.
SHARED_OF_A_MULTIPROCESSOR = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
# By how much another version of the compiler may miss.
OTHER_VERSION_REGISTERS = 8


@pytest.fixture(scope="module")
def compiled():
    return compile_all()


def test_registers_stay_within_the_limits(compiled):
    version, limits = read()
    spare = 0 if nvrtc.load().version == version else OTHER_VERSION_REGISTERS
    for (kernel, arch), result in compiled.items():
        used = usage(result.log)
        assert used.registers <= limits[str(kernel), arch] + spare, f"{kernel} for {arch}"
        assert (used.stack_bytes, used.spill_bytes) == (0, 0), f"{kernel} for {arch}"
    assert {name for name, _ in limits} == {str(kernel) for kernel in all_kernels()}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shared_memory_fits(arch, head_dim):
    for stored_bytes in (1, 2):
        for shape in (narrow_shape(head_dim, stored_bytes), wide_shape(head_dim)):
            assert shape.shared_bytes(head_dim, stored_bytes) <= MAX_SHARED_BYTES[arch]


def test_two_blocks_of_a_decode_share_a_multiprocessor(compiled):
    """One computes while the other waits for memory. Larger heads on sm_80 have too little shared memory."""
    for (kernel, arch), result in compiled.items():
        head_dim = dict(kernel.defines).get("PKV_HEAD_DIM")
        if not kernel.name.startswith("attention") or head_dim == 256 or (arch == "sm_80" and head_dim > 80):
            continue
        stored_bytes = dict(kernel.defines)["PKV_STORED_BYTES"]
        is_narrow = dict(kernel.defines)["PKV_ROW_WARPS"] == 1
        shape = narrow_shape(head_dim, stored_bytes) if is_narrow else wide_shape(head_dim)
        is_bulk = kernel.name == "attention_bulk"
        asked = shape.bulk_shared_bytes(head_dim) if is_bulk else shape.shared_bytes(head_dim, stored_bytes)
        shared = 2 * (asked + 1024)
        assert shared <= SHARED_OF_A_MULTIPROCESSOR[arch], f"{kernel} for {arch}"
        registers = 2 * (shape.num_threads + 32 * is_bulk) * usage(result.log).registers
        assert registers <= REGISTERS_OF_A_MULTIPROCESSOR, f"{kernel} for {arch}"
