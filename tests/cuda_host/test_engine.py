"""A tiny model through the whole engine, its operations by the CUDA kernels that the CPU executes."""

from types import SimpleNamespace

import pytest
import torch

from host_device import HostDevice
from pagedkv import LLM, SamplingParams, gpu, loading
from pagedkv.batch import arena_section
from pagedkv.errors import RequestFailed
from pagedkv.ops import choose
from pagedkv.ops.cuda import CudaOps
from tiny_llm import EOS, GREEDY, Checkpoint, assert_at_rest, sampled, texts
from tiny_models import make_tiny
from tiny_tokenizers import CHATML, byte_level, save_directory

NUM_TOKENS = 10
# By how much the best logit must lead where the order of sums and the rounding to half may not matter.
CLEAR_MARGIN = 0.05


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Qwen3, whose query and key heads are normalised too, with heads of 64 elements."""
    path = tmp_path_factory.mktemp("tiny")
    backend = byte_level()
    vocab_size = backend.get_vocab_size()
    save_directory(path, backend, {"chat_template": CHATML, "bos_token": "<s>", "eos_token": "</s>"})
    model = make_tiny(
        "qwen3", path, vocab_size=vocab_size, head_dim=64, bos_token_id=0, eos_token_id=EOS, seed=3
    )
    return Checkpoint(path, model, vocab_size)


def engine(checkpoint, monkeypatch, ops, **changes):
    monkeypatch.setenv("PAGEDKV_POISON", "1")
    monkeypatch.setattr(gpu, "choose_ops", lambda *_: ops)
    options = {"dtype": "float16", "block_size": 8, "num_blocks": 80, "seed": 1, "max_num_seqs": 5}
    return LLM(**checkpoint.options | options | changes)


def prompts(checkpoint):
    """Two that begin alike, one of a single token, and one that is computed in chunks."""
    text = [7 * i % 190 + 4 for i in range(90)]
    return [text[:30], [*text[:24], 9, 11], [5], text]


@pytest.mark.parametrize(
    ("options", "margin"),
    [
        ({}, CLEAR_MARGIN),
        ({"bulk_attention": True}, CLEAR_MARGIN),
        ({"kv_cache_dtype": "fp8"}, 6 * CLEAR_MARGIN),
    ],
    ids=["16 bits", "bulk", "fp8"],
)
def test_answers_are_the_models(checkpoint, monkeypatch, options, margin):
    device = HostDevice(capacity=8)
    ops = CudaOps(device, swizzled="bulk_attention" in options)
    llm = engine(checkpoint, monkeypatch, ops, max_num_batched_tokens=48, **options)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    num_clear = 0
    for prompt, output in zip(
        prompts(checkpoint), llm.generate(prompts(checkpoint), params, use_tqdm=False), strict=True
    ):
        expected = checkpoint.greedy(prompt, NUM_TOKENS)
        unclear = (i for i, one in enumerate(expected.margins) if one < margin)
        clear = next(unclear, NUM_TOKENS)
        assert output.outputs[0].token_ids[:clear] == expected.token_ids[:clear]
        num_clear += clear
    assert num_clear > 2 * NUM_TOKENS * (CLEAR_MARGIN / margin), "a comparison that compares little"
    assert_at_rest(llm)
    decodes = {"bulk_attention": "attention_bulk", "kv_cache_dtype": "attention_fp8"}
    names = {"attention" if not options else decodes[next(iter(options))]}
    for name in names | {"rope_cache", "add_rms_norm", "silu_mul", "sample"}:
        assert sum(device.counters(name).values()) > 0, f"{name} was never launched"


def test_a_preempted_sequence_comes_back_from_host_memory(checkpoint, monkeypatch):
    monkeypatch.setattr(loading, "measure", lambda *_args, **_: (50_000, 1))
    device = HostDevice(capacity=8)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts_of = []
    for num_blocks, swap_space in ((80, 0), (16, 0.01)):
        llm = engine(
            checkpoint,
            monkeypatch,
            CudaOps(device),
            num_blocks=num_blocks,
            swap_space=swap_space,
            max_model_len=100,
            enable_prefix_caching=False,
        )
        texts_of.append(texts(llm.generate(prompts(checkpoint)[:3], params, use_tqdm=False)))
        stats = llm.stats()
        assert_at_rest(llm)
    assert stats["swapped_in_tokens"] > 0
    assert stats["recomputed_tokens"] == 0
    assert texts_of[0] == texts_of[1]


def test_drawn_answers_are_the_references(checkpoint, monkeypatch):
    """Forks copy blocks; parameters differ between the rows of a step."""
    params = [sampled(seed=3, n=2), sampled(seed=4, top_k=20), sampled(seed=5, top_p=0.8), GREEDY]
    params[3] = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    device = HostDevice()
    given, expected = (
        texts(engine(checkpoint, monkeypatch, ops).generate(prompts(checkpoint), params, use_tqdm=False))
        for ops in (CudaOps(device), choose("reference"))
    )
    assert given == expected
    assert device.counters("copy_blocks")["store_bytes"] > 0


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_tokens_are_taken_from_the_step_before(checkpoint, monkeypatch, backend):
    """As if each step had been scheduled before the tokens of the one before it were known."""
    ops = CudaOps(HostDevice()) if backend == "cuda" else choose("cpu")
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), sampled(seed=3, n=2)]
    llm = engine(checkpoint, monkeypatch, ops)
    expected = texts(llm.generate(prompts(checkpoint)[:2], params, use_tqdm=False))
    runner, rows_before, num_taken = llm._engine.runner, [], 0
    launch = runner.launch

    def launch_early(header, arena, meanwhile):
        nonlocal rows_before, num_taken
        # A row is one of a request and a sample; those of decodes come first, as their tokens do.
        rows = [tuple(row[:3]) for row in arena_section(arena, "rows").tolist()]
        for index, row in enumerate(rows[: header.num_decodes]):
            if row in rows_before:
                arena_section(arena, "token_ids")[index] = 7
                arena_section(arena, "token_source")[index] = rows_before.index(row)
                num_taken += 1
        rows_before = rows
        counts = {name: getattr(header, name) for name in dir(header) if name.startswith("num_")}
        counts["num_followers"] = int((arena_section(arena, "token_source") >= 0).sum())
        return launch(SimpleNamespace(**counts), arena, meanwhile)

    monkeypatch.setattr(runner, "launch", launch_early)
    llm.reset_prefix_cache()
    assert texts(llm.generate(prompts(checkpoint)[:2], params, use_tqdm=False)) == expected
    assert num_taken > 10


def test_a_row_that_cannot_be_sampled_is_a_token_to_the_next_step(checkpoint, monkeypatch):
    """The device reads it before the host has seen it; what is no token there would end the device."""
    ops = CudaOps(HostDevice())
    llm = engine(checkpoint, monkeypatch, ops, overlap=True, cuda_graphs=False)
    sample, model, num_calls, least = ops.sample, llm._engine.runner.model, 0, []

    def broken(logits, sampling):
        nonlocal num_calls
        num_calls += 1
        tokens = sample(logits, sampling)
        return torch.full_like(tokens, -1) if num_calls == 3 else tokens

    def watched(batch, *rest):
        least.append(int(batch.token_ids.min()))
        return model(batch, *rest)

    monkeypatch.setattr(ops, "sample", broken)
    monkeypatch.setattr(llm._engine.runner, "model", watched)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with pytest.raises(RequestFailed, match="row 0 of the logits is NaN somewhere"):
        llm.generate(prompts(checkpoint)[2:3], params, use_tqdm=False)
    assert len(least) == 4
    assert min(least) >= 0
    assert_at_rest(llm)
