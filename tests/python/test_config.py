"""The options of an engine: defaults, refusals, and the command line."""

import argparse
import re
from dataclasses import FrozenInstanceError, fields

import pytest

from pagedkv.config import (
    ELSEWHERE,
    EngineConfig,
    EngineOptions,
    add_cli_options,
    check_names,
    from_cli,
    parse_bytes,
    poison_requested,
)


def read(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_cli_options(parser)
    return from_cli(parser.parse_args(arguments))


def test_the_defaults_are_those_of_the_documented_table():
    config = EngineConfig()
    assert {field.name: getattr(config, field.name) for field in fields(config)} == {
        "model": None,
        "dtype": "auto",
        "device": "auto",
        "block_size": 16,
        "max_model_len": None,
        "max_num_seqs": 256,
        "max_num_batched_tokens": None,
        "enable_prefix_caching": True,
        "overlap": None,
        "tenants": (),
        "kv_memory": None,
        "gpu_memory_utilization": 0.9,
        "kv_cache_dtype": "auto",
        "bulk_attention": False,
        "cuda_graphs": True,
        "num_blocks": None,
        "max_pinned_blocks": None,
        "max_pinned_blocks_per_tenant": None,
        "swap_space": None,
        "threads": None,
        "cpu_isa": "auto",
        "seed": None,
    }
    assert config.num_threads >= 1
    assert config.num_batched_tokens == 512
    assert config.kv_bytes is None


def test_the_typed_keyword_arguments_are_the_fields():
    assert {"model", *EngineOptions.__annotations__} == {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("model", "", "a directory"),
        ("model", 7, "a directory"),
        ("dtype", "int8", "auto, float32, bfloat16, float16"),
        ("device", "tpu", "auto, cpu, cuda or cuda:<number>"),
        ("device", "cuda:300", "auto, cpu, cuda or cuda:<number>"),
        ("device", "cuda:01", "auto, cpu, cuda or cuda:<number>"),
        ("device", "cuda:-1", "auto, cpu, cuda or cuda:<number>"),
        ("block_size", 0, "a power of two in 1..256"),
        ("block_size", 12, "a power of two in 1..256"),
        ("block_size", 512, "a power of two in 1..256"),
        ("block_size", True, "a power of two in 1..256"),
        ("block_size", "16", "a power of two in 1..256"),
        ("max_model_len", 1, "an integer >= 2"),
        ("max_num_seqs", 0, "an integer in 1..16777216"),
        ("max_num_batched_tokens", -1, "an integer in 1..16777216"),
        ("max_num_batched_tokens", 2.0, "an integer in 1..16777216"),
        ("enable_prefix_caching", 1, "True or False"),
        ("kv_memory", "lots", "a number of bytes"),
        ("gpu_memory_utilization", 0, "a number above 0, at most 1"),
        ("gpu_memory_utilization", 1.5, "a number above 0, at most 1"),
        ("gpu_memory_utilization", True, "a number above 0, at most 1"),
        ("gpu_memory_utilization", "most", "a number above 0, at most 1"),
        ("kv_cache_dtype", "int8", "auto, fp8"),
        ("bulk_attention", 1, "True or False"),
        ("cuda_graphs", "off", "True or False"),
        ("num_blocks", 1, "an integer >= 2"),
        ("max_pinned_blocks_per_tenant", -1, "an integer in 0..16777216"),
        ("swap_space", -1, "a number of GiB in 0..1048576, or None"),
        ("swap_space", float("nan"), "a number of GiB in 0..1048576, or None"),
        ("swap_space", float("inf"), "a number of GiB in 0..1048576, or None"),
        ("swap_space", "4GiB", "a number of GiB in 0..1048576, or None"),
        ("swap_space", True, "a number of GiB in 0..1048576, or None"),
        ("threads", 0, "an integer in 1..1024"),
        ("cpu_isa", "sse2", "auto, amx_bf16, avx512_bf16, avx512, avx2"),
        ("threads", 1025, "an integer in 1..1024"),
        ("seed", -1, "an integer in 0..2^64-1"),
        ("seed", 2**64, "an integer in 0..2^64-1"),
    ],
)
def test_a_refusal_names_option_value_and_what_is_allowed(option, value, allowed):
    with pytest.raises(ValueError, match=rf"^{option} is ") as refusal:
        EngineConfig(**{option: value})
    assert str(refusal.value).startswith(f"{option} is {value!r}, allowed: {allowed}")


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        EngineConfig(tensor_parallel_size=4)


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [
        ({"device": "cpu"}, 512),
        ({"device": "cuda:1"}, 2048),
        ({"max_num_seqs": 700}, 700),
        ({"max_num_seqs": 700, "max_num_batched_tokens": 64}, 64),
    ],
)
def test_a_step_has_as_many_tokens_as_suit_the_device(options, num_tokens):
    assert EngineConfig(**options).num_batched_tokens == num_tokens


