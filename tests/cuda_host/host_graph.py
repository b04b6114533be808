"""What a captured graph is where kernels run on the CPU: a list of calls, with the memory that each one had.

A GPU's graph repeats kernels at the addresses and with the numbers that they were captured with. So does
this: launches and torch's operations are recorded with their tensors, and a replay writes results to where
they were at the capture. What did not come from memory that stays is stale then, and shows. All graphs of a
device share the memory of what they compute on the way: a replay makes NaN of what any of them left.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What needs a number of the device on the host, or memory whose size depends on one.
WAITING = (
    torch.ops.aten.item.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.resolve_conj.default,  # of tolist() and numpy()
)
UNINITIALISED = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)


class CaptureError(Exception):
    """Something was done that a GPU does not allow while it captures."""


class HostGraph(TorchDispatchMode):
    """Records what is done while it is entered."""

    def __init__(self, shared: list[Tensor]) -> None:
        """`shared`: results of all graphs of the device, to which this one's are added."""
        super().__init__()
        self._calls: list[Callable[[], None]] = []
        self._shared = shared

    def __exit__(self, *reason: object) -> None:
        """Ends the capture. Nothing has been computed, as far as one may tell."""
        super().__exit__(*reason)
        self._poison()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Does an operation of torch and records it."""
        if func in WAITING:
            raise CaptureError(f"{func} waits for the device, which a captured step must not")
        arguments = kwargs or {}
        result = func(*args, **arguments)
        given = {storage(tensor) for tensor in tensors((args, arguments))}
        fresh = [tensor for tensor in tensors(result) if storage(tensor) not in given]
        self._shared += fresh
        if func not in UNINITIALISED and (fresh or func._schema.is_mutable):
            self._calls.append(lambda: repeat(func, args, arguments, fresh))
        return result

    def record(self, launch: Callable[[], None]) -> None:
        """Records the launch of a kernel."""
        self._calls.append(launch)

    def replay(self) -> None:
        """See `pagedkv.ops.device.Graph.replay`."""
        self._poison()
        with torch.inference_mode():
            for call in self._calls:
                call()

    @torch.inference_mode()
    def _poison(self) -> None:
        for tensor in self._shared:
            if tensor.dtype == torch.bool:
                tensor.logical_not_()
            else:
                # NaN, or a number that is no index of anything.
                tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def repeat(func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
    """Does an operation again, with its results at the same place."""
    again = tensors(func(*args, **kwargs))
    for old, new in zip(results, again, strict=True) if results else ():
        old.copy_(new)
