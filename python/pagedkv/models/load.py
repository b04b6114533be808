"""Turns a `ModelSource` into a model that can run: config, weights, dtype, angles."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedkv.errors import ModelError
from pagedkv.models.config import DTYPES, ModelConfig
from pagedkv.models.gguf_file import GGUFFile
from pagedkv.models.llama import LlamaForCausalLM
from pagedkv.models.resolve import ModelSource, resolve
from pagedkv.models.weights import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint, load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for `forward`, and where it came from."""

    model: LlamaForCausalLM
    config: ModelConfig
    source: ModelSource
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights; a tensor that is used twice counts once."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())


def read_config(source: ModelSource) -> ModelConfig:
    """What the model says of itself, without its weights.

    Raises:
        ModelError: A file is missing or damaged, or the model asks for what the code does not do.
    """
    if source.kind == "gguf":
        return ModelConfig.from_gguf(GGUFFile(source.path))
    config = source.read_json("config.json")
    if config is None:
        raise ModelError(f"{source.path} has no config.json")
    return ModelConfig.from_hf(config, source.read_json("generation_config.json"))


def load_model(
    model: str | Path | ModelSource | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    *,
    max_len: int | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Loads a model.

    Args:
        model: What `resolve` takes, or what it returned.
        dtype: "auto", "float32", "bfloat16" or "float16". "auto" is the checkpoint's; for GGUF it is
            bfloat16 where the device computes in it, else float32.
        device: Where the weights shall be.
        max_len: Length of the table of RoPE angles in tokens; the model's longest if None. The model's
            `set_max_len` changes it.
        progress: Show a bar.

    Raises:
        ModelError: The model cannot be found, read or run.
    """
    source = model if isinstance(model, ModelSource) else resolve(model)
    device = torch.device(device)
    config, checkpoint = _open(source)
    resolved = _dtype(dtype, config, checkpoint, device)
    with torch.device("meta"):
        network = LlamaForCausalLM(config)
    load_weights(network, config, checkpoint, resolved, device, progress=progress)
    network.set_max_len(max_len or config.max_len, device)
    network.eval()
    if config.max_len_cap is not None:
        logger.info("sequences are limited to %d tokens: %s", config.max_len, config.max_len_reason)
    return LoadedModel(network, config, source, resolved, device)


def _open(source: ModelSource) -> tuple[ModelConfig, Checkpoint]:
    """The config and the mapped weights."""
    if source.kind == "hf":
        return read_config(source), SafetensorsCheckpoint(source.path)
    file = GGUFFile(source.path)
    config = ModelConfig.from_gguf(file)
    return config, GGUFCheckpoint(file, config)


def _dtype(
    dtype: str | torch.dtype, config: ModelConfig, checkpoint: Checkpoint, device: torch.device
) -> torch.dtype:
    """The dtype to compute in."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if dtype in DTYPES.values():
        return torch.float32 if isinstance(dtype, str) else dtype
    if dtype != "auto":
        raise ModelError(f"dtype is {dtype!r}; allowed are auto, {', '.join(DTYPES)}")
    stored = config.dtype or checkpoint.dtype
    if stored in DTYPES.values() and stored is not None:
        return stored
    return torch.bfloat16 if computes_in_bfloat16(device) else torch.float32


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware, rather than by way of float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        from pagedkv._core import cpu_features
    except ImportError:
        return False
    return "avx512bf16" in cpu_features()
