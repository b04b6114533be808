"""GGUF files: read like the checkpoints they were made of, refused where they ask for what is not done."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from arena_writer import PagedRun
from pagedkv.errors import ModelError
from pagedkv.models import load_model, read_config, resolve
from pagedkv.models.gguf_file import GGUFFile
from pagedkv.models.weights import gguf_tensor_name, unpermute
from pagedkv.ops import reference
from tiny_models import make_tiny

IDS = [3, 141, 59, 26, 53, 58, 97, 93]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A directory with a tiny llama."""
    make_tiny("llama", tmp_path / "tiny")
    return tmp_path / "tiny"


def logits(path: Path, dtype: str = "float32") -> torch.Tensor:
    run = PagedRun(load_model(path, dtype), reference, block_size=4, num_blocks=8)
    return run.logits(IDS, len(IDS))


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, checkpoint: Path, *, architecture: str = "llama", **values: Any) -> None:
    """A GGUF file with the tensors of a tiny checkpoint in f32, as llama.cpp's converter would write it."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for key, value in values.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(key.replace("__", "."), value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = {gguf_tensor_name(name): name for name in gguf_names(config["num_hidden_layers"])}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        array = tensor.numpy()
        num_heads = heads.get(name.split(".")[-2]) if architecture == "llama" else None
        if num_heads is not None:
            # The order that llama.cpp's rotation of neighbours wants: the two halves of a head interleaved.
            halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
            array = np.stack((halves[:, 0], halves[:, 1]), axis=2).reshape(array.shape)
        writer.add_tensor(names[name], array.copy())
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, config["head_dim"]))
    finish(writer)


def gguf_names(num_layers: int) -> list[str]:
    parts = (
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "attn_q_norm",
        "attn_k_norm",
        "ffn_norm",
    )
    names = [
        f"blk.{layer}.{part}.{kind}"
        for layer in range(num_layers)
        for part in (*parts, "ffn_gate", "ffn_up", "ffn_down")
        for kind in ("weight", "bias")
    ]
    return [*names, "token_embd.weight", "output_norm.weight", "output.weight"]


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter stores: how far each frequency is stretched."""
    plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    wavelength, original = 2 * np.pi / plain, rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    blend = (original / wavelength - low) / (high - low)
    divisors = np.where(wavelength > original / low, factor, 1 / ((1 - blend) / factor + blend))
    return np.where(wavelength < original / high, 1.0, divisors).astype(np.float32)


@pytest.mark.parametrize(
    ("family", "architecture", "rope"),
    [
        ("llama", "llama", "default"),
        ("smollm", "llama", "default"),
        ("mistral", "llama", "default"),
        ("llama", "llama", "llama3"),
        ("qwen2", "qwen2", "default"),
        ("qwen3", "qwen3", "default"),
    ],
)
def test_gguf_gives_the_logits_of_its_checkpoint(
    family: str, architecture: str, rope: str, tmp_path: Path
) -> None:
    make_tiny(family, tmp_path, rope=rope)
    write_gguf(tmp_path / "tiny.gguf", tmp_path, architecture=architecture)
    expected = load_model(tmp_path)
    loaded = load_model(tmp_path / "tiny.gguf", "float32")
    assert loaded.config.tie_word_embeddings == (family == "smollm")
    ids = [(7 * i * i + 3) % 200 for i in range(3000 if rope == "llama3" else 100)]
    runs = [PagedRun(model, reference, block_size=64, num_blocks=50) for model in (expected, loaded)]
    theirs, ours = (run.logits(ids, 1500) for run in runs)
    # The divisors of llama3 are stored as f32, which moves the angles at position 3,000 a little.
    tolerance = 1e-4 * float(theirs.max() - theirs.min()) if rope == "llama3" else 0.0
    assert float((ours - theirs).abs().max()) <= tolerance


def test_gguf_biases_of_llama_are_permuted_too(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, attention_bias=True, mlp_bias=True)
    write_gguf(tmp_path / "tiny.gguf", tmp_path)
    assert torch.equal(logits(tmp_path / "tiny.gguf"), logits(tmp_path))


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("linear", {"factor": 4.0}), ("yarn", {"factor": 4.0, "original_max_position_embeddings": 2048})],
)
def test_gguf_rope_scaling(kind: str, parameters: dict[str, Any], tmp_path: Path) -> None:
    fields = {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}
    make_tiny("llama", tmp_path, max_position_embeddings=2048, **fields)
    scaling = {"llama__rope__scaling__type": kind, "llama__rope__scaling__factor": 4.0}
    write_gguf(
        tmp_path / "tiny.gguf", tmp_path, **scaling, llama__rope__scaling__original_context_length=2048
    )
    config, expected = (read_config(resolve(path)) for path in (tmp_path / "tiny.gguf", tmp_path))
    assert config.rope.kind == kind
    assert config.max_len == expected.max_len == 8192
    assert torch.equal(logits(tmp_path / "tiny.gguf"), logits(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"llama__expert_count": 8}, "expert_count to 8, which is not supported"),
        ({"llama__final_logit_softcapping": 30.0}, "final_logit_softcapping to 30.0"),
        ({"llama__logit_scale": 0.5}, "logit_scale to 0.5"),
        ({"llama__rope__scaling__type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count is 8, but the heads have 16"),
        ({"split__count": 3}, "one of 3 parts"),
    ],
)
def test_gguf_settings_that_are_not_done_are_refused(
    values: dict[str, Any], message: str, tiny: Path
) -> None:
    write_gguf(tiny / "tiny.gguf", tiny, **values)
    with pytest.raises(ModelError, match=message):
        load_model(tiny / "tiny.gguf")


