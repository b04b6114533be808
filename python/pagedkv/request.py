"""A request before it is submitted: the forms that a prompt may have, and the checks that need no engine.

Everything is checked in the caller's thread, so that nothing reaches the engine's that could stop it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from pagedkv.beam_search import BeamSearchParams
from pagedkv.checks import check_int, shown
from pagedkv.errors import InvalidRequest
from pagedkv.sampling_params import MAX_PRIORITY, MIN_PRIORITY, SamplingParams
from pagedkv.text.errors import TextError

if TYPE_CHECKING:
    from pagedkv.text.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    """A prompt as token ids, used exactly as they are."""

    prompt_token_ids: Sequence[int]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


Prompt = str | Sequence[int] | TokensPrompt | TextPrompt
Prompts = Prompt | Sequence[Prompt]
AnyParams = SamplingParams | BeamSearchParams
T = TypeVar("T")

INLINE_LEN = 4096
"""Prompts up to this length, in characters or token ids, are prepared in about a millisecond."""

_FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': list of token ids}"


@dataclass(frozen=True)
class Limits:
    """What a model and its engine allow a request.

    Attributes:
        max_model_len: tokens of prompt and answer together.
        vocab_size: token ids are less than this.
        num_end_tokens: token ids that end an answer.
    """

    max_model_len: int
    vocab_size: int
    num_end_tokens: int = 0


class ContextOverflow(InvalidRequest):
    """Prompt and answer are longer together than the model's context. Clients tell it by its wording."""


@dataclass
class Request:
    """A prompt that has been encoded and found to fit.

    Attributes:
        prompt: the text, where the prompt was given as text.
        prompt_token_ids: what the model reads.
        tokens: the same, as the core takes it.
        params: as given.
        max_tokens: tokens to generate at most, the room that the context leaves where params does not say.
        salt: namespace of the prefix cache; only requests with the same salt share blocks.
        arrival_time: seconds of `time.monotonic`.
        priority: the least number is served first.
        beam: the beam search that is asked for; `params` holds what it has in common with sampling.
        seed: the seed that is used, from the first attempt to submit on.
        promise: the core's promise to keep what it leaves behind; None for nothing.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    tokens: NDArray[np.int32] = field(repr=False)
    params: SamplingParams
    max_tokens: int
    salt: bytes
    arrival_time: float
    priority: int = 0
    beam: BeamSearchParams | None = None
    seed: int | None = None
    promise: int | None = None


def make_request(
    prompt: Prompt,
    params: AnyParams,
    tokenizer: "Tokenizer",
    limits: Limits,
    *,
    salt: bytes = b"",
    priority: int = 0,
    add_special_tokens: bool = True,
    default_max_tokens: int | None = None,
) -> Request:
    """Encodes and checks one prompt; any thread may do that.

    Args:
        prompt: in any of its forms.
        params: how to continue it.
        tokenizer: encodes a text.
        limits: what the request must keep to.
        salt: as in `Request`.
        priority: as in `Request`.
        add_special_tokens: whether a text gets the BOS and EOS that the tokenizer adds.
        default_max_tokens: tokens to generate where params.max_tokens is None, fewer if the context leaves
            less room. None: all that it leaves.

    Raises:
        InvalidRequest: with the field, its value and what is allowed.
    """
    arrival_time = time.monotonic()
    beam = None
    if isinstance(params, BeamSearchParams):
        beam, params = params, params.as_sampling()
        _check_width(beam, limits)
    text, given = _encode(prompt, tokenizer, limits, add_special_tokens)
    # The length comes first: it bounds what the other checks cost.
    max_tokens = _room(len(given), params.max_tokens, limits.max_model_len)
    if params.max_tokens is None and default_max_tokens is not None:
        max_tokens = min(max_tokens, default_max_tokens)
    tokens = _token_array("prompt", given, limits.vocab_size)
    _token_array("stop_token_ids", params.stop_ids, limits.vocab_size)
    check_int(InvalidRequest, "priority", priority, MIN_PRIORITY, MAX_PRIORITY, "an int32")
    if not isinstance(salt, bytes):
        # A salt is a secret, so the message does not quote it.
        raise _refusal(f"is {_name(salt)}, allowed: bytes", "salt")
    # Many long stop strings take as long as a long prompt, so they are made ready in the same thread.
    _ = params.stop_strings
    return Request(text, tokens.tolist(), tokens, params, max_tokens, salt, arrival_time, priority, beam)


def _check_width(beam: BeamSearchParams, limits: Limits) -> None:
    """So many candidates are ranked that beam_width of them go on, whatever ends. Raises InvalidRequest."""
    num_end_tokens = 0 if beam.ignore_eos else limits.num_end_tokens
    widest = limits.vocab_size // max(2, 1 + num_end_tokens)
    if beam.beam_width > widest:
        raise _refusal(f"is {beam.beam_width}, allowed: 1..{widest} with this vocabulary", "beam_width")


def encode_continuation(prompt: Prompt, tokenizer: "Tokenizer", limits: Limits) -> NDArray[np.int32]:
    """The token ids of what continues a session; there may be none. Raises InvalidRequest."""
    _, given = _encode(prompt, tokenizer, limits, False)
    if len(given) >= limits.max_model_len:
        raise _too_long(str(len(given)), limits.max_model_len)
    return _token_array("prompt", given, limits.vocab_size)


def prompt_len(prompt: object) -> int:
    """How much work a prompt is: the length of its text or list, 0 for what is neither or was prepared."""
    if isinstance(prompt, Request):
        return 0
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt", prompt.get("prompt_token_ids"))
    return len(prompt) if isinstance(prompt, Sequence) else 0


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Does work on prompts of this total length; in a thread if it is long, so that the loop goes on."""
    return work() if size <= INLINE_LEN else await asyncio.to_thread(work)


