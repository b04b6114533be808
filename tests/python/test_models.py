"""The forward pass through the paged cache against transformers on the same checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from arena_writer import PagedRun, TestSequence
from pagedkv.models import load_model
from pagedkv.ops import choose
from tiny_models import FAMILIES, ROPE_KINDS, hf_from_demo, make_tiny

REFERENCE = choose("reference")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def prompt(num_tokens: int, vocab_size: int = 200) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    ids: list[int] = torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()
    return ids


@torch.inference_mode()
def hf_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    """The largest difference is within `tolerance` of the range of the logits, and greedy tokens are
    equal."""
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape
    span = float(theirs.max() - theirs.min())
    difference = float((ours - theirs).abs().max())
    assert difference <= tolerance * span, f"{difference} of a range of {span}"
    # A near tie may fall either way; a token that is clearly best must be.
    best = theirs.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * tolerance * span
    assert clear.float().mean() > 0.9
    assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


# Every family and every kind at positions up to 8,000; the other pairs far enough to show what is stretched.
PAIRS = [
    (family, rope, 8000 if rope == "default" or family == "llama" else 1500)
    for family in FAMILIES
    for rope in ROPE_KINDS
]


@pytest.mark.parametrize(("family", "rope", "num_tokens"), PAIRS)
def test_logits_equal_transformers(family: str, rope: str, num_tokens: int, tmp_path: Path) -> None:
    theirs = hf_logits(make_tiny(family, tmp_path, rope=rope), prompt(num_tokens))
    loaded = load_model(tmp_path)
    assert loaded.config.max_len >= 8000
    run = PagedRun(loaded, REFERENCE, block_size=64, num_blocks=num_tokens // 64 + 1)
    assert_close(run.logits(prompt(num_tokens), chunk=1000), theirs)


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
def test_chunks_and_block_sizes_do_not_matter(block_size: int, chunk: int, tmp_path: Path) -> None:
    theirs = hf_logits(make_tiny("qwen3", tmp_path), prompt(300))
    run = PagedRun(load_model(tmp_path), REFERENCE, block_size=block_size, num_blocks=300 // block_size + 1)
    assert_close(run.logits(prompt(300), chunk), theirs)


def test_sequences_of_one_step_do_not_see_each_other(tmp_path: Path) -> None:
    hf = make_tiny("llama", tmp_path)
    run = PagedRun(load_model(tmp_path), REFERENCE, block_size=4, num_blocks=60)
    ids = prompt(90)
    sequences = [TestSequence(ids[:40]), TestSequence(ids[40:57]), TestSequence(ids[57:])]
    # Two prompts in chunks while the third decodes, then all of what is left.
    run.step([(sequences[2], 20)])
    run.step([(sequences[2], 1), (sequences[0], 7), (sequences[1], 9)])
    rest = [(sequence, len(sequence.token_ids) - sequence.num_computed) for sequence in sequences]
    parts = run.step(rest).split([num_tokens for _, num_tokens in rest])
    for sequence, part in zip(sequences, parts, strict=True):
        theirs = hf_logits(hf, sequence.token_ids)
        assert_close(part, theirs[-len(part) :])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bias_on_every_projection(family: str, tmp_path: Path) -> None:
    fields = {"attention_bias": True} | ({"mlp_bias": True} if family == "llama" else {})
    theirs = hf_logits(make_tiny(family, tmp_path, **fields), prompt(50))
    run = PagedRun(load_model(tmp_path), REFERENCE, block_size=16, num_blocks=8)
    assert_close(run.logits(prompt(50), 50), theirs)


def test_head_dim_apart_from_hidden_size_and_one_key_head(tmp_path: Path) -> None:
    theirs = hf_logits(make_tiny("llama", tmp_path, head_dim=32, num_key_value_heads=1), prompt(50))
    run = PagedRun(load_model(tmp_path), REFERENCE, block_size=16, num_blocks=8)
    assert_close(run.logits(prompt(50), 13), theirs)


def test_a_sliding_window_is_exact_up_to_its_length(tmp_path: Path) -> None:
    hf = make_tiny("mistral", tmp_path, sliding_window=64)
    loaded = load_model(tmp_path)
    assert loaded.config.max_len == 64
    assert "sliding window of 64" in loaded.config.max_len_reason
    run = PagedRun(loaded, REFERENCE, block_size=16, num_blocks=8)
    assert_close(run.logits(prompt(64), 64), hf_logits(hf, prompt(64)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_where_transformers_rounds(dtype: torch.dtype, tmp_path: Path) -> None:
    make_tiny("qwen3", tmp_path).to(dtype).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.dtype == dtype
    hf = type(make_tiny("qwen3", tmp_path / "again")).from_pretrained(tmp_path, dtype=dtype).eval()
    theirs = hf_logits(hf, prompt(40))
    exact = hf_logits(hf.float(), prompt(40))
    ours = PagedRun(loaded, REFERENCE, block_size=16, num_blocks=8).logits(prompt(40), 40)
    # Both are off from f32 by rounding; ours must not be off from theirs by more than theirs is from f32.
    assert (ours - theirs).abs().mean() <= (theirs - exact).abs().mean()


def test_a_step_without_rows_writes_the_cache_and_returns_nothing(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    run = PagedRun(load_model(tmp_path), REFERENCE, block_size=16, num_blocks=8)
    sequence = TestSequence(prompt(20))
    batch = run.batch([(sequence, 10)])
    unsampled = batch.__class__(**{**vars(batch), "sample_rows": batch.sample_rows[:0]})
    with torch.inference_mode():
        logits = run.model(unsampled, run.kv_cache, REFERENCE)
    assert logits.shape == (0, 200)
    key_cache, value_cache = run.kv_cache.layers[1]
    written = key_cache[sequence.blocks[0]]
    assert not written[:, :10].isnan().any()
    assert written[:, 10:].isnan().all()
    assert not value_cache[sequence.blocks[0]][:, :10].isnan().any()


def test_the_demo_model_continues_a_sentence_as_transformers_does() -> None:
    loaded = load_model(None, "float32")
    hf = hf_from_demo()
    ids = prompt(64, vocab_size=49152)
    run = PagedRun(loaded, REFERENCE, block_size=16, num_blocks=8)
    assert_close(run.logits(ids, 17), hf_logits(hf, ids))


def test_kv_bytes_per_token() -> None:
    config = load_model(None, "float32").config
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 30 * 3 * 64 * 2
