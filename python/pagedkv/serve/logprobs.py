"""Log-probabilities in OpenAI's two shapes: parallel lists for completions, a list of objects for chat."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from pagedkv.outputs import Logprob, TokenLogprobs

# JSON has no infinity. No real token comes near this.
_LEAST = -9999.0


def _value(logprob: Logprob) -> float:
    return logprob.logprob if math.isfinite(logprob.logprob) else _LEAST


def _text(logprob: Logprob) -> str:
    assert logprob.decoded_token is not None, "requests over HTTP are detokenized"
    return logprob.decoded_token


def _ranked(entry: TokenLogprobs, num_top: int) -> Iterable[tuple[int, Logprob]]:
    """The `num_top` most likely tokens of an entry, in order; the sampled one only if it is among them."""
    ranked = [(token_id, logprob) for token_id, logprob in entry.items() if logprob.rank is not None]
    ranked.sort(key=lambda item: item[1].rank or 0)
    return ranked[:num_top]


def for_completion(
    token_ids: list[int], entries: list[TokenLogprobs], num_top: int, text_offsets: list[int]
) -> dict[str, Any]:
    """The lists of /v1/completions.

    Args:
        token_ids: the sampled tokens.
        entries: one per token.
        num_top: alternatives wanted for each.
        text_offsets: where the text of each token begins in the whole answer.

    Returns:
        tokens, token_logprobs, top_logprobs and text_offset. top_logprobs maps texts to numbers; of several
        tokens with one text it has the likeliest.
    """
    tokens: list[str] = []
    values: list[float] = []
    tops: list[dict[str, float]] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        sampled = entry[token_id]
        top: dict[str, float] = {}
        for _, logprob in _ranked(entry, num_top):
            top[_text(logprob)] = max(_value(logprob), top.get(_text(logprob), _LEAST))
        # The sampled token is always among the alternatives, as OpenAI has it.
        top.setdefault(_text(sampled), _value(sampled))
        tokens.append(_text(sampled))
        values.append(_value(sampled))
        tops.append(top)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": text_offsets}


def for_chat(
    token_ids: list[int], entries: list[TokenLogprobs], num_top: int, token_bytes: Callable[[int], bytes]
) -> dict[str, Any]:
    """The `content` list of /v1/chat/completions: every token with its bytes and its `num_top` alternatives.

    `token_bytes` gives what a token stands for even where that is a part of a character.
    """

    def token(token_id: int, logprob: Logprob) -> dict[str, Any]:
        raw = list(token_bytes(token_id))
        return {"token": _text(logprob), "logprob": _value(logprob), "bytes": raw}

    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = [token(top_id, logprob) for top_id, logprob in _ranked(entry, num_top)]
        content.append({**token(token_id, entry[token_id]), "top_logprobs": top})
    return {"content": content, "refusal": None}
