"""Turns a `ModelSource` into a model: config, dtype, weights."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedkv._core import cpu_features
from pagedkv.errors import ModelError
from pagedkv.models.config import DTYPES, ModelConfig
from pagedkv.models.gguf_config import read_gguf_config
from pagedkv.models.gguf_file import GGUFFile
from pagedkv.models.hf_config import read_hf_config
from pagedkv.models.llama import LlamaForCausalLM
from pagedkv.models.resolve import ModelSource, resolve
from pagedkv.models.weights import (
    HEAD,
    LAYERS,
    Checkpoint,
    GGUFCheckpoint,
    SafetensorsCheckpoint,
    find_sources,
    load_weights,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights. `forward` needs more: `model.pack`, and angles, `model.set_max_len`."""

    model: LlamaForCausalLM
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, until they are packed; a tensor that is used twice counts once."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())


@dataclass(frozen=True)
class OpenedModel:
    """A model whose files fit its config, before its weights are read.

    Attributes:
        network: the model on the meta device, which `read` fills in.
        config: its shape.
        dtype: what it will compute in.
        device: where its weights will be.
        sources: which tensor of the checkpoint each parameter is read from.
    """

    network: LlamaForCausalLM
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    checkpoint: Checkpoint
    sources: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take at least: a head that is stored may turn out to be the embedding."""
        parameters = dict(self.network.named_parameters())
        tied = {HEAD} if self.config.tie_word_embeddings else set()
        return sum(parameters[name].numel() for name in self.sources.keys() - tied) * self.dtype.itemsize

    def read(self, *, borrow: bool = False, progress: bool = False) -> LoadedModel:
        """Reads the weights, once.

        Args:
            borrow: Leave matrices that need no conversion in the mapped files, which must not change: for a
                model on the CPU whose matrices are packed into other memory next.
            progress: Show a bar.
        """
        load_weights(
            self.network,
            self.config,
            self.checkpoint,
            self.sources,
            self.dtype,
            self.device,
            borrow=borrow,
            progress=progress,
        )
        self.network.eval()
        return LoadedModel(self.network, self.config, self.dtype, self.device)


def read_config(source: ModelSource) -> ModelConfig:
    """What the model says of itself, without its weights.

    Raises:
        ModelError: A file is missing or damaged, or the model asks for what the code does not do.
    """
    if source.kind == "gguf":
        return read_gguf_config(GGUFFile(source.path))
    config = source.read_json("config.json")
    if config is None:
        raise ModelError(f"{source.path} has no config.json")
    return read_hf_config(config, source.read_json("generation_config.json"))


def open_model(
    model: str | Path | ModelSource | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
) -> OpenedModel:
    """Finds a model, and reads all but its weights.

    Args:
        model: What `resolve` takes, or what it returned.
        dtype: "auto", "float32", "bfloat16" or "float16". "auto" is the checkpoint's; for GGUF it is
            bfloat16 where the device computes in it, else float32.
        device: Where the weights shall be.

    Raises:
        ModelError: The model cannot be found, read or run.
    """
    source = model if isinstance(model, ModelSource) else resolve(model)
    device = torch.device(device)
    config, checkpoint = _open(source)
    _check_num_layers(config, checkpoint)
    resolved = _dtype(dtype, config, checkpoint, device)
    with torch.device("meta"):
        network = LlamaForCausalLM(config)
    sources = find_sources(network, config, checkpoint)
    if config.max_len_cap is not None:
        logger.info("sequences are limited to %d tokens: %s", config.max_len, config.max_len_reason)
    return OpenedModel(network, config, resolved, device, checkpoint, sources)


def load_model(
    model: str | Path | ModelSource | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    *,
    progress: bool = False,
) -> LoadedModel:
    """`open_model`, and the weights as well. `progress`: show a bar."""
    return open_model(model, dtype, device).read(progress=progress)


def _open(source: ModelSource) -> tuple[ModelConfig, Checkpoint]:
    """The config and the mapped weights."""
    if source.kind == "hf":
        return read_config(source), SafetensorsCheckpoint(source.path)
    file = GGUFFile(source.path)
    config = read_gguf_config(file)
    return config, GGUFCheckpoint(file, config)


def _check_num_layers(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Refuses more layers than the files hold, before modules are built for all of them.

    Fewer are found later, by the tensors that are left over.
    """
    layers = {name.split(".")[2] for name in checkpoint.shapes if name.startswith(LAYERS)}
    if config.num_layers > len(layers):
        raise ModelError(
            f"the model's config has {config.num_layers} layers, but the files hold weights of {len(layers)}"
        )


def _dtype(
    dtype: str | torch.dtype, config: ModelConfig, checkpoint: Checkpoint, device: torch.device
) -> torch.dtype:
    """The dtype to compute in."""
    given = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if given is not None and given in DTYPES.values():
        return given
    if dtype != "auto":
        raise ModelError(f"dtype is {dtype!r}; allowed are auto, {', '.join(DTYPES)}")
    stored = config.dtype or checkpoint.dtype
    if stored is not None:
        if stored not in DTYPES.values():
            raise ModelError(
                f"the checkpoint holds {stored}; choose the dtype to compute in: {', '.join(DTYPES)}"
            )
        return stored
    return torch.bfloat16 if computes_in_bfloat16(device) else torch.float32


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware, rather than by way of float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return "avx512bf16" in cpu_features()
