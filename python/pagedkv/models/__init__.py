"""The models: what a checkpoint asks for, its weights, and the forward pass over the paged cache.

`open_model` is the door: it finds and checks everything but the weights, which `OpenedModel.read` then reads.
`config` reads what a checkpoint says of itself and refuses what the code does not do, `weights` reads tensors
from safetensors or GGUF, `llama` computes, `rope` makes the angles, `resolve` finds the files.
"""

from pagedkv.models.config import ModelConfig
from pagedkv.models.load import LoadedModel, OpenedModel, load_model, open_model, read_config
from pagedkv.models.resolve import ModelSource, resolve

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "ModelSource",
    "OpenedModel",
    "load_model",
    "open_model",
    "read_config",
    "resolve",
]
