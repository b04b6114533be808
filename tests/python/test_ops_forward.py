"""The forward pass in one call against the same operations one by one: the same bits, the same cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from arena_writer import PagedRun, TestSequence
from pagedkv import _core
from pagedkv.batch import StepBatch
from pagedkv.models import load_model
from pagedkv.ops import cpu
from pagedkv.ops.decoder import compose
from tiny_models import make_tiny


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = _core.num_threads()
    _core.set_num_threads(2)
    yield
    _core.set_num_threads(before)


needs_kernels = pytest.mark.skipif(_core.cpu_isa() == "portable", reason="torch multiplies here")


class OneByOne:
    """The CPU operations, but for the one that does everything."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu, name)

    def forward(self, *args: Any) -> Tensor:
        """Calls the others."""
        return compose(self, *args)


def steps(run: PagedRun) -> list[Tensor]:
    """Logits of two prompts in chunks, one of which decodes beside the other's second chunk."""
    ids: list[int] = torch.randint(0, 200, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    first, second = TestSequence(ids[:40]), TestSequence(ids[30:])
    chunks = [[(first, 39)], [(first, 1), (second, 50)], [(second, 69)], [(second, 1)]]
    return [run.step(chunk) for chunk in chunks]


def bits(tensor: Tensor) -> Tensor:
    """As integers: the cache is NaN where nothing was written."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["smollm", "qwen3", "qwen2"])
def test_one_call_has_the_bits_of_the_operations_one_by_one(dtype: str, family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    loaded = load_model(tmp_path, dtype)
    runs = [PagedRun(loaded, ops, block_size=8, num_blocks=40) for ops in (cpu, OneByOne())]
    for got, expected in zip(*map(steps, runs), strict=True):
        assert torch.equal(got, expected)
    for pair, expected_pair in zip(runs[0].kv_cache.layers, runs[1].kv_cache.layers, strict=True):
        for cache, expected in zip(pair, expected_pair, strict=True):
            assert torch.equal(bits(cache), bits(expected))


@needs_kernels
def test_rows_are_projected_as_often_as_they_are_sampled(tmp_path: Path) -> None:
    make_tiny("smollm", tmp_path)
    run = PagedRun(load_model(tmp_path), cpu, block_size=8, num_blocks=4)
    all_rows = run.batch([(TestSequence([5, 6, 7]), 3)])
    logits = run.model(all_rows, run.kv_cache, cpu)
    rows = torch.tensor([2, 0, 2, 2, 2, 1], dtype=torch.int32)
    batch = replace(all_rows, sample_rows=rows, prepared={})
    assert torch.equal(run.model(batch, run.kv_cache, cpu), logits[rows])
    batch = replace(all_rows, sample_rows=rows[:0], prepared={})
    assert run.model(batch, run.kv_cache, cpu).shape == (0, 200)


def changed(name: str, values: Sequence[int]) -> Callable[[StepBatch], StepBatch]:
    return lambda batch: replace(batch, **{name: torch.tensor(values, dtype=torch.int32)}, prepared={})


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("token_ids", [5, 200, 7]), r"token_ids\[1\] is 200, allowed: 0 to 199"),
        (changed("token_ids", [5, 6]), r"query_start\[1\] is 3, allowed: 2"),
        (changed("sample_rows", [0, 3]), r"sample_rows\[1\] is 3, allowed: 0 to 2"),
        (changed("positions", [0, -1, 2]), r"positions\[1\] is -1"),
        (changed("slot_mapping", [8, 9, 4000]), r"slot_mapping\[2\] is 4000"),
        (changed("block_ids", [77]), r"block_ids\[0\] is 77"),
    ],
)
def test_a_step_that_leads_astray_is_refused(
    change: Callable[[StepBatch], StepBatch], message: str, tmp_path: Path
) -> None:
    make_tiny("smollm", tmp_path)
    run = PagedRun(load_model(tmp_path), cpu, block_size=8, num_blocks=4)
    batch = run.batch([(TestSequence([5, 6, 7]), 3)])
    with pytest.raises(ValueError, match=message):
        run.model(change(batch), run.kv_cache, cpu)


@needs_kernels
def test_caches_and_norms_of_another_kind_are_refused(tmp_path: Path) -> None:
    make_tiny("smollm", tmp_path)
    run = PagedRun(load_model(tmp_path), cpu, block_size=8, num_blocks=4)
    batch = run.batch([(TestSequence([5, 6, 7]), 3)])
    caches = [(key_cache.double(), value_cache) for key_cache, value_cache in run.kv_cache.layers]
    with pytest.raises(ValueError, match="float64"):
        cpu.forward(run.model.packed, batch, run.model.angles, caches)
    model = replace(run.model.packed, norm=run.model.packed.norm.double(), prepared={})
    with pytest.raises(ValueError, match=r"norm is \[64\] of torch.float64 on cpu, allowed: dense, \[64\]"):
        cpu.forward(model, batch, run.model.angles, run.kv_cache.layers)
