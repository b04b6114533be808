"""Finds stop strings in a text that arrives in pieces, and says how much of it may be shown already.

All stop strings are searched together with one Aho-Corasick automaton (Aho, Corasick 1975). Its state after a
character is the longest suffix of the text that is a prefix of some stop string: exactly what must be held
back, no matter how long the longest stop string is. The cost is constant per character and independent of
their number.

`SamplingParams` holds the `StopStrings` of a request, `SequenceText` a `StopSearch` in each of its answers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopStrings:
    """A set of stop strings, made ready for the search. It does not change, so any number of texts share it.

    A state is a prefix of some stop string, state 0 the empty one. The states of a string follow one another,
    up to the prefix that it shares with an earlier string, so only the first step after such a prefix needs a
    place in a dict: a state costs some twenty bytes.

    Attributes:
        stops: the strings.
        first_chars: the characters that they begin with.
        failure: per state, the longest proper suffix of its prefix that is a state as well.
        depth: per state, the length of its prefix.
    """

    __slots__ = ("_branches", "_chars", "_found", "_parents", "depth", "failure", "first_chars", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """Builds the automaton. Raises ValueError for an empty stop string, which would match everywhere."""
        if isinstance(stops, str):
            raise TypeError("stop: expected a list of strings, got a string")
        if any(not stop for stop in stops):
            raise ValueError("stop: a stop string must not be empty")
        self.stops = tuple(stops)
        self.first_chars = frozenset(stop[0] for stop in stops)
        # Per state: the state before it, the character that leads from there, and which string (counted from
        # 1, 0 for none) is complete, the longest one if there are several.
        self._parents = array("i", [-1])
        self._chars = array("i", [0])
        self._found = array("i", [0])
        self._branches: dict[tuple[int, int], int] = {}
        self.depth = array("i", [0])
        for number, stop in enumerate(self.stops, start=1):
            self._insert(number, stop)
        self.failure = array("i", [0]) * len(self.depth)
        self._link()

    def child(self, state: int, char: int) -> int | None:
        """The state one character further, or None where no stop string goes on so."""
        following = state + 1
        if (
            following < len(self._parents)
            and self._parents[following] == state
            and self._chars[following] == char
        ):
            return following
        return self._branches.get((state, char)) if self._branches else None

    def found(self, state: int) -> str | None:
        """The longest stop string that is complete in a state."""
        number = self._found[state]
        return self.stops[number - 1] if number else None

    def _insert(self, number: int, stop: str) -> None:
        state = 0
        for char in map(ord, stop):
            following = self.child(state, char)
            if following is None:
                following = len(self._parents)
                if following != state + 1:
                    self._branches[state, char] = following
                self._parents.append(state)
                self._chars.append(char)
                self._found.append(0)
                self.depth.append(self.depth[state] + 1)
            state = following
        self._found[state] = number

    def _link(self) -> None:
        """Fills in the failure states, the shallower states first: those of deeper ones build on them."""
        for state in sorted(range(1, len(self.depth)), key=self.depth.__getitem__):
            parent, char = self._parents[state], self._chars[state]
            if parent:
                fallback = self.failure[parent]
                while (following := self.child(fallback, char)) is None and fallback:
                    fallback = self.failure[fallback]
                self.failure[state] = following or 0
            if not self._found[state]:
                self._found[state] = self._found[self.failure[state]]


class StopSearch:
    """The search for a set of stop strings in one growing text.

    The match that is complete first wins; of several that are complete at the same character, the longest. So
    the result does not depend on how the text was cut into pieces.

    Attributes:
        matched: the stop string that was found, or None.
    """

    __slots__ = ("_held", "_state", "_stop_strings", "matched")

    def __init__(self, stop_strings: StopStrings | None) -> None:
        """Starts at the beginning of a text; None searches for nothing."""
        self._stop_strings = stop_strings if stop_strings is not None and stop_strings.stops else None
        self._held = ""
        self._state = 0
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Appends `text` and returns what may be shown now.

        Once a stop string is complete, `matched` is set and the text ends before it. Then the search is over:
        feed nothing more.
        """
        stop_strings = self._stop_strings
        if stop_strings is None:
            return text
        assert self.matched is None, "the search is over once a stop string was found"
        if not self._state and stop_strings.first_chars.isdisjoint(text):
            # By far the most frequent case: nothing is held back, and nothing begins here.
            return text
        child, failure, found = stop_strings.child, stop_strings.failure, stop_strings.found
        state = self._state
        for index, char in enumerate(map(ord, text)):
            while (following := child(state, char)) is None and state:
                state = failure[state]
            state = following or 0
            if state and (stop := found(state)) is not None:
                self.matched = stop
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - len(stop)]
        self._state = state
        seen = self._held + text
        cut = len(seen) - stop_strings.depth[state]
        self._held = seen[cut:]
        return seen[:cut]

    def flush(self) -> str:
        """Returns what is held back: the text has ended, so no stop string can become complete any more."""
        held, self._held, self._state = self._held, "", 0
        return held