def split_prompts(prompts: Prompts) -> list[Prompt]:
    """The prompts that were given as one argument: a single one in any form, or a list of them.

    A list of integers is one prompt of token ids. Raises InvalidRequest for anything else.
    """
    if isinstance(prompts, str | dict):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise _refusal(f"is {_name(prompts)}, allowed: {_FORMS}, or a list of those", "prompts")
    if prompts and all(isinstance(item, int | np.integer) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # just seen to be integers
    return list(prompts)  # type: ignore[arg-type]  # `_encode` refuses what is no prompt


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    """One SamplingParams per prompt, from one for all, from a list, or from the defaults."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise _refusal(f"is {_name(params)}, allowed: SamplingParams or a list of them", "sampling_params")
    if len(params) != num_prompts:
        allowed = f"one, or one for each of {num_prompts}"
        raise _refusal(f"has {len(params)} entries, allowed: {allowed}", "sampling_params")
    return list(params)


def _encode(
    prompt: object, tokenizer: "Tokenizer", limits: Limits, add_special_tokens: bool
) -> tuple[str | None, Sequence[object]]:
    """The prompt's text, where it is one, and what should be its token ids."""
    if isinstance(prompt, dict):
        if set(prompt) == {"prompt_token_ids"}:
            return None, _sequence(prompt["prompt_token_ids"])
        if set(prompt) != {"prompt"} or not isinstance(prompt["prompt"], str):
            raise _refusal(f"is a dict with {sorted(map(str, prompt))}, allowed: {_FORMS}")
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        # Encoding takes the time that the text asks for, so a text that cannot fit is refused unread.
        fewest = tokenizer.fewest_tokens(prompt)
        if fewest >= limits.max_model_len:
            raise _too_long(f"at least {fewest}", limits.max_model_len)
        try:
            return prompt, tokenizer.encode(prompt, add_special_tokens)
        except TextError as error:
            raise _refusal(f"cannot be encoded: {error}") from error
    return None, _sequence(prompt)


def _sequence(value: object) -> Sequence[object]:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return cast(list[object], value.tolist())
    if not isinstance(value, Sequence) or isinstance(value, bytes | str):
        raise _refusal(f"is {_name(value)}, allowed: {_FORMS}")
    return value


def _token_array(name: str, given: Sequence[object], vocab_size: int) -> NDArray[np.int32]:
    """Token ids as an array. One pass over their types and two over the numbers, none of them in Python."""
    kinds = set(map(type, given))
    strange = {kind for kind in kinds if kind is bool or not issubclass(kind, int | np.integer)}
    if strange:
        idx, item = next((idx, item) for idx, item in enumerate(given) if type(item) in strange)
        raise _refusal(f"has {_name(item)} at place {idx}, allowed: token ids, which are integers", name)
    token_ids = cast(Sequence[int], given)
    try:
        array = np.array(token_ids, dtype=np.int64)
    except OverflowError:
        array = None
    if array is None or (array.size and not 0 <= array.min() <= array.max() < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise _refusal(f"has the token id {shown(wrong)}, allowed: 0..{vocab_size - 1}", name)
    return array.astype(np.int32)


def _room(num_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens may be generated."""
    if num_tokens == 0:
        raise _refusal("is empty, allowed: at least one token")
    if num_tokens >= max_model_len:
        raise _too_long(str(num_tokens), max_model_len)
    if max_tokens is None:
        return max_model_len - num_tokens
    if num_tokens + max_tokens > max_model_len:
        raise ContextOverflow(
            f"{_context(max_model_len)}, but {shown(num_tokens + max_tokens)} were requested "
            f"({num_tokens} in the prompt, {shown(max_tokens)} for the answer); "
            f"allowed: max_tokens of at most {max_model_len - num_tokens} here",
            "max_tokens",
        )
    return max_tokens


def _too_long(num_tokens: str, max_model_len: int) -> ContextOverflow:
    return ContextOverflow(
        f"{_context(max_model_len)}, but the prompt has {num_tokens}, which leaves no room for an answer; "
        f"allowed: a prompt of at most {max_model_len - 1} tokens",
        "prompt",
    )


def _context(max_model_len: int) -> str:
    return f"This model's maximum context length is {max_model_len} tokens"


def _name(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _refusal(what: str, name: str = "prompt") -> InvalidRequest:
    return InvalidRequest(f"{name} {what}", name)
