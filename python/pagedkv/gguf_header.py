"""The header of a GGUF file, read in one pass over the mapped bytes.

The format is ggml's (docs/gguf.md in its repository): four magic bytes, a version, two counts, then pairs of
key and value; the directory of tensors follows. `gguf.GGUFReader` reads the same, but makes several arrays
for each of the 100,000 strings of a vocabulary: seconds instead of a tenth.

`text.gguf_tokenizer` needs the metadata alone, `models.gguf_file` goes on from there to the tensors.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagedkv.errors import ModelError

_STRING, _ARRAY = 8, 9
# The value types of fixed size, as struct writes them.
_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_VERSIONS: Final = (2, 3)
_PAIRS_OFFSET: Final = 24

# What reading a damaged header can raise, besides ModelError.
DAMAGE: Final = (struct.error, KeyError, UnicodeDecodeError, OverflowError)


class Cursor:
    """Walks over the header; `offset` is the next byte to read.

    Raises one of DAMAGE where the bytes make no sense.
    """

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data = data
        self.offset = offset

    def number(self, code: str) -> Any:
        """One value of a struct format."""
        return self._unpack(f"<{code}")[0]

    def string(self) -> str:
        """A string behind its length."""
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        """A value of a numbered type: int, float, bool, str or a list of such."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_FORMATS[kind])
        element, count = self.number("I"), self.number("Q")
        if count > len(self.data):
            raise struct.error(f"an array of {count} elements reaches beyond the end")
        if element == _STRING:
            return self._strings(count)
        if element == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        return list(self._unpack(f"<{count}{_FORMATS[element]}"))

    def _unpack(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(format, self.data, self.offset)
        self.offset += struct.calcsize(format)
        return values

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


@dataclass(frozen=True)
class Header:
    """What a file says before its tensors.

    Attributes:
        metadata: every key with its value.
        num_tensors: entries of the directory of tensors.
        cursor: stands at the first of them.
    """

    metadata: dict[str, Any]
    num_tensors: int
    cursor: Cursor


# Where the metadata names tokens that end an answer: a text's, a turn's and a message's end.
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


def end_token_ids(metadata: dict[str, Any], num_tokens: int) -> tuple[int, ...]:
    """The tokens that end an answer, sorted; ids that are not below `num_tokens` are left out."""
    found = {metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS}
    return tuple(sorted(one for one in found if one is not None and 0 <= one < num_tokens))


def map_file(path: Path) -> mmap.mmap:
    """Maps a file read-only. Raises ModelError if it cannot be read or is empty."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def read_header(data: mmap.mmap, path: Path) -> Header:
    """Reads a mapped file's header.

    Raises:
        ModelError: it is no GGUF file, of another version, damaged or cut short.
    """
    if data[:4] != b"GGUF":
        raise ModelError(f"{path} is no GGUF file: it begins with {data[:4]!r} instead of b'GGUF'")
    try:
        version, num_tensors, num_pairs = struct.unpack_from("<IQQ", data, 4)
        if version not in _VERSIONS:
            raise ModelError(f"{path} has GGUF version {version}; supported are 2 and 3, little-endian")
        cursor = Cursor(data, _PAIRS_OFFSET)
        metadata = {cursor.string(): cursor.value(cursor.number("I")) for _ in range(num_pairs)}
    except DAMAGE as error:
        raise ModelError(f"{path} is cut short or damaged: {error!r}") from error
    return Header(metadata, num_tensors, cursor)


def read_metadata(path: Path) -> dict[str, Any]:
    """Reads every key and value of a file's metadata, and nothing else of it. Raises ModelError."""
    with map_file(path) as data:
        return read_header(data, path).metadata
