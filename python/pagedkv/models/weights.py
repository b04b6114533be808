"""Reads tensors from checkpoints, safetensors or GGUF, and puts them into a model.

Files are mapped, tensors are read one at a time, converted, and placed on the device; so the peak is one copy
of the model and one tensor, beside pages of the files that the system may drop. Matrices that a backend will
pack into memory of its own may stay where they are mapped. What is missing, unexpected or of the wrong shape
is found from the headers, before anything is read: `load` calls `find_sources` when it opens a model, and
`load_weights` when it reads it.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

from pagedkv.errors import ModelError
from pagedkv.models.config import ModelConfig
from pagedkv.models.gguf_file import GGUFFile
from pagedkv.models.resolve import ModelSource

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LAYERS = "model.layers."  # the number of the layer follows

Shape = tuple[int, ...]

_SAFETENSORS_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
# Tensors that some writers store although they follow from the config.
_DERIVED = ("rotary_emb.inv_freq", "rope_freqs.weight", "attn_rot_embd.weight")

_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Checkpoint(Protocol):
    """Named tensors in files."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of each tensor by its name in Hugging Face checkpoints, in the order of the files."""

    @property
    def dtype(self) -> torch.dtype | None:
        """What the embedding is stored as; None if quantised."""

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor onto the host."""


class SafetensorsCheckpoint:
    """A directory with model.safetensors, or with shards that model.safetensors.index.json lists."""

    def __init__(self, directory: Path) -> None:
        """Maps the files and reads their headers.

        Raises:
            ModelError: A file is missing, cut short or damaged, or a tensor has a dtype that is not
                supported.
        """
        self.shapes: dict[str, Shape] = {}
        self._files: dict[str, Any] = {}  # by tensor name
        self._dtypes: dict[str, torch.dtype] = {}
        single = directory / "model.safetensors"
        if single.is_file():
            self._add(single)
        else:
            self._add_shards(directory)

    def _add_shards(self, directory: Path) -> None:
        index_name = "model.safetensors.index.json"
        index = ModelSource(directory, "hf", directory.name).read_json(index_name)
        if index is None:
            raise ModelError(
                f"{directory} has neither model.safetensors nor {index_name}; other formats are not read"
            )
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) for shard in weight_map.values()
        ):
            raise ModelError(f"{directory / index_name} has no weight_map of tensor names to file names")
        for shard in dict.fromkeys(weight_map.values()):
            if Path(shard).name != shard or not (directory / shard).is_file():
                raise ModelError(
                    f"{directory / index_name} names {shard!r}, which is no file in that directory"
                )
            self._add(directory / shard)
        absent = [name for name in weight_map if name not in self.shapes]
        if absent:
            raise ModelError(
                f"{directory / index_name} lists tensors that its files do not hold: {_listed(absent)}"
            )

    def _add(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file: Any = safe_open(path, framework="pt")
            slices = {name: file.get_slice(name) for name in list(file.keys())}
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is cut short or damaged: {error}") from error
        for name, part in slices.items():
            stored = part.get_dtype()
            if stored not in _SAFETENSORS_DTYPES:
                allowed = ", ".join(_SAFETENSORS_DTYPES)
                raise ModelError(f"tensor {name} in {path} has dtype {stored}; supported are {allowed}")
            self.shapes[name] = tuple(part.get_shape())
            self._dtypes[name] = _SAFETENSORS_DTYPES[stored]
            self._files[name] = file

    @property
    def dtype(self) -> torch.dtype | None:
        """See `Checkpoint.dtype`."""
        return self._dtypes.get(EMBEDDING)

    def tensor(self, name: str) -> Tensor:
        """See `Checkpoint.tensor`."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