def test_it_is_frozen():
    with pytest.raises(FrozenInstanceError):
        EngineConfig().block_size = 32


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (1, 1),
        ("1048576", 2**20),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        (" 2 gib ", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("16 kB", 16_000),
        ("1TiB", 2**40),
        ("10B", 10),
    ],
)
def test_bytes_are_read(value, num_bytes):
    assert parse_bytes("kv_memory", value) == num_bytes
    assert EngineConfig(kv_memory=value).kv_bytes == num_bytes


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "2Gi", "-1", "1e9", "2 GiB GiB", "0", "0.1B", 0, -5, True, 1.5, 2**63, "9" * 400 + ".5GiB"],
)
def test_what_is_no_number_of_bytes_is_refused(value):
    with pytest.raises(ValueError, match=r'^kv_memory is .* "512MiB" or "2GiB"$'):
        parse_bytes("kv_memory", value)


def test_the_command_line_has_every_option():
    assert read() == EngineConfig()
    assert read(
        *("--model", "some/model", "--dtype", "float32", "--device", "cpu", "--block-size", "32"),
        *("--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "512"),
        *("--no-enable-prefix-caching", "--kv-memory", "2GiB", "--num-blocks", "100", "--threads", "3"),
        *("--max-pinned-blocks-per-tenant", "5"),
        *("--gpu-memory-utilization", "0.5", "--kv-cache-dtype", "fp8", "--bulk-attention"),
        *("--cpu-isa", "avx2", "--no-cuda-graphs", "--seed", "18446744073709551615"),
    ) == EngineConfig(
        model="some/model",
        dtype="float32",
        device="cpu",
        block_size=32,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        kv_memory=2 * 2**30,
        gpu_memory_utilization=0.5,
        kv_cache_dtype="fp8",
        bulk_attention=True,
        cuda_graphs=False,
        num_blocks=100,
        max_pinned_blocks_per_tenant=5,
        threads=3,
        cpu_isa="avx2",
        seed=2**64 - 1,
    )
    assert read("--enable-prefix-caching").enable_prefix_caching is True


def test_the_command_line_refuses_what_the_config_refuses():
    with pytest.raises(ValueError, match=r"^block_size is 12, allowed: a power of two"):
        read("--block-size", "12")
    with pytest.raises(argparse.ArgumentError, match=r"--block-size.*'x'"):
        read("--block-size", "x")
    with pytest.raises(argparse.ArgumentError, match=r"--dtype.*int8.*float16"):
        read("--dtype", "int8")


@pytest.mark.parametrize(("value", "poisoned"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_poison_is_read_from_the_environment(monkeypatch, value, poisoned):
    monkeypatch.delenv("PAGEDKV_POISON", raising=False)
    if value is not None:
        monkeypatch.setenv("PAGEDKV_POISON", value)
    assert poison_requested() is poisoned


def test_any_other_poison_is_refused(monkeypatch):
    monkeypatch.setenv("PAGEDKV_POISON", "yes")
    with pytest.raises(ValueError, match=r"^PAGEDKV_POISON is 'yes', allowed: 0 or 1$"):
        poison_requested()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("modle", "did you mean 'model'?"),
        ("max_num_seq", "did you mean 'max_num_seqs'?"),
        ("enforce_eager", "cuda_graphs=False does that"),
        ("kv_cache_memory_bytes", "it is called kv_memory"),
        ("xyz", "LLM has no option 'xyz'"),
    ],
)
def test_an_unknown_option_is_named_with_what_may_be_meant(name, hint):
    with pytest.raises(TypeError, match=re.escape(hint)):
        check_names("LLM", {"block_size": 16, name: 1})


def test_what_other_engines_call_otherwise_is_an_option_here():
    renamed = [hint.removeprefix("it is called ") for hint in ELSEWHERE.values() if "it is called" in hint]
    assert len(renamed) > 3
    assert set(renamed) <= EngineOptions.__annotations__.keys()
    assert not ELSEWHERE.keys() & EngineOptions.__annotations__.keys()
