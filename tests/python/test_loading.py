"""From options to an engine: the size of the pool, the longest length, the device."""

import logging
import shutil

import pytest
import torch

from pagedkv import LLM, InvalidRequest, SamplingParams, loading
from pagedkv.errors import BackendUnavailable, ModelError
from pagedkv.models import OpenedModel, load_model, open_model
from tiny_llm import assert_at_rest, check_all


def test_the_longest_length_is_capped_to_what_the_pool_holds(checkpoint, caplog):
    options = checkpoint.options | {"num_blocks": 10, "max_model_len": None}
    with caplog.at_level(logging.INFO, logger="pagedkv"):
        llm = LLM(**options)
    assert llm.max_model_len == 160
    assert (
        "max_model_len is 160 of the 8192 tokens that the model was trained for: "
        "the pool holds 10 blocks of 16 tokens"
    ) in caplog.messages
    assert any(
        message.startswith("the cache holds 160 tokens in 10 blocks of 16") for message in caplog.messages
    )
    assert any(message.startswith("there will be no pins and no sessions") for message in caplog.messages)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([[5] * 30], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 130
    with pytest.raises(InvalidRequest, match="maximum context length is 160 tokens"):
        llm.generate([[5] * 170], params, use_tqdm=False)
    assert_at_rest(llm)
    with pytest.raises(
        ValueError, match=r"^max_model_len is 161, allowed: 2\.\.160, because the pool holds 10"
    ):
        LLM(**options | {"max_model_len": 161})


def test_the_room_of_pins_and_sessions_is_said(checkpoint, caplog):
    with caplog.at_level(logging.INFO, logger="pagedkv"):
        LLM(**checkpoint.options)
    assert "pins and sessions may have 100 blocks together" in caplog.messages
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="pagedkv"):
        LLM(**checkpoint.options, enable_prefix_caching=False)
    assert not any("pins and sessions" in message for message in caplog.messages)


def test_kv_memory_sizes_the_pool(checkpoint):
    # 2 layers x 2 heads x 16 elements x key and value x 4 bytes are 512 bytes a token, 8 KiB a block.
    options = checkpoint.options | {"num_blocks": None, "max_model_len": None}
    llm = LLM(**options, kv_memory="1MiB")
    assert llm.snapshot()["num_blocks"] == 127
    assert llm.max_model_len == 127 * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_blocks": 50_000_000},
            r"^num_blocks asks for 50000000 blocks, which take 381\.47 GiB and 64\.00 KiB .* at most \d+$",
        ),
        (
            {"num_blocks": None, "kv_memory": "100TiB"},
            r"^kv_memory asks for .*, which take 1024\.00 GiB and 64\.00 KiB for positions, but .* GiB$",
        ),
    ],
)
def test_a_pool_beyond_the_memory_is_refused(monkeypatch, checkpoint, options, message):
    monkeypatch.setattr(loading, "free_memory", lambda: 64 * 2**30)
    with pytest.raises(ValueError, match=message):
        LLM(**checkpoint.options | options)


def test_positions_beyond_the_memory_are_refused(monkeypatch, checkpoint):
    monkeypatch.setattr(loading, "free_memory", lambda: 2**20)
    # A position takes 2 x 16 x 4 bytes.
    with pytest.raises(
        ValueError, match=r"^max_model_len is 8192, whose positions take 1\.00 MiB beside a cache"
    ):
        LLM(**checkpoint.options | {"num_blocks": 512, "max_model_len": None})


