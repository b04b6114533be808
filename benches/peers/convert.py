"""Expands the demo model's GGUF for the peers: model directories and GGUF files in bfloat16 and float32.

The published weights are in bfloat16, so the expanded ones are rounded to it, and those in float32 are the
same numbers. `convert.py MODELS` runs in the environment that setup.sh makes for it. What transformers' own
reader of GGUF files gets wrong for this model is put right: the tokenizer's splitting of digits and the
norm's epsilon.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

SOURCE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NORM_EPS = 1e-5
ROPE_THETA = 100000.0
SPLITTING = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def _edit(path: Path, changes: dict[str, Any], dropped: tuple[str, ...] = ()) -> None:
    """Sets and removes keys of a JSON file."""
    content = json.loads(path.read_text())
    content.update(changes)
    for key in dropped:
        content.pop(key, None)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def write_directory(models: Path, name: str, dtype: torch.dtype) -> None:
    """One model directory as transformers and vLLM read it."""
    target = models / name
    model = AutoModelForCausalLM.from_pretrained(models, gguf_file=SOURCE, dtype=torch.float32)
    model = model.to(torch.bfloat16).to(dtype)
    # Otherwise the directory would claim to hold a quantised model.
    for holder, attribute in (
        (model.config, "quantization_config"),
        (model, "hf_quantizer"),
        (model, "is_quantized"),
    ):
        if hasattr(holder, attribute):
            delattr(holder, attribute)
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(models, gguf_file=SOURCE)
    tokenizer.save_pretrained(target)
    dtype_name = str(dtype).removeprefix("torch.")
    shape = {"dtype": dtype_name, "torch_dtype": dtype_name, "architectures": ["LlamaForCausalLM"]}
    _edit(
        target / "config.json",
        {
            **shape,
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA,
            "_name_or_path": "SmolLM2-135M-Instruct",
        },
        ("quantization_config",),
    )
    _edit(target / "tokenizer.json", {"pre_tokenizer": SPLITTING, "post_processor": None})
    _edit(
        target / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192, "add_bos_token": False},
        ("backend", "is_local", "local_files_only"),
    )


def write_gguf(models: Path, name: str, quantization: GGMLQuantizationType, file_type: int) -> None:
    """One GGUF file with the same numbers, for llama.cpp."""
    reader = GGUFReader(models / SOURCE)
    writer = GGUFWriter(models / f"{name}.gguf", "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.quantization_version"):
            continue
        if key == "general.file_type":
            writer.add_file_type(file_type)
            continue
        item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=item)
    for tensor in reader.tensors:
        shape = [int(length) for length in reversed(tensor.shape)]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        values = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
        if values.ndim == 1 or quantization == GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, values, raw_dtype=GGMLQuantizationType.F32)
        else:
            writer.add_tensor(tensor.name, quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    write_directory(directory, "smollm2-135m", torch.bfloat16)
    write_directory(directory, "smollm2-135m-f32", torch.float32)
    write_gguf(directory, "smollm2-135m-bf16", GGMLQuantizationType.BF16, 32)
    write_gguf(directory, "smollm2-135m-f32", GGMLQuantizationType.F32, 0)
