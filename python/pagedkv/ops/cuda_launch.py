"""From tensors to a launch: names of element types, what kernels demand of tensors, packed parameters.

What `pagedkv.ops.cuda` and `pagedkv.ops.cuda_attention` share.
"""

import torch
from torch import Tensor

from pagedkv.ops.cuda_kernels import BLOCK_SIZES, Kernel, ParamLayout
from pagedkv.ops.device import Device

FP8 = torch.float8_e4m3fn
ELEMENT_NAMES = {torch.bfloat16: "bf16", torch.float16: "half"}
_MAX_ROW_THREADS = 256


class Launcher:
    """Launches kernels of a device by name and parameters. It keeps the layouts of their structs."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._layouts: dict[str, ParamLayout] = {}

    def __call__(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        num_threads: int,
        shared_bytes: int,
        **params: int | float,
    ) -> None:
        """Enqueues a grid of blocks; nothing where it is empty."""
        if 0 in grid:
            return
        layout = self._layouts.get(kernel.name)
        if layout is None:
            layout = self._layouts[kernel.name] = ParamLayout(kernel.name, self.device.sources)
        self.device.load(kernel).launch(grid, num_threads, shared_bytes, layout.pack(**params))


def element_name(label: str, tensor: Tensor) -> str:
    """The kernels' name of the element type. Raises ValueError for another one."""
    element = ELEMENT_NAMES.get(tensor.dtype)
    if element is None:
        allowed = ", ".join(str(dtype) for dtype in ELEMENT_NAMES)
        raise ValueError(f"dtype of {label} is {tensor.dtype}, allowed: {allowed}")
    return element


def row_size(label: str, tensor: Tensor) -> int:
    """Elements of a row, which the kernels read 16 bytes at once. Raises ValueError where they cannot."""
    size, stride = tensor.shape[1], tensor.stride(0)
    if size % 8 or stride % 8 or tensor.stride(1) != 1:
        raise ValueError(f"{label} has rows of {size} elements {stride} apart, allowed: multiples of 8")
    return size


def row_threads(size: int) -> int:
    """Threads for a row of which each takes 8 elements at once."""
    return min(_MAX_ROW_THREADS, -(-size // 256) * 32)


def check_heads(label: str, tensor: Tensor, head_dim: int) -> None:
    """Refuses rows of heads with gaps between them; tokens may have any distance."""
    if tensor.stride(2) != 1 or tensor.stride(1) != head_dim or tensor.stride(0) % 8 or head_dim % 16:
        given = f"shape {list(tensor.shape)} and strides {list(tensor.stride())}"
        raise ValueError(f"{label} has {given}, allowed: heads of a multiple of 16 elements, without gaps")


def cache_params(key_cache: Tensor, value_cache: Tensor) -> dict[str, int]:
    """Addresses and strides of a layer's cache, as the kernels' parameters name them."""
    block_size = key_cache.shape[2]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size}, allowed: {', '.join(map(str, BLOCK_SIZES))}")
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1:
        raise ValueError(f"strides of value_cache are {value_cache.stride()}, allowed: those of key_cache")
    return {
        "key_cache": key_cache.data_ptr(),
        "value_cache": value_cache.data_ptr(),
        "block_stride": key_cache.stride(0),
        "head_stride": key_cache.stride(1),
        "slot_stride": key_cache.stride(2),
        "block_size_log2": block_size.bit_length() - 1,
    }
