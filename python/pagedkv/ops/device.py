"""A device as the CUDA backend and the runner see it: what launches, copies and captures on one stream.

`pagedkv.ops.cuda_device` is a GPU. The tests have another one, which executes the same kernels on the CPU:
all that differs between the two is behind this protocol. Work of a device is in order: what is enqueued later
sees what was enqueued before.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from pagedkv.ops.cuda_kernels import Kernel


class LoadedKernel(Protocol):
    """A kernel that is ready to be launched."""

    def launch(self, grid: tuple[int, int], num_threads: int, shared_bytes: int, params: bytearray) -> None:
        """Enqueues a grid of blocks with one packed struct of parameters, which is copied."""


class Event(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Returns when the copy has been done. Raises what the device raises."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueues it once more: the same kernels at the same addresses."""


class Device(Protocol):
    """Where kernels run, and the memory that they run on."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors must lie."""

    @property
    def arch(self) -> str:
        """What kernels are compiled for, "sm_90" for instance."""

    @property
    def capacity(self) -> int:
        """Blocks of an attention kernel that run at once."""

    @property
    def sources(self) -> Mapping[str, str]:
        """The sources that it compiles."""

    def load(self, kernel: Kernel) -> LoadedKernel:
        """Compiles and loads a kernel, or finds the one that was."""

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Loads several before they are needed."""

    def active(self) -> AbstractContextManager[object]:
        """Makes it the current device of this thread. Everything below is called within."""

    def pinned(self, num_words: int) -> Tensor:
        """int32 of the host that copies can read while the host does something else."""

    def upload(self, source: Tensor, target: Tensor) -> Event:
        """Enqueues a copy of pinned memory, which must not change before the event."""

    def download(self, source: Tensor) -> tuple[Tensor, Event]:
        """Enqueues a copy to the host; the result holds it after the event."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Records what `work` enqueues instead of doing it.

        Work must not wait for the device, and whatever differs between replays must come from memory that
        outlives the graph. It has been done once before: nothing is loaded or initialised within. Graphs are
        replayed one after another, and share the memory of what they compute on the way.
        """

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, with nothing kept in reserve, and all that there are."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Does `work` and returns by how many bytes the memory in use grew on the way, at the most."""

    def probe(self) -> None:
        """Raises if the device computes no more."""
