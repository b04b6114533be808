"""The same request has the same bits of logits alone, in a crowd, from a warm cache and after preemption."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkv import LLM, SamplingParams, _core, loading
from pagedkv.ops import Ops, cpu
from tiny_llm import Checkpoint, prompts

NUM_TOKENS = 40
PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
CROWD = SamplingParams(temperature=1.0, seed=8, max_tokens=NUM_TOKENS, ignore_eos=True)


class Watched:
    """The CPU operations, which keep the logits of every drawn row by seed and position."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.logits: dict[tuple[int, int], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample(self, logits: Tensor, sampling: Any) -> Tensor:
        """Draws as ever."""
        keys = zip(sampling.seed_low.tolist(), sampling.position.tolist(), strict=True)
        for row, key in zip(logits, keys, strict=True):
            self.logits[key] = row.clone()
        return self._ops.sample(logits, sampling)

    def take(self, seed: int) -> dict[int, Tensor]:
        """The logits of the draws of a seed by position; forgets all."""
        taken = {position: row for (of, position), row in self.logits.items() if of == seed}
        self.logits = {}
        return taken


def watched(checkpoint: Checkpoint, **changes: Any) -> tuple[LLM, Watched]:
    llm = LLM(**checkpoint.options | changes)
    ops = Watched(cpu)
    llm._engine.runner.ops = ops  # type: ignore[assignment]
    return llm, ops


def assert_same(got: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    assert len(got) == NUM_TOKENS
    assert got.keys() == expected.keys()
    for position, row in expected.items():
        assert torch.equal(got[position], row), f"position {position}"


@pytest.fixture(params=["auto", "avx512_bf16", "avx512", "avx2"])
def cpu_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """A choice of instruction sets, which ends with the test."""
    try:
        _core.set_cpu_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    _core.set_cpu_isa("auto")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_company_cache_or_preemption(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, dtype: str, cpu_isa: str
) -> None:
    # Longer than a split of attention, so that the cascade and the folds are part of it.
    prompt = [token for part in prompts(8, checkpoint.vocab_size) for token in part][:300]
    others = [prompt[:280] + part for part in prompts(12, checkpoint.vocab_size, seed=9)]
    llm, ops = watched(checkpoint, dtype=dtype, threads=1)
    llm.generate([prompt], PARAMS, use_tqdm=False)
    alone = ops.take(7)
    assert len(alone) == NUM_TOKENS
    llm.generate([prompt], PARAMS, use_tqdm=False)
    assert_same(ops.take(7), alone)

    llm, ops = watched(checkpoint, dtype=dtype, threads=2, max_num_batched_tokens=64)
    llm.generate([*others, prompt], [CROWD] * len(others) + [PARAMS], use_tqdm=False)
    assert_same(ops.take(7), alone)

    # Room for both prompts but not for both answers: the later request is preempted and computed again.
    num_blocks = -(-len(others[0]) // 16) - (-len(prompt) // 16) + 2
    llm, ops = watched(checkpoint, dtype=dtype, num_blocks=num_blocks, enable_prefix_caching=False)
    llm.generate([others[0], prompt], [CROWD, PARAMS], use_tqdm=False)
    assert llm.stats()["preemptions"] > 0
    assert_same(ops.take(7), alone)

    # The same, but what it had computed is moved to host memory and back.
    monkeypatch.setattr(loading, "measure", lambda *_args, **_: (50_000, 1))
    llm, ops = watched(
        checkpoint, dtype=dtype, num_blocks=num_blocks, enable_prefix_caching=False, swap_space=0.01
    )
    llm.generate([others[0], prompt], [CROWD, PARAMS], use_tqdm=False)
    assert llm.stats()["swapped_in_tokens"] > len(prompt)
    assert llm.stats()["recomputed_tokens"] == 0
    assert_same(ops.take(7), alone)
