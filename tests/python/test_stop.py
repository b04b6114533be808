"""Stop strings: nothing is shown that belongs to one, and nothing is held back that cannot."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny_tokenizers as tiny
from pagedkv.text import SequenceText, StopSearch, StopStrings

WORDS = st.text("abc", min_size=1, max_size=5)


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """The plain definition: the match that ends first, of those the one that begins first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


def held_len(text: str, stops: list[str]) -> int:
    """The length of the longest suffix of `text` that begins a stop string."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(stop.startswith(text[-n:]) for stop in stops))


@tiny.UNTIMED
@given(text=st.text("abc", max_size=40), stops=st.lists(WORDS, max_size=5), cuts=st.lists(st.integers(1, 6)))
def test_equals_the_plain_definition_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    search = StopSearch(StopStrings(stops))
    shown, fed = "", 0
    for size in [*cuts, *[7] * len(text)]:
        piece = text[fed : fed + size]
        if not piece:
            break
        shown += search.feed(piece)
        match = first_match(text[: fed + len(piece)], stops)
        if match is not None:
            start, end = match
            assert shown == text[:start]
            assert search.matched == text[start:end]
            return
        fed += len(piece)
        assert search.matched is None
        assert shown == text[: fed - held_len(text[:fed], stops)]
    assert shown + search.flush() == text


def test_holds_back_only_what_may_begin_a_stop_string() -> None:
    search = StopSearch(StopStrings(["<|user|>", "\n\n"]))
    assert search.feed("Hello <") == "Hello "
    assert search.feed("b> and\n") == "<b> and"
    assert search.feed("more") == "\nmore"
    assert search.feed("<|us") == ""
    assert search.feed("er|> beyond") == ""
    assert search.matched == "<|user|>"


def test_long_lists_do_not_delay_text() -> None:
    stops = [f"{i:02d}" + "stop" * 49 + "!!" for i in range(64)]
    assert {len(stop) for stop in stops} == {200}
    search = StopSearch(StopStrings(stops))
    assert search.feed("The answer is 42") == "The answer is "
    assert search.feed(".") == "42."
    assert search.feed("x" + stops[63]) == "x"


def test_a_stop_string_inside_another_ends_first() -> None:
    search = StopSearch(StopStrings(["abcd", "bc"]))
    assert search.feed("xab") == "x"
    assert search.feed("cd") == "a"


def test_of_two_that_end_together_the_longer_is_cut() -> None:
    search = StopSearch(StopStrings(["b", "ab"]))
    assert search.feed("a") == ""
    assert search.feed("b") == ""
    assert search.matched == "ab"


def test_bad_stop_strings_are_named() -> None:
    with pytest.raises(ValueError, match="stop: a stop string must not be empty"):
        StopStrings(["a", ""])
    with pytest.raises(TypeError, match="stop: expected a list"):
        StopStrings("abc")


def test_a_shared_set_serves_several_texts() -> None:
    stops = StopStrings(["ab", "abc", "b"])
    first, second = StopSearch(stops), StopSearch(stops)
    assert first.feed("xa") == "x"
    assert second.feed("b") == ""
    assert first.feed("b") == ""
    assert (first.matched, second.matched) == ("ab", "b")


def test_long_lists_take_little_memory_and_give_it_back() -> None:
    stops = [f"{i:02d}" + "".join(chr(97 + (i * j) % 26) for j in range(1022)) for i in range(64)]
    tracemalloc.start()
    try:
        built = StopStrings(stops)
        assert tracemalloc.get_traced_memory()[0] < 3 * 2**20
        search = StopSearch(built)
        assert search.feed("x" + stops[63][:-1]) == "x"
        assert search.feed(stops[63][-1]) == ""
        assert search.matched == stops[63]
        del built, search
        assert tracemalloc.get_traced_memory()[0] < 2**18
    finally:
        tracemalloc.stop()


def stream(sequence: SequenceText, token_ids: list[int]) -> list[str]:
    return [sequence.add(token_id) for token_id in token_ids]


def test_a_stop_string_over_several_tokens_is_cut_exactly() -> None:
    tokenizer = tiny.paged(tiny.byte_level())
    ids = [tokenizer.token_id(char) for char in "ABCDEFGHIJKL"]
    sequence = SequenceText(tokenizer, StopStrings(["DEFGHIJ"]))
    assert stream(sequence, ids) == ["A", "B", "C", "", "", "", "", "", "", "", "", ""]
    assert sequence.stopped
    assert sequence.stop_at_tokens == 10
    assert sequence.stop_string == "DEFGHIJ"
    assert sequence.text == "ABC"
    assert sequence.end() == ""


def test_the_stop_string_is_shown_on_request() -> None:
    tokenizer = tiny.paged(tiny.byte_level())
    ids = [tokenizer.token_id(char) for char in "ABCDEFGH"]
    sequence = SequenceText(tokenizer, StopStrings(["DE"]), include_stop=True)
    assert stream(sequence, ids) == ["A", "B", "C", "", "DE", "", "", ""]
    assert sequence.text == "ABCDE"
    assert sequence.stop_at_tokens == 5


def test_text_behind_a_stop_string_within_a_token_is_dropped() -> None:
    tokenizer = tiny.paged(tiny.byte_level())
    ids = tokenizer.encode("the capital", add_special_tokens=False)
    assert tokenizer.token(ids[0]) == "the"
    for include_stop, text in ((False, "t"), (True, "th")):
        sequence = SequenceText(tokenizer, StopStrings(["h"]), include_stop=include_stop)
        assert stream(sequence, ids)[0] == text
        assert sequence.stop_at_tokens == 1


def test_a_partial_stop_string_is_given_out_at_the_end() -> None:
    tokenizer = tiny.paged(tiny.byte_level())
    sequence = SequenceText(tokenizer, StopStrings(["the end of it"]))
    deltas = stream(sequence, tokenizer.encode("to the end", add_special_tokens=False))
    assert "".join(deltas) == "to "
    assert sequence.end() == "the end"
    assert sequence.text == "to the end"
    assert not sequence.stopped
    assert sequence.stop_at_tokens is None


def test_a_multi_byte_stop_string_is_complete_with_its_last_byte() -> None:
    tokenizer = tiny.paged(tiny.byte_level())
    ids = tokenizer.encode("a🙂b", add_special_tokens=False)
    assert len(ids) == 6
    sequence = SequenceText(tokenizer, StopStrings(["🙂"]))
    assert stream(sequence, ids) == ["a", "", "", "", "", ""]
    assert sequence.stop_at_tokens == 5


def test_a_stop_string_can_be_completed_by_a_character_that_was_cut_short() -> None:
    tokenizer = tiny.paged(tiny.byte_level())
    sequence = SequenceText(tokenizer, StopStrings(["a\ufffd"]))
    stream(sequence, tokenizer.encode("xa🙂", add_special_tokens=False)[:-1])
    assert sequence.text == "x"
    assert sequence.end() == ""
    assert sequence.stopped
    assert sequence.text == "x"


@tiny.UNTIMED
@given(
    text=st.text("ab \n🙂é", max_size=30),
    stops=st.lists(st.text("ab 🙂é", min_size=1, max_size=4), max_size=4),
)
def test_streamed_and_whole_text_are_equal(text: str, stops: list[str]) -> None:
    tokenizer = SHARED
    ids = tokenizer.encode(text, add_special_tokens=False)
    sequence = SequenceText(tokenizer, StopStrings(stops))
    shown = "".join(stream(sequence, ids)) + sequence.end()
    match = first_match(text, stops)
    assert shown == sequence.text == (text if match is None else text[: match[0]])
    if match is not None:
        assert sequence.stop_at_tokens is not None
        # One token fewer did not hold the whole stop string.
        assert first_match(tokenizer.decode(ids[: sequence.stop_at_tokens]), stops) is not None
        assert first_match(tokenizer.decode(ids[: sequence.stop_at_tokens - 1]), stops) is None


SHARED = tiny.paged(tiny.byte_level())
