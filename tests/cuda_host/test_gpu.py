"""What is particular to loading onto a GPU: its options, and memory sized by a trial of the largest steps."""

import logging
from dataclasses import replace

import pytest
import torch

from host_device import HostDevice
from pagedkv import gpu
from pagedkv.batch import StepBatch, arena_section
from pagedkv.config import EngineConfig
from pagedkv.models import OpenedModel, open_model
from pagedkv.ops.cuda import CudaOps
from pagedkv.trial import TrialStep
from test_engine import checkpoint, engine, prompts  # noqa: F401 - the fixture
from tiny_llm import assert_at_rest, sampled

GIB, MIB = 2**30, 2**20


class Measured(HostDevice):
    """As if steps took memory: of prompts 3 MiB, of decodes 1 MiB."""

    def __init__(self, **changes):
        super().__init__(**changes)
        self.trials = []

    def peak_bytes(self, work):
        before = sum(self.counters("rope_cache").values())
        work()
        self.trials.append(sum(self.counters("rope_cache").values()) - before)
        return [3 * MIB, 1 * MIB][len(self.trials) - 1]


def sized(checkpoint, monkeypatch, **changes):  # noqa: F811
    device = Measured()
    device.memory_bytes = (60 * MIB, 100 * MIB)
    options = {"num_blocks": None, "max_num_batched_tokens": 40, "max_num_seqs": 2, "max_model_len": 64}
    llm = engine(checkpoint, monkeypatch, CudaOps(device), **options | changes)
    return llm, device


def test_the_cache_takes_what_the_largest_step_and_the_graphs_leave(checkpoint, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr(gpu, "BYTES_PER_GRAPH", MIB)
    with caplog.at_level(logging.INFO, logger="pagedkv"):
        llm, device = sized(checkpoint, monkeypatch, gpu_memory_utilization=0.5)
    assert len(device.trials) == 2
    assert all(device.trials)
    # Half of 100 MiB, of which 40 are taken; 3 for a step, 1 for a step in a graph and 1 for each of two.
    most = (50 - 40 - 3 - 1 - 2) * MIB
    per_block = 2 * 2 * 2 * 64 * 2 * 8  # layers, keys and values, heads, elements, bytes, slots
    num_blocks = llm.snapshot()["num_blocks"]
    static = most - (num_blocks + 1) * per_block
    assert 0 < static < MIB, "positions, and buffers of the graphs: words, logits, parts"
    assert any(message.startswith("the largest step takes 3.00 MiB") for message in caplog.messages)
    llm.generate(prompts(checkpoint)[:2], sampled(seed=1), use_tqdm=False)
    assert_at_rest(llm)


def test_without_graphs_none_are_counted(checkpoint, monkeypatch):  # noqa: F811
    llm, device = sized(checkpoint, monkeypatch, cuda_graphs=False, gpu_memory_utilization=0.5)
    assert len(device.trials) == 1
    assert device.num_captures == 0
    positions = 2 * 64 * 64 * 4  # cosines and sines, positions, elements, bytes
    assert llm.snapshot()["num_blocks"] == (7 * MIB - positions) // (2 * 2 * 2 * 64 * 2 * 8) - 1


def test_a_gpu_that_is_full_is_refused(checkpoint, monkeypatch):  # noqa: F811
    with pytest.raises(ValueError, match=r"^gpu_memory_utilization is 0\.4 of 100\.00 MiB, which leaves no"):
        sized(checkpoint, monkeypatch, gpu_memory_utilization=0.4)


def test_what_no_trial_could_allow_is_refused_before_the_weights_are_read(checkpoint, monkeypatch):  # noqa: F811
    monkeypatch.setattr(OpenedModel, "read", lambda *_args, **_options: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=r"^max_model_len is 9000, allowed: 2\.\.8192, the length"):
        sized(checkpoint, monkeypatch, max_model_len=9000)
    with pytest.raises(ValueError, match=r"^max_pinned_blocks is 16000, allowed: 0 to"):
        sized(checkpoint, monkeypatch, max_pinned_blocks=16000)


def test_a_size_that_is_given_needs_no_trial(checkpoint, monkeypatch):  # noqa: F811
    for given in ({"kv_memory": "4MiB"}, {"num_blocks": 50}):
        _, device = sized(checkpoint, monkeypatch, **given)
        assert device.trials == []


def test_the_largest_steps_have_as_many_tokens_and_rows_as_there_may_be():
    step = TrialStep.of_prompts(100, 40, num_rows=30)
    arena = step.arena(16)
    batch = StepBatch.from_arena(torch.from_numpy(arena), step.num_decodes)
    assert (step.num_tokens, batch.seq_lens.tolist()) == (100, [40, 40, 20])
    assert batch.table_start.tolist() == [0, 3, 6, 8]
    assert (batch.slot_mapping == -1).all()
    assert (batch.block_ids == 0).all()
    assert batch.positions.tolist() == [*range(40), *range(40), *range(20)]
    assert batch.sample_rows.tolist() == list(range(30))
    assert (arena_section(arena, "sampling")[:, 8] == 0).all()
    few = TrialStep.of_prompts(3, 40, num_rows=5)
    assert arena_section(few.arena(16), "sample_rows").tolist() == [0, 1, 2, 2, 2]


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"bulk_attention": True}])
def test_options_of_a_gpu_are_refused_on_a_cpu(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"^{name} is {value!r}, which needs a GPU, and the device is cpu"):
        gpu.choose_ops(EngineConfig(**options), torch.device("cpu"))


def test_blocks_that_the_kernels_cannot_read_are_refused_at_start(checkpoint, monkeypatch):  # noqa: F811
    monkeypatch.setattr(OpenedModel, "read", lambda *_args, **_options: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=r"^block_size is 4, allowed on a GPU: 8, 16, 32, 64, 128, 256$"):
        engine(checkpoint, monkeypatch, CudaOps(HostDevice()), block_size=4, cuda_graphs=False)


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size"])
def test_rows_that_the_kernels_cannot_read_are_refused_at_start(checkpoint, field):  # noqa: F811
    opened = open_model(checkpoint.path, "float16")
    odd = replace(opened, config=replace(opened.config, **{field: 100}))
    with pytest.raises(ValueError, match=f"^{field} of the model is 100, allowed on a GPU: multiples of 8$"):
        gpu.prepare(EngineConfig(), odd, CudaOps(HostDevice()))


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("sm_80", {}, "bulk_attention is True on sm_80, allowed: sm_90 and newer"),
        ("sm_90", {"kv_cache_dtype": "fp8"}, "and kv_cache_dtype 'fp8', allowed: heads of 64, 128, 256"),
    ],
)
def test_bulk_copies_want_a_gpu_that_has_them(checkpoint, monkeypatch, arch, changes, message):  # noqa: F811
    monkeypatch.setattr(OpenedModel, "read", lambda *_args, **_options: pytest.fail("the weights were read"))
    ops = CudaOps(HostDevice(arch), swizzled=True)
    with pytest.raises(ValueError, match=message):
        engine(checkpoint, monkeypatch, ops, bulk_attention=True, **changes)
