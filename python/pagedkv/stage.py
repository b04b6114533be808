"""Where steps are computed: how their words get there, and how what was computed comes back.

The runner has one `Stage`. On the CPU there is nothing to move. For a GPU the words of a step are copied from
pinned buffers that are used in turn, each guarded by an event, so that the host can write the next step's
while the last ones are still being read; nobody waits for the whole device.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedkv.batch import StepBatch, section_table, used_words
from pagedkv.ops.cuda_attention import WORK_LIST, plan_sections
from pagedkv.ops.cuda_plan import PlanOptions
from pagedkv.ops.cuda_work_list import WorkListLayout
from pagedkv.ops.device import Device, Event

# A step sends up to four times: its words, what it moves, rows of beams, and rows whose log-probabilities are
# asked for. Two steps are under way, and neither should wait for the other's forward pass to get a buffer.
NUM_BUFFERS: Final = 8
# Kernels read items of a work list 16 bytes at once.
ALIGNMENT_WORDS: Final = 4

Words = NDArray[np.int32]
Fetched = Callable[[], list[Tensor]]


class Stage(Protocol):
    """Moves steps to where they are computed, and results back. One thread uses it."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of a step lie."""

    def active(self) -> AbstractContextManager[object]:
        """What a step must be computed within."""

    def place(self, arena: Words, num_decodes: int) -> StepBatch:
        """The step in an arena as tensors on the device. On a GPU the arena may be written again at once."""

    def send(self, values: Tensor) -> Tensor:
        """A small tensor of the host on the device."""

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Starts to bring results to the host; what it returns waits until they are there."""

    def probe(self) -> None:
        """Raises if the device computes no more."""


class HostStage:
    """The CPU: steps are computed where they are written."""

    torch_device = torch.device("cpu")

    def active(self) -> AbstractContextManager[object]:
        """See `Stage.active`."""
        return nullcontext()

    def place(self, arena: Words, num_decodes: int) -> StepBatch:
        """See `Stage.place`."""
        return StepBatch.from_arena(torch.from_numpy(arena), num_decodes)

    def send(self, values: Tensor) -> Tensor:
        """See `Stage.send`."""
        return values

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """See `Stage.fetch`."""
        return lambda: list(tensors)

    def probe(self) -> None:
        """See `Stage.probe`."""


@dataclass
class _Buffer:
    words: Tensor
    copied: Event | None = None


class PinnedBuffers:
    """Pinned memory for what goes to the device, in turn."""

    def __init__(self, device: Device, num_words: int) -> None:
        """Allocates buffers of so many words; one that turns out too small is made larger."""
        self._device = device
        self._buffers = [_Buffer(device.pinned(num_words)) for _ in range(NUM_BUFFERS)]
        self._next = 0

    def take(self, num_words: int) -> Words:
        """The words of the next buffer, to be written and sent. Waits until they have been copied before."""
        self._next = (self._next + 1) % NUM_BUFFERS
        buffer = self._buffers[self._next]
        if buffer.copied is not None:
            buffer.copied.wait()
            buffer.copied = None
        if num_words > len(buffer.words):
            buffer.words = self._device.pinned(max(num_words, 2 * len(buffer.words)))
        return buffer.words.numpy()[:num_words]

    def send(self, num_words: int, target: Tensor) -> None:
        """Enqueues the one copy of the words that `take` gave to the beginning of a tensor on the device."""
        buffer = self._buffers[self._next]
        buffer.copied = self._device.upload(buffer.words[:num_words], target[:num_words])


class DeviceStage:
    """A GPU: a step's words and its work list get there in one copy.

    Attributes:
        buffers: what is copied from.
        options: what work lists depend on.
    """

    def __init__(self, device: Device, options: PlanOptions, num_words: int) -> None:
        """Makes a stage for steps of usually at most `num_words` words."""
        self._device = device
        self.torch_device = device.torch_device
        self.options = options
        self.buffers = PinnedBuffers(device, num_words)

    def active(self) -> AbstractContextManager[object]:
        """See `Stage.active`."""
        return self._device.active()

    def place(self, arena: Words, num_decodes: int) -> StepBatch:
        """See `Stage.place`."""
        plan = plan_sections(section_table(arena), self.options)
        layout = WorkListLayout.of(plan)
        num_words = used_words(arena)
        begin = -(-num_words // ALIGNMENT_WORDS) * ALIGNMENT_WORDS
        tail = begin + layout.num_words
        end = tail + len(plan.part_rows)
        buffer = self.buffers.take(end)
        buffer[:num_words] = arena[:num_words]
        layout.pack(plan, buffer[begin:tail])
        buffer[tail:end] = plan.part_rows
        words = torch.empty(end, dtype=torch.int32, device=self.torch_device)
        self.buffers.send(end, words)
        batch = StepBatch.from_arena(torch.from_numpy(arena), num_decodes, words[:num_words])
        batch.prepared[WORK_LIST] = layout.view(words[begin:tail], words[tail:end])
        return batch

    def send(self, values: Tensor) -> Tensor:
        """See `Stage.send`."""
        words = values.to(torch.int32)
        self.buffers.take(len(words))[:] = words.numpy()
        target = torch.empty(len(words), dtype=torch.int32, device=self.torch_device)
        self.buffers.send(len(words), target)
        return target

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """See `Stage.fetch`."""
        copies = [self._device.download(tensor) for tensor in tensors]

        def wait() -> list[Tensor]:
            for _, copied in copies:
                copied.wait()
            return [target for target, _ in copies]

        return wait

    def probe(self) -> None:
        """See `Stage.probe`."""
        self._device.probe()
