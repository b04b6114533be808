"""Decode steps as graphs: what was captured once is replayed for other steps, and gives what they would give.

The device records what it is given while a step is captured, and repeats it with the same addresses and
numbers (`host_graph`). A step that is not read from memory that stays shows here as it would on a GPU.
"""

import numpy as np
import pytest
import torch

from host_device import HostDevice
from host_graph import CaptureError, HostGraph
from paged_steps import exact_attention, make_step, relative_error
from pagedkv import RequestFailed, SamplingParams
from pagedkv.decode_graphs import DecodeGraphs, DecodeLayout, decode_layout, graph_sizes
from pagedkv.ops.cuda import CudaOps
from pagedkv.ops.cuda_attention import plan_sections
from pagedkv.ops.cuda_plan import empty_plan
from pagedkv.ops.cuda_work_list import WorkListLayout
from test_engine import checkpoint, engine, prompts  # noqa: F401 - the fixture
from test_plan import arrays, options
from tiny_llm import assert_at_rest, sampled, texts

NAMES = ("query_start", "seq_lens", "table_start", "block_ids")


def test_sizes_are_dense_where_steps_are_small():
    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(256)[:6] == [1, 2, 4, 8, 16, 24]
    assert graph_sizes(256)[-3:] == [224, 240, 256]
    assert graph_sizes(5000)[-1] == 512
    for most in (3, 8, 100, 256, 300):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most


@pytest.mark.parametrize(("group_size", "capacity"), [(1, 264), (4, 264), (7, 16), (48, 100), (4, 2)])
def test_a_graph_has_room_for_every_plan(group_size, capacity):
    draw = np.random.default_rng(5)
    for _ in range(60):
        num = int(draw.integers(1, 33))
        lengths = [(1, int(draw.choice([draw.integers(1, 40), draw.integers(1, 6000)]))) for _ in range(num)]
        chosen = options(group_size=group_size, capacity=capacity)
        sections = dict(zip(NAMES, arrays(lengths, int(draw.integers(0, 40)) * 16), strict=True))
        plan = plan_sections(sections, chosen)
        assert WorkListLayout.of_decodes(num, chosen).holds(plan)
        assert WorkListLayout.of_decodes(min(num + 3, 33), chosen).holds(plan)


def sections_of(step):
    """What an arena would hold of a step of attention."""
    batch, num = step.batch, len(step.q)
    names = ("token_ids", "positions", "slot_mapping", *NAMES)
    sections = {name: getattr(batch, name).numpy() for name in names}
    return sections | {
        "token_source": np.full(num, -1, np.int32),
        "sample_rows": np.arange(num, dtype=np.int32),
        "sampling": np.zeros(9 * num, np.int32),
        "copies": np.zeros(0, np.int32),
    }


