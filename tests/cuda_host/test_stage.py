"""How steps get to a device and back: one copy a step, from buffers that nobody writes while they are
read."""

import numpy as np
import pytest
import torch

from host_device import HostDevice
from pagedkv.batch import StepBatch, used_words
from pagedkv.ops.cuda_attention import WORK_LIST, plan_batch
from pagedkv.ops.cuda_plan import PlanOptions
from pagedkv.stage import NUM_BUFFERS, DeviceStage, PinnedBuffers

OPTIONS = PlanOptions(4, 2, 16, wide_rows=64, narrow_rows=16, capacity=64)


def arena_of(lengths):
    """An arena of decodes, with 50 words behind those in use; token ids count from 100."""
    num = len(lengths)
    blocks = [-(-length // 16) for length in lengths]
    starts = torch.tensor([0, *blocks]).cumsum(0).tolist()
    sections = [
        [*range(100, 100 + num)],
        [-1] * num,
        [length - 1 for length in lengths],
        [16 * (i + 1) for i in range(num)],
        [*range(num + 1)],
        lengths,
        starts,
        [*range(1, starts[-1] + 1)],
        [*range(num)],
        [0] * 8 * num + [-1] * num,
    ]
    sections += [[]] * (15 - len(sections))
    directory, data = [], []
    for section in sections:
        directory += [2 + 2 * len(sections) + len(data), len(section)]
        data += section
    return np.array([1, len(sections), *directory, *data, *[-9] * 50], dtype=np.int32)


@pytest.fixture
def device():
    device = HostDevice()
    with device.active():
        yield device


def test_a_step_and_its_work_list_travel_in_one_copy(device):
    stage = DeviceStage(device, OPTIONS, num_words=10)
    for lengths in ([700, 3], [5, 20, 90]):
        arena = arena_of(lengths)
        before = device.num_uploads
        batch = stage.place(arena, len(lengths))
        assert device.num_uploads == before + 1
        kept = torch.from_numpy(arena.copy())
        arena[:] = -3  # The core may write the next step at once.
        expected = StepBatch.from_arena(kept, len(lengths))
        for name in ("token_ids", "positions", "slot_mapping", "table_start", "block_ids", "sample_rows"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))
        assert torch.equal(batch.sampling.placed, expected.sampling.words)
        plan, work = plan_batch(expected, OPTIONS), batch.prepared[WORK_LIST]
        assert torch.equal(work.items, torch.from_numpy(plan.items))
        assert torch.equal(work.merge_rows, torch.from_numpy(plan.merge_rows))
        assert torch.equal(work.part_start, torch.from_numpy(plan.part_start))
        assert torch.equal(work.part_rows, torch.from_numpy(plan.part_rows))
        assert work.items.data_ptr() % 16 == 0
        assert used_words(kept) == len(kept) - 50


def test_a_buffer_is_written_again_once_it_has_been_copied(device):
    buffers, target = PinnedBuffers(device, 8), torch.zeros(8, dtype=torch.int32)
    events, memory = [], set()
    for step in range(2 * NUM_BUFFERS):
        words = buffers.take(4)
        assert all(event.num_waits == (index <= step - NUM_BUFFERS) for index, event in enumerate(events))
        words[:] = step
        memory.add(words.ctypes.data)
        buffers.send(4, target)
        events.append(buffers._buffers[buffers._next].copied)
    assert len(memory) == NUM_BUFFERS
    assert target.tolist() == [2 * NUM_BUFFERS - 1] * 4 + [0] * 4


def test_the_device_of_these_tests_notices_a_buffer_that_is_written_too_early(device):
    buffers, target = PinnedBuffers(device, 8), torch.zeros(8, dtype=torch.int32)
    words = buffers.take(4)
    words[:] = 1
    buffers.send(4, target)
    words[2] = 5
    for _ in range(NUM_BUFFERS - 1):
        buffers.take(4)
    with pytest.raises(AssertionError, match="written while it was being copied"):
        buffers.take(4)


def test_results_are_there_after_the_wait_only(device):
    stage = DeviceStage(device, OPTIONS, num_words=10)
    sampled = torch.tensor([4, 5])
    fetched = stage.fetch([sampled])
    sampled.fill_(0)  # What the next step does, which is enqueued behind the copy.
    assert [tensor.tolist() for tensor in fetched()] == [[4, 5]]


def test_small_tensors_are_sent_from_pinned_memory_too(device):
    stage = DeviceStage(device, OPTIONS, num_words=2)
    assert stage.send(torch.tensor([3, 1, 9])).tolist() == [3, 1, 9]
    assert device.num_uploads == 1
