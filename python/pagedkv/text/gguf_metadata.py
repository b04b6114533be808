"""Reads the metadata of a GGUF file, and nothing else of it, in one pass over the mapped bytes.

A vocabulary of 50,000 tokens takes less than 0.1 s this way. The format is the one that ggml documents in
`docs/gguf.md`: a header, then key-value pairs whose types are numbered as in `_FORMATS`.

Used by `gguf_tokenizer`.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from pagedkv.errors import ModelError

_STRING, _ARRAY = 8, 9
_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_VERSIONS = (2, 3)
_HEADER_BYTES = 24


def read_metadata(path: Path) -> dict[str, Any]:
    """Reads every key and value of the file's metadata.

    Numbers come as int, float or bool, strings as str, arrays as lists.

    Raises:
        ModelError: the file is no GGUF, of an unknown version, or cut short.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ModelError(f"{path}: the file is empty") from error
    with data:
        if data[:4] != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file (it does not begin with GGUF)")
        if len(data) < _HEADER_BYTES:
            raise ModelError(f"{path}: the GGUF header is cut short")
        version, _, num_pairs = struct.unpack_from("<IQQ", data, 4)
        if version not in _VERSIONS:
            raise ModelError(f"{path}: GGUF version {version} is not supported; versions 2 and 3 are")
        reader = _Reader(data)
        try:
            return dict(reader.pair() for _ in range(num_pairs))
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: the GGUF metadata is damaged or cut short ({error})") from error


class _Reader:
    """Walks over the pairs; `offset` is the next byte to read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = _HEADER_BYTES

    def pair(self) -> tuple[str, Any]:
        key = self._string()
        (kind,) = self._unpack("<I")
        return key, self._value(kind)

    def _unpack(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(format, self.data, self.offset)
        self.offset += struct.calcsize(format)
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        # The loop runs once per token and per merge, so it keeps everything in local names.
        data, offset, read_len = self.data, self.offset, struct.Struct("<Q").unpack_from
        end = len(data)
        strings = []
        for _ in range(count):
            (length,) = read_len(data, offset)
            start = offset + 8
            offset = start + length
            if offset > end:
                raise struct.error(f"a string of {length} bytes reaches beyond the end")
            strings.append(data[start:offset].decode())
        self.offset = offset
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack("<" + _FORMATS[kind])[0]
        element, count = self._unpack("<IQ")
        if count > len(self.data):
            raise struct.error(f"an array of {count} elements reaches beyond the end")
        if element == _STRING:
            return self._strings(count)
        if element == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        return list(self._unpack(f"<{count}{_FORMATS[element]}"))
