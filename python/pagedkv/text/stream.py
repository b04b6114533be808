"""The text of one generated sequence: detokenized, cut at stop strings, handed out as it becomes certain.

Lives on the side that talks to the client, one object per sample of a request. The engine itself knows tokens
only: `stop_at_tokens` is what it is told when a stop string ended the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .detokenizer import Detokenizer
from .stop import StopSearch, StopStrings

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class SequenceText:
    """Takes generated tokens one by one and gives the new text for each.

    Attributes:
        text: everything given out so far.
        num_tokens: tokens taken so far, up to and including the one that completed a stop string.
        stop_string: the stop string that ended the text, or None.
    """

    __slots__ = (
        "_deltas",
        "_detokenizer",
        "_include_stop",
        "_num_chars",
        "_search",
        "_text",
        "num_tokens",
        "stop_string",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings | None = None,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        *,
        at_start: bool = True,
    ) -> None:
        """Starts an empty text; `at_start` as in `Detokenizer`."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, at_start=at_start)
        self._search = StopSearch(stop)
        self._include_stop = include_stop
        # The deltas are joined only when somebody asks, so that a long stream does not copy its text per
        # token.
        self._deltas: list[str] = []
        self._text = ""
        # Of all the detokenized text, that which is held back or cut off included.
        self._num_chars = 0
        self.num_tokens = 0
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        """The text given out so far."""
        if self._deltas:
            self._text += "".join(self._deltas)
            self._deltas.clear()
        return self._text

    @property
    def stopped(self) -> bool:
        """True once a stop string is complete; tokens added later are ignored."""
        return self.stop_string is not None

    @property
    def stop_at_tokens(self) -> int | None:
        """The number of generated tokens at which the stop string was complete, or None."""
        return self.num_tokens if self.stopped else None

    def offset_of(self, token_id: int) -> int:
        """Where in the text `token_id` begins if it is added next.

        All parts of a character begin where it begins. A part that a stop string takes away counts as if it
        had stayed.
        """
        return self._num_chars + self._detokenizer.num_cut_short(token_id)

    def add(self, token_id: int) -> str:
        """Appends a generated token and returns the new text, which may be empty."""
        if self.stopped:
            return ""
        self.num_tokens += 1
        return self._feed(self._detokenizer.add((token_id,)))

    def end(self) -> str:
        """Ends the text and returns what was held back. A stop string can still be completed by it."""
        if self.stopped:
            return ""
        delta = self._feed(self._detokenizer.flush())
        if self.stopped:
            return delta
        held = self._search.flush()
        self._deltas.append(held)
        return delta + held

    def _feed(self, new: str) -> str:
        if not new:
            return ""
        self._num_chars += len(new)
        delta = self._search.feed(new)
        self.stop_string = self._search.matched
        if self._include_stop and self.stop_string is not None:
            delta += self.stop_string
        self._deltas.append(delta)
        return delta
