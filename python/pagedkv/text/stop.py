"""Finds stop strings in a text that arrives in pieces, and says how much of it may be shown already.

All stop strings are searched together with one Aho-Corasick automaton (Aho, Corasick 1975). Its state after a
character is the longest suffix of the text that is a prefix of some stop string: exactly what must be held
back, no matter how long the longest stop string is. The cost is constant per character and independent of
their number.

Used by `SequenceText`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """The search for a set of stop strings in one growing text.

    The match that is complete first wins; of several that are complete at the same character, the longest. So
    the result does not depend on how the text was cut into pieces.

    Attributes:
        matched: the stop string that was found, or None.
    """

    __slots__ = ("_automaton", "_held", "_state", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Prepares the search. Raises ValueError for an empty stop string, which would match everywhere."""
        if isinstance(stops, str):
            raise TypeError("stop: expected a list of strings, got a string")
        if any(not stop for stop in stops):
            raise ValueError("stop: a stop string must not be empty")
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._held = ""
        self._state = 0
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Appends `text` and returns what may be shown now.

        Once a stop string is complete, `matched` is set and the text ends before it. Then the search is over:
        feed nothing more.
        """
        if self._automaton is None:
            return text
        assert self.matched is None, "the search is over once a stop string was found"
        edges, failure, depth, found = self._automaton
        state = self._state
        for index, char in enumerate(text):
            while (following := edges[state].get(char)) is None and state:
                state = failure[state]
            state = following or 0
            if (stop := found[state]) is not None:
                self.matched = stop
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - len(stop)]
        self._state = state
        seen = self._held + text
        cut = len(seen) - depth[state]
        self._held = seen[cut:]
        return seen[:cut]

    def flush(self) -> str:
        """Returns what is held back: the text has ended, so no stop string can become complete any more."""
        held, self._held, self._state = self._held, "", 0
        return held


_Automaton = tuple[list[dict[str, int]], list[int], list[int], list[str | None]]


@lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Builds the automaton: per state its edges, failure state, depth and the longest stop ending there."""
    edges: list[dict[str, int]] = [{}]
    depth = [0]
    found: list[str | None] = [None]
    for stop in stops:
        state = 0
        for char in stop:
            if char not in edges[state]:
                edges[state][char] = len(edges)
                edges.append({})
                depth.append(depth[state] + 1)
                found.append(None)
            state = edges[state][char]
        found[state] = stop
    failure = [0] * len(edges)
    # Breadth first, so that the failure state of a shallower state is known when a deeper one needs it.
    queue = list(edges[0].values())
    for state in queue:
        for char, child in edges[state].items():
            queue.append(child)
            fallback = failure[state]
            while fallback and char not in edges[fallback]:
                fallback = failure[fallback]
            failure[child] = edges[fallback].get(char, 0)
            if found[child] is None:
                found[child] = found[failure[child]]
    return edges, failure, depth, found
