"""Opens GGUF files: metadata, the directory of tensors, and tensors as float32.

All of the directory is checked against the file's length at once, so a file that is cut short is refused on
opening. The `gguf` package knows the types and turns quantised blocks into numbers; it is imported when there
is such a file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ModelError
from pagedkv.gguf_header import DAMAGE, Cursor, map_file, read_header

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GGUFTensor:
    """An entry of the directory. `shape` is outermost first, as in Hugging Face checkpoints."""

    name: str
    shape: tuple[int, ...]
    kind: "GGMLQuantizationType"
    offset: int  # of its first byte in the file
    num_bytes: int


class GGUFFile:
    """A mapped GGUF file."""

    def __init__(self, path: Path) -> None:
        """Maps the file and reads everything but the tensors.

        Raises:
            ModelError: It cannot be read, is no GGUF file, is cut short, or is one part of a split model.
        """
        self.path = path
        self._data = map_file(path)
        header = read_header(self._data, path)
        self.metadata = header.metadata
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_directory(header.cursor, header.num_tensors)
        except DAMAGE as error:
            raise ModelError(f"{path} is cut short or damaged: {error!r}") from error
        num_parts = self.metadata.get("split.count") or 1
        if num_parts > 1:
            raise ModelError(
                f"{path} is one of {num_parts} parts; merge them first (llama-gguf-split --merge)"
            )

    def _read_directory(self, cursor: Cursor, num_tensors: int) -> None:
        entries = [self._entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"general.alignment is {alignment!r} in {self.path}; it must be at least 1")
        data_start = -(-cursor.offset // alignment) * alignment
        for name, shape, kind, offset in entries:
            num_bytes = self._num_bytes(name, shape, kind)
            tensor = GGUFTensor(name, shape, kind, data_start + offset, num_bytes)
            if tensor.offset + num_bytes > len(self._data):
                raise ModelError(
                    f"{self.path} is cut short: tensor {name} ends at byte {tensor.offset + num_bytes}, "
                    f"the file at {len(self._data)}"
                )
            self.tensors[name] = tensor

    def _entry(self, cursor: Cursor) -> tuple[str, tuple[int, ...], "GGMLQuantizationType", int]:
        from gguf import GGMLQuantizationType

        name = cursor.string()
        sizes = [cursor.number("Q") for _ in range(cursor.number("I"))]
        number = cursor.number("I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise ModelError(f"tensor {name} in {self.path} has the unknown GGUF type {number}") from error
        return name, tuple(reversed(sizes)), kind, cursor.number("Q")

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: "GGMLQuantizationType") -> int:
        from gguf import GGML_QUANT_SIZES

        block_len, block_bytes = GGML_QUANT_SIZES[kind]
        num_elements = 1
        for size in shape:
            num_elements *= size
        if not shape or shape[-1] % block_len:
            raise ModelError(
                f"tensor {name} in {self.path} has shape {list(shape)}; "
                f"rows of {kind.name} hold a multiple of {block_len} elements"
            )
        return int(num_elements // block_len * block_bytes)

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor as float32, in its shape; its values may lie in the mapped file, read-only.

        Raises:
            ModelError: Its type cannot be turned into numbers.
        """
        from gguf import quants

        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            values: NDArray[np.float32] = quants.dequantize(rows, tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"tensor {name} has GGUF type {tensor.kind.name}, which cannot be read"
            ) from error
        return values.reshape(tensor.shape)
