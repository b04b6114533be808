"""Traces of requests: when they arrived, how long prompt and output were, and which text they shared.

Two formats are read, told apart by the ending of the name:

- `.jsonl`, as published with Mooncake: one object a line with `timestamp` (ms), `input_length`,
  `output_length` and `hash_ids`, a number for each 512 tokens of the prompt, which names them together with
  everything before them;
- `.csv`, as published for Azure: `TIMESTAMP,ContextTokens,GeneratedTokens`. It says nothing about content,
  so no two prompts share any.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# Tokens that one hash id stands for.
ID_TOKENS = 512
# Stands for a sampled token. No prompt holds it.
SAMPLED = 2**31 - 1


@dataclass(frozen=True)
class TraceRequest:
    """One request. `ids`, [ceil(input_len / 512)] int32, are numbered in the order of their first use."""

    time_s: float
    input_len: int
    output_len: int
    ids: NDArray[np.int32]

    def prompt(self) -> NDArray[np.int32]:
        """Token ids [input_len]: every token of a piece of text is the number of that piece.

        Two pieces differ in all tokens, and a prompt is told from another as its ids are.
        """
        return np.repeat(self.ids, ID_TOKENS)[: self.input_len]


def read(path: Path) -> list[TraceRequest]:
    """Reads a trace, in the order of arrival; times count from the first.

    Raises:
        ValueError: The file has another ending, or a line that cannot be read, which is named.
        OSError: The file cannot be opened.
    """
    readers = {".jsonl": _mooncake, ".csv": _azure}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path.name} ends in {path.suffix!r}; allowed: {', '.join(readers)}")
    requests = []
    with path.open(newline="") as file:
        rows = reader(file)
        for line in count(1):
            try:
                request = next(rows, None)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path.name}: request {line} cannot be read: {error!r}") from error
            if request is None:
                break
            requests.append(request)
    requests.sort(key=lambda request: request.time_s)
    start = requests[0].time_s if requests else 0.0
    return [TraceRequest(r.time_s - start, r.input_len, r.output_len, r.ids) for r in requests]


def _request(time_s: float, input_len: int, output_len: int, ids: list[int]) -> TraceRequest:
    if input_len < 1 or len(ids) != -(-input_len // ID_TOKENS):
        raise ValueError(f"input_length is {input_len} and there are {len(ids)} ids of {ID_TOKENS} tokens")
    return TraceRequest(time_s, input_len, max(output_len, 1), np.array(ids, np.int32))


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRequest]:
    numbers: dict[int, int] = {}
    for line in lines:
        fields = json.loads(line)
        ids = [numbers.setdefault(hash_id, len(numbers)) for hash_id in fields["hash_ids"]]
        yield _request(fields["timestamp"] / 1e3, fields["input_length"], fields["output_length"], ids)


def _azure(lines: Iterable[str]) -> Iterator[TraceRequest]:
    fresh = count()
    for fields in csv.DictReader(lines):
        # Seven digits of a second are one more than Python reads.
        time_s = datetime.fromisoformat(fields["TIMESTAMP"][:26]).timestamp()
        input_len = int(fields["ContextTokens"])
        ids = [next(fresh) for _ in range(-(-input_len // ID_TOKENS))]
        yield _request(time_s, input_len, int(fields["GeneratedTokens"]), ids)