def test_gguf_of_another_architecture_is_refused(tiny: Path) -> None:
    write_gguf(tiny / "tiny.gguf", tiny, architecture="gemma3")
    with pytest.raises(
        ModelError, match=r"general\.architecture is 'gemma3'; supported are llama, qwen2, qwen3"
    ):
        load_model(tiny / "tiny.gguf")


def test_gguf_window_caps_the_length(tiny: Path) -> None:
    write_gguf(tiny / "tiny.gguf", tiny, llama__attention__sliding_window=512)
    config = read_config(resolve(tiny / "tiny.gguf"))
    assert config.max_len == 512
    assert "sliding window of 512" in config.max_len_reason


def test_a_gguf_file_cut_anywhere_is_refused(tiny: Path) -> None:
    write_gguf(tiny / "tiny.gguf", tiny)
    whole = (tiny / "tiny.gguf").read_bytes()
    cut = tiny / "cut.gguf"
    for length in (0, 3, 4, 10, 24, 60, 500, 2000, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut.gguf (cannot be read|is no GGUF file|is cut short)"):
            load_model(cut)
    cut.write_bytes(b"PK\3\4" + whole[4:])
    with pytest.raises(ModelError, match=r"begins with b'PK\\x03\\x04' instead of b'GGUF'"):
        load_model(cut)
    cut.write_bytes(whole[:4] + b"\0\0\0\3" + whole[8:])
    with pytest.raises(ModelError, match="supported are 2 and 3"):
        load_model(cut)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16", "F16"])
def test_other_gguf_types_are_read_as_the_gguf_package_reads_them(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    quantised = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("t", gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    finish(writer)
    read = GGUFFile(tmp_path / "x.gguf").read("t")
    stored = gguf.GGUFReader(tmp_path / "x.gguf").tensors[0]
    assert read.shape == (6, 64)
    assert np.array_equal(read, gguf.quants.dequantize(stored.data, quantised))
    assert np.abs(read - values).max() < 0.4


def test_gguf_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "größer", "", "\n"])
    writer.add_token_scores([0.5, -1.0, 2.0, 0.0])
    writer.add_token_types([1, 2, 3, 6])
    writer.add_bool("some.flag", True)
    writer.add_int8("some.int8", -3)
    writer.add_uint64("some.uint64", 2**63)
    writer.add_float64("some.float64", 0.1)
    writer.add_array("some.lists", [[1, 2], [3]])
    writer.add_tensor("first", np.arange(5, dtype=np.float32))
    writer.add_tensor("second", np.arange(6, dtype=np.float16).reshape(2, 3))
    finish(writer)
    ours, theirs = GGUFFile(tmp_path / "x.gguf"), gguf.GGUFReader(tmp_path / "x.gguf")
    assert {t.name: (t.data_offset, t.n_bytes) for t in theirs.tensors} == {
        t.name: (t.offset, t.num_bytes) for t in ours.tensors.values()
    }
    keys = {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert set(ours.metadata) == keys
    for key in keys - {"some.lists"}:
        assert ours.metadata[key] == theirs.fields[key].contents(), key
    assert ours.metadata["some.lists"] == [[1, 2], [3]]
    assert np.array_equal(ours.read("second"), [[0, 1, 2], [3, 4, 5]])


def test_the_demo_model() -> None:
    source = resolve(None)
    loaded = load_model(source, "float32")
    config, model = loaded.config, loaded.model
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.rms_norm_eps == 1e-5
    assert config.max_len == 8192
    assert config.eos_token_ids == (2,)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # Row 2i of a stored head is element i, row 2i + 1 is element i + 32.
    stored = GGUFFile(source.path).read("blk.4.attn_q.weight")
    q_proj = model.get_parameter("model.layers.4.self_attn.q_proj.weight").numpy()
    for head in (0, 8):
        for element in (0, 1, 31):
            assert np.array_equal(q_proj[64 * head + element], stored[64 * head + 2 * element])
            assert np.array_equal(q_proj[64 * head + 32 + element], stored[64 * head + 2 * element + 1])
    values = GGUFFile(source.path).read("blk.4.attn_v.weight")
    assert np.array_equal(model.get_parameter("model.layers.4.self_attn.v_proj.weight").numpy(), values)


def test_the_demo_weights_are_what_transformers_reads_from_the_gguf(tmp_path: Path) -> None:
    source = resolve(None)
    # A copy of two layers and without the vocabulary: transformers takes a minute for the whole.
    file, data = GGUFFile(source.path), source.path.read_bytes()
    writer = gguf.GGUFWriter(tmp_path / "copy.gguf", "llama")
    for key, value in file.metadata.items():
        if key.startswith("llama."):
            value = 2 if key == "llama.block_count" else value
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for tensor in file.tensors.values():
        if tensor.name.startswith("blk.") and not tensor.name.startswith(("blk.0.", "blk.1.")):
            continue
        raw = np.frombuffer(data, np.uint8, tensor.num_bytes, tensor.offset)
        writer.add_tensor(tensor.name, raw.reshape(*tensor.shape[:-1], -1), raw_dtype=tensor.kind)
    finish(writer)
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2))
    read = load_gguf_checkpoint(tmp_path / "copy.gguf", return_tensors=True, model_to_load=names)
    model = load_model(source, "float32").model
    assert len(read["tensors"]) == 2 * 9 + 2
    for name, tensor in read["tensors"].items():
        assert torch.equal(model.get_parameter(name), tensor), name


def test_unpermute_inverts_the_interleaving_of_halves() -> None:
    rows = np.arange(16, dtype=np.float32)  # two heads of 8 elements
    interleaved = np.array([0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15], dtype=np.float32)
    assert np.array_equal(unpermute(interleaved, 2), rows)
