"""The models: what a checkpoint asks for, its weights, and the forward pass over the paged cache.

`load_model` is the door; the engine calls it once. `config` reads what a checkpoint says of itself and
refuses what the code does not do, `weights` reads tensors from safetensors or GGUF, `llama` computes, `rope`
makes the angles, `resolve` finds the files.
"""

from pagedkv.models.config import ModelConfig
from pagedkv.models.load import LoadedModel, load_model, read_config
from pagedkv.models.resolve import ModelSource, resolve

__all__ = ["LoadedModel", "ModelConfig", "ModelSource", "load_model", "read_config", "resolve"]
