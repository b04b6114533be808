"""Opens GGUF files: metadata, the directory of tensors, and tensors as float32.

The format is ggml's (docs/gguf.md in its repository): a header, pairs of key and value, the directory,
padding, data. All of the directory is checked against the file's length at once, so a file that is cut short
is refused on opening. `gguf.GGUFReader` reads the same, but makes several arrays for each of the 100,000
strings of a vocabulary: seconds instead of a tenth. Its package still knows the types and turns quantised
blocks into numbers.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

from pagedkv.errors import ModelError

_STRING, _ARRAY = 8, 9
# The value types of fixed size, as struct writes them.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GGUFTensor:
    """An entry of the directory. `shape` is outermost first, as in Hugging Face checkpoints."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
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
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{path} is no GGUF file: it begins with {self._data[:4]!r} instead of b'GGUF'")
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
            raise ModelError(f"{path} is cut short or damaged: {error!r}") from error
        num_parts = self.metadata.get("split.count") or 1
        if num_parts > 1:
            raise ModelError(
                f"{path} is one of {num_parts} parts; merge them first (llama-gguf-split --merge)"
            )

    def _read_header(self) -> None:
        cursor = _Cursor(self._data, 4)
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path} has GGUF version {version}; supported are 2 and 3, little-endian")
        num_tensors, num_pairs = cursor.number("Q"), cursor.number("Q")
        for _ in range(num_pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"))
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

    def _entry(self, cursor: "_Cursor") -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.string()
        sizes = [cursor.number("Q") for _ in range(cursor.number("I"))]
        number = cursor.number("I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise ModelError(f"tensor {name} in {self.path} has the unknown GGUF type {number}") from error
        return name, tuple(reversed(sizes)), kind, cursor.number("Q")

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
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


class _Cursor:
    """Walks over the header; `offset` is the next byte to read."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data = data
        self.offset = offset

    def number(self, code: str) -> Any:
        value = struct.unpack_from(f"<{code}", self.data, self.offset)[0]
        self.offset += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        num_bytes = struct.unpack_from("<Q", self.data, self.offset)[0]
        start, self.offset = self.offset + 8, self.offset + 8 + num_bytes
        if self.offset > len(self.data):
            raise struct.error(f"a string of {num_bytes} bytes reaches beyond the end")
        return self.data[start : self.offset].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_FORMATS[kind])
        item_kind, num_items = self.number("I"), self.number("Q")
        if item_kind in (_STRING, _ARRAY):
            return [self.value(item_kind) for _ in range(num_items)]
        code = f"<{num_items}{_FORMATS[item_kind]}"
        items = list(struct.unpack_from(code, self.data, self.offset))
        self.offset += struct.calcsize(code)
        return items