def test_a_replay_follows_lengths_tables_and_prefixes_that_change_in_place():
    """Captured with nothing to do; replayed for steps of other sizes, with parts and with a shared prefix."""
    device = HostDevice(capacity=24)
    ops = CudaOps(device)
    steps = [
        make_step([(1, 1), (1, 37), (1, 130)], seed=1),
        make_step([(1, 900), (1, 5)], seed=2),
        make_step([(1, 272 + own) for own in (3, 40, 17, 90)], num_shared=272, seed=3),
        make_step([(1, 700)], seed=4),
    ]
    num_blocks = max(len(step.key_cache) for step in steps)
    keys, values = (
        torch.empty(num_blocks, *steps[0].key_cache.shape[1:], dtype=torch.bfloat16) for _ in "kv"
    )
    chosen = ops.attention.options((8, 64), keys)
    layout = decode_layout(4, chosen, 64)
    words = torch.zeros(layout.num_words, dtype=torch.int32)
    layout.pack(sections_of(steps[0]) | {"block_ids": np.zeros(0, np.int32)}, empty_plan(), words.numpy())
    q, out = (torch.zeros(4, 8, 64, dtype=torch.bfloat16) for _ in range(2))
    batch = layout.batch(words)

    def work():
        out.copy_(ops.paged_attention(q, keys, values, batch, steps[0].scale))

    with torch.inference_mode(), device.active():
        graph = device.capture(work)
    for step in steps:
        num = len(step.q)
        for cache, given in ((keys, step.key_cache), (values, step.value_cache)):
            cache.fill_(float("nan"))
            cache[: len(given)] = given
        q[:num] = step.q
        sections = sections_of(step)
        layout.pack(sections, plan_sections(sections, chosen), words.numpy())
        graph.replay()
        assert relative_error(out[:num], exact_attention(step)) < 4e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_answers_from_graphs_are_those_of_single_launches(checkpoint, monkeypatch, dtype):  # noqa: F811
    """Also of steps that overlap. Forks copy blocks, parameters differ, one asks for log-probabilities."""
    drawn = {"temperature": 1.5, "ignore_eos": True}
    params = [
        SamplingParams(**drawn, seed=3, n=2, logprobs=2, max_tokens=8),
        SamplingParams(**drawn, seed=4, top_k=20, max_tokens=4),
        SamplingParams(**drawn, seed=5, top_p=0.8, max_tokens=13),
    ]
    given, replays = [], []
    place = DecodeGraphs.place

    def noted(graphs, arena, num_tokens):
        replays.append(num_tokens)
        return place(graphs, arena, num_tokens)

    monkeypatch.setattr(DecodeGraphs, "place", noted)
    for cuda_graphs, overlap in ((False, False), (True, False), (True, True), (False, True)):
        device = HostDevice()
        options = {"cuda_graphs": cuda_graphs, "overlap": overlap, "dtype": dtype}
        llm = engine(checkpoint, monkeypatch, CudaOps(device), **options)
        replays.clear()
        assert device.num_captures == (4 if cuda_graphs else 0)
        outputs = llm.generate(prompts(checkpoint)[:3], params, use_tqdm=False)
        assert_at_rest(llm)
        assert len(set(replays)) >= (3 if cuda_graphs else 0), "steps of several sizes"
        logprobs = [answer.logprobs for output in outputs for answer in output.outputs]
        given.append((texts(outputs), logprobs))
    assert given[1:] == given[:1] * 3
    assert any(given[0][1])


def test_the_recorder_forbids_what_a_capture_forbids():
    for work in (
        lambda: torch.ones(2).sum().item(),
        lambda: torch.ones(2).nonzero(),
        lambda: torch.ones(2).tolist(),
    ):
        device = HostDevice()
        with torch.inference_mode(), device.active(), pytest.raises(CaptureError):
            device.capture(work)


def test_the_recorder_repeats_operations_with_the_memory_that_they_had():
    shared = []
    source, out = torch.arange(3.0), torch.zeros(3)
    with torch.inference_mode():
        with HostGraph(shared) as graph:
            doubled = source * 2
            out.copy_(doubled[1:].sum() + doubled)
        out.zero_()
        source.copy_(torch.tensor([1.0, 2.0, 3.0]))
        graph.replay()
    assert out.tolist() == [12.0, 14.0, 16.0]
    assert doubled.tolist() == [2.0, 4.0, 6.0]
    with torch.inference_mode(), HostGraph(shared):
        torch.ones(2) + 1
    assert doubled.isnan().all()


def test_a_step_that_is_not_read_from_memory_that_stays_shows(checkpoint, monkeypatch):  # noqa: F811
    """What the tests above rely on: here graphs read a copy of the words, which stays as at the capture."""
    batch = DecodeLayout.batch
    monkeypatch.setattr(DecodeLayout, "batch", lambda layout, words: batch(layout, words.clone()))
    llm = engine(checkpoint, monkeypatch, CudaOps(HostDevice()))
    # No work item reads for the row, so its attention is what lay in memory before.
    with pytest.raises(RequestFailed, match="row 0 of the logits is NaN"):
        llm.generate(prompts(checkpoint)[:1], sampled(seed=1), use_tqdm=False)
