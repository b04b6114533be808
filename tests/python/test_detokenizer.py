"""The incremental detokenizer gives the text of all tokens at once, piece by piece and never broken."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny_tokenizers as tiny
from pagedkv.text import Detokenizer, Tokenizer

DEMO = Tokenizer.load(tiny.demo_model())
BYTE_FALLBACK = tiny.paged(tiny.sentencepiece())
METASPACE = tiny.paged(tiny.sentencepiece(metaspace=True))
NO_PREFIX = tiny.paged(tiny.sentencepiece(prefix=False))
NEIGHBOURS = tiny.paged(tiny.neighbour_dependent())
TOKENIZERS = {
    "demo": DEMO,
    "byte_fallback": BYTE_FALLBACK,
    "metaspace": METASPACE,
    "no_prefix": NO_PREFIX,
    "neighbours": NEIGHBOURS,
}

KNOWN_BYTES = {
    name: {piece[0] for piece in map(tokenizer.token_bytes, range(tokenizer.vocab_size)) if len(piece) == 1}
    for name, tokenizer in TOKENIZERS.items()
}


def pieces(tokenizer: Tokenizer, groups: Iterable[list[int]], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [*[detokenizer.add(group) for group in groups], detokenizer.flush()]


def one_by_one(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
    return "".join(pieces(tokenizer, [[token_id] for token_id in ids], skip_special_tokens))


def random_ids(vocab_size: int) -> st.SearchStrategy[list[int]]:
    """Any ids, some outside the vocabulary, and stretches of low ids: special tokens and single bytes."""
    any_id = st.integers(0, vocab_size + 5)
    return st.lists(st.one_of(any_id, st.integers(0, min(vocab_size, 300))), max_size=40)


@tiny.UNTIMED
@given(ids=random_ids(DEMO.vocab_size), skip=st.booleans())
def test_random_tokens_of_the_demo_model(ids: list[int], skip: bool) -> None:
    whole = DEMO.backend.decode(ids, skip_special_tokens=skip)
    assert one_by_one(DEMO, ids, skip) == whole
    assert DEMO.decode(ids, skip) == whole


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace", "no_prefix"])
@tiny.UNTIMED
@given(data=st.data())
def test_random_tokens_with_byte_fallback(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(random_ids(tokenizer.vocab_size))
    skip = data.draw(st.booleans())
    text = one_by_one(tokenizer, ids, skip)
    assert text == tokenizer.decode(ids, skip)
    whole = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    # The backend's decoder gives up a whole run of byte tokens when one of them is broken.
    assert text == whole or ("\ufffd" in text and "\ufffd" in whole)


@tiny.UNTIMED
@given(ids=st.lists(st.integers(0, NEIGHBOURS.vocab_size + 2), max_size=30), skip=st.booleans())
def test_random_tokens_of_a_decoder_that_looks_at_neighbours(ids: list[int], skip: bool) -> None:
    assert NEIGHBOURS.piece_rules is None
    assert one_by_one(NEIGHBOURS, ids, skip) == NEIGHBOURS.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["demo", "byte_fallback", "metaspace", "no_prefix"])
@tiny.UNTIMED
@given(text=st.text(max_size=30))
def test_real_text_never_shows_a_broken_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    # The demo model has no tokens for some bytes, e.g. most control characters: such text cannot come back.
    text = "".join(
        char for char in text if char not in "\ufffd▁<" and set(char.encode()) <= KNOWN_BYTES[name]
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = pieces(tokenizer, [[token_id] for token_id in ids])
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == tokenizer.backend.decode(ids)
    if name in ("demo", "no_prefix"):
        assert "".join(deltas) == text


@tiny.UNTIMED
@given(ids=random_ids(DEMO.vocab_size), cuts=st.lists(st.integers(0, 5), max_size=20))
def test_any_grouping_gives_the_same_text(ids: list[int], cuts: list[int]) -> None:
    groups, start = [], 0
    for size in cuts:
        groups.append(ids[start : start + size])
        start += size
    groups.append(ids[start:])
    assert "".join(pieces(DEMO, groups)) == one_by_one(DEMO, ids)


@pytest.mark.parametrize("text", ["🙂", "👨‍👩‍👧‍👦!", "각한국", "שלום עולם", "e\u0301a"])
def test_characters_appear_with_their_last_byte(text: str) -> None:
    for tokenizer in (DEMO, NO_PREFIX):
        ids = tokenizer.encode(text, add_special_tokens=False)
        shown = ""
        detokenizer = Detokenizer(tokenizer)
        for count, token_id in enumerate(ids, start=1):
            shown += detokenizer.add([token_id])
            complete = b"".join(map(tokenizer.token_bytes, ids[:count])).decode(errors="ignore")
            assert shown == complete
        assert detokenizer.flush() == ""
        assert shown == text


def test_a_character_cut_short_by_the_token_limit_is_one_replacement() -> None:
    for tokenizer in (DEMO, NO_PREFIX):
        ids = tokenizer.encode("a🙂", add_special_tokens=False)
        assert pieces(tokenizer, [ids[:-1]]) == ["a", "\ufffd"]


def test_bytes_that_cannot_become_a_character_are_replaced_at_once() -> None:
    lead, stray = (NO_PREFIX.token_id(token) for token in ("<0xE4>", "<0xFF>"))
    letter = NO_PREFIX.token_id("a")
    assert lead is not None
    assert stray is not None
    assert letter is not None
    assert pieces(NO_PREFIX, [[lead], [stray], [letter], [lead], []]) == [
        "",
        "\ufffd\ufffd",
        "a",
        "",
        "",
        "\ufffd",
    ]


def test_characters_before_a_broken_byte_are_kept() -> None:
    ids = [NO_PREFIX.token_id(f"<0x{byte:02X}>") or 0 for byte in "你".encode() + b"\xe5"]
    assert NO_PREFIX.decode(ids) == "你\ufffd"


def test_the_space_before_the_first_word_is_taken_off_once() -> None:
    for tokenizer in (BYTE_FALLBACK, METASPACE):
        ids = tokenizer.encode("the cat  sat", add_special_tokens=False)
        assert tokenizer.token(ids[0]) == " the"
        assert one_by_one(tokenizer, ids) == "the cat  sat"
        start = tokenizer.token_id("<s>")
        assert start is not None
        assert one_by_one(tokenizer, [start, *ids]) == "the cat  sat"
        assert one_by_one(tokenizer, [start, *ids], skip_special_tokens=False) == "<s> the cat  sat"
        going_on = Detokenizer(tokenizer, at_start=False)
        assert going_on.add(ids) == " the cat  sat"


def test_special_tokens_are_shown_on_request() -> None:
    ids = DEMO.encode("<|im_start|>user\nHi<|im_end|>", add_special_tokens=False)
    assert one_by_one(DEMO, ids) == "user\nHi"
    assert one_by_one(DEMO, ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"


class CountingBackend:
    """Counts the tokens that a backend decodes."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.num_decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.parametrize(
    ("backend", "per_token"), [(tiny.neighbour_dependent(), 20), (tiny.sentencepiece(), 0)]
)
def test_the_cost_per_token_does_not_grow(backend: Any, per_token: int) -> None:
    tokenizer = tiny.paged(backend)
    counting = CountingBackend(backend)
    tokenizer.backend = counting  # type: ignore[assignment]
    ids = [1, 2, 3, 4] * 500
    one_by_one(tokenizer, ids)
    assert counting.num_decoded <= per_token * len(ids)