class GGUFCheckpoint:
    """One GGUF file. Quantised tensors are turned into float32 as they are read."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        """Takes over an open file."""
        self.dtype: torch.dtype | None = None
        self._file = file
        self._names = {gguf_tensor_name(name): name for name in file.tensors}
        self.shapes: dict[str, Shape] = {
            name: file.tensors[stored].shape for name, stored in self._names.items()
        }
        self._num_heads: dict[str, int] = {}
        if file.metadata["general.architecture"] == "llama":
            self._num_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def tensor(self, name: str) -> Tensor:
        """See `Checkpoint.tensor`."""
        values = self._file.read(self._names[name])
        num_heads = self._num_heads.get(name.split(".")[-2])
        if num_heads is not None:
            values = unpermute(values, num_heads)
        # Values that still lie in the mapped file are copied: torch takes no memory that it must not write
        # to.
        return torch.from_numpy(values if values.flags.writeable else values.copy())


def gguf_tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; unknown ones keep their own."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _GGUF_LAYER:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER[parts[2]]}.{kind}"
    return name


def unpermute(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undoes the order in which llama files store the rows of q and k.

    llama.cpp rotates neighbouring elements of a head, Hugging Face elements i and i + D/2. So the writer of a
    llama file interleaves the two halves of each head: row 2i is element i, row 2i + 1 is element i + D/2.
    """
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def load_weights(
    model: nn.Module,
    config: ModelConfig,
    checkpoint: Checkpoint,
    sources: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device,
    *,
    borrow: bool = False,
    progress: bool = False,
) -> None:
    """Replaces every parameter of `model`, which may be on the meta device, by the checkpoint's.

    `sources` are those of `find_sources`, `borrow` is as in `OpenedModel.read`.
    """
    for name in tqdm(sources, desc="loading weights", unit="tensor", disable=not progress, leave=False):
        stored = checkpoint.tensor(sources[name])
        # All matrices are packed but an embedding that is not the head, in which rows are looked up.
        is_packed = stored.ndim == 2 and (name != EMBEDDING or HEAD not in sources)
        # A file need not align its tensors.
        is_aligned = stored.data_ptr() % dtype.itemsize == 0
        if borrow and is_packed and is_aligned and stored.dtype == dtype:
            placed = stored
        else:
            placed = torch.empty(stored.shape, dtype=dtype, device=device)
            placed.copy_(stored)
        _set_parameter(model, name, placed)
    if HEAD not in sources:
        _tie(model)
    elif config.tie_word_embeddings:
        if torch.equal(model.get_parameter(HEAD), model.get_parameter(EMBEDDING)):
            _tie(model)
        else:
            logger.warning(
                "tie_word_embeddings is true, but %s and %s differ in the files; both are used as stored",
                HEAD,
                EMBEDDING,
            )


def find_sources(model: nn.Module, config: ModelConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """Which tensor each parameter is read from; the head is left out where it is the embedding's tensor.

    Raises:
        ModelError: Tensors are missing, unexpected, or do not fit the config; all of them are named.
    """
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes = checkpoint.shapes
    sources = {name: name for name in expected}
    if HEAD not in shapes and EMBEDDING in shapes:
        del sources[HEAD]
        if not config.tie_word_embeddings:
            logger.warning(
                "tie_word_embeddings is false, but there is no %s; the embedding serves as the output",
                HEAD,
            )
    elif EMBEDDING not in shapes and HEAD in shapes and config.tie_word_embeddings:
        del sources[HEAD]
        sources[EMBEDDING] = HEAD
    missing = [name for name in sources.values() if name not in shapes]
    unexpected = [name for name in shapes if name not in sources.values() and not name.endswith(_DERIVED)]
    problems = []
    if missing:
        problems.append(f"missing tensors: {_listed(missing)}")
    if unexpected:
        problems.append(f"unexpected tensors: {_listed(unexpected)}")
    wrong = [
        f"{source} is {list(shapes[source])}, not {list(expected[name])}"
        for name, source in sources.items()
        if source in shapes and shapes[source] != expected[name]
    ]
    if wrong:
        problems.append(f"shapes that do not fit the config: {_listed(wrong)}")
    if problems:
        raise ModelError(f"the checkpoint does not fit {config.architecture}: {'; '.join(problems)}")
    return sources


def _listed(names: list[str], limit: int = 20) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} ({', '.join(names[:limit])}{rest})"


def _set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


def _tie(model: nn.Module) -> None:
    path, _, leaf = HEAD.rpartition(".")
    setattr(model.get_submodule(path), leaf, model.get_parameter(EMBEDDING))