TENANTS = [
    {"name": "a", "cache_salt": "a", "min_blocks": 300},
    {"name": "b", "cache_salt": "b", "min_blocks": 200},
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_model_len": 8193, "num_blocks": 600},
            r"^max_model_len is 8193, allowed: 2\.\.8192, the length",
        ),
        ({"max_model_len": 6401}, r"^max_model_len is 6401, allowed: 2\.\.6400, because the pool holds 400"),
        ({"num_blocks": 2**28}, r"^num_blocks is 268435456, allowed: 2\.\.134217726"),
        (
            {"num_blocks": None, "kv_memory": "16KiB"},
            r"^kv_memory is 16\.00 KiB, allowed: at least 24\.00 KiB",
        ),
        ({"swap_space": 1e-9}, r"^swap_space is 1 bytes, allowed: 0, or at least 8\.00 KiB"),
        ({"swap_space": 2**20}, r"^swap_space is 1024\.00 TiB, but .* of host memory are free"),
        ({"max_pinned_blocks": 369}, r"^max_pinned_blocks is 369, allowed: 0 to 368, so that a sequence"),
        (
            {"max_pinned_blocks": 9, "max_pinned_blocks_per_tenant": 10},
            r"^max_pinned_blocks_per_tenant is 10, allowed: 0 to 9, which is max_pinned_blocks$",
        ),
        ({"tenants": TENANTS}, r"^min_blocks is 500, allowed: up to 400 for all tenants together"),
        ({"kv_cache_dtype": "fp8"}, r"^kv_cache_dtype is 'fp8', which needs a GPU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_before_the_weights_are_read(monkeypatch, checkpoint, options, message):
    monkeypatch.setattr(OpenedModel, "read", lambda *_args, **_options: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=message):
        LLM(**checkpoint.options | options)


def test_files_that_make_no_tokenizer_are_refused_before_the_weights_are_read(
    monkeypatch, checkpoint, tmp_path
):
    monkeypatch.setattr(OpenedModel, "read", lambda *_args, **_options: pytest.fail("the weights were read"))
    copy = shutil.copytree(checkpoint.path, tmp_path / "copy")
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLM(**checkpoint.options | {"model": str(copy)})
    monkeypatch.setenv("PAGEDKV_POISON", "maybe")
    with pytest.raises(ValueError, match=r"^PAGEDKV_POISON is 'maybe', allowed: 0 or 1"):
        LLM(**checkpoint.options)


def test_weights_beyond_the_memory_are_refused(monkeypatch, checkpoint):
    num_bytes = open_model(checkpoint.path).num_bytes
    assert num_bytes == load_model(checkpoint.path).num_bytes
    monkeypatch.setattr(loading, "free_memory", lambda: num_bytes - 1)
    with pytest.raises(ValueError, match=r"^the weights take .* as torch\.float32, but .* are free$"):
        LLM(**checkpoint.options)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_memory_that_cannot_be_had_is_one_line(monkeypatch, checkpoint, error):
    def fail(*_arguments, **_options):
        raise error("no room\nException raised from somewhere")

    monkeypatch.setattr(loading, "KVCache", fail)
    with pytest.raises(ValueError, match=r"^400 blocks of 16 tokens cannot be allocated, .*: no room$"):
        LLM(**checkpoint.options)


def gpu(monkeypatch, *, with_kernels):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("pagedkv.ops.has_cuda_kernels", lambda: with_kernels)


@pytest.mark.parametrize("with_kernels", [True, False])
def test_auto_is_the_cpu_even_where_there_is_a_gpu(monkeypatch, caplog, with_kernels):
    gpu(monkeypatch, with_kernels=with_kernels)
    assert loading.choose_device("auto") == torch.device("cpu")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the CUDA kernels have never run on one, so the CPU computes" in record.message
    assert "--device cuda" in record.message
    assert loading.choose_device("cuda") == torch.device("cuda:0")


def test_a_gpu_without_kernels_is_no_obstacle_unless_it_is_asked_for(monkeypatch, checkpoint, expected):
    gpu(monkeypatch, with_kernels=False)
    check_all(LLM(**checkpoint.options | {"device": "auto"}), expected[:2])
    for device in ("cuda", "cuda:1"):
        with pytest.raises(BackendUnavailable, match="no CuPy, which loads the CUDA kernels"):
            LLM(**checkpoint.options | {"device": device})


def test_without_a_gpu_auto_is_the_cpu(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loading.choose_device("auto") == torch.device("cpu")
    assert loading.choose_device("cuda:1") == torch.device("cuda:1")
    assert caplog.messages == []


def test_the_model_is_named(llm, checkpoint):
    assert llm.model_name == checkpoint.path.name
