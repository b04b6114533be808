"""A request before it is submitted: the forms that a prompt may have, and the checks that need no engine.

Everything is checked in the caller's thread, so that nothing reaches the engine's that could stop it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidRequest
from pagedkv.sampling_params import SamplingParams
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

_FORMS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': list of token ids}"


@dataclass(frozen=True)
class Limits:
    """What a model and its engine allow a request.

    Attributes:
        max_model_len: tokens of prompt and answer together.
        vocab_size: token ids are less than this.
    """

    max_model_len: int
    vocab_size: int


@dataclass
class Request:
    """A prompt that has been encoded and found to fit.

    Attributes:
        prompt: the text, where the prompt was given as text.
        prompt_token_ids: what the model reads.
        params: as given.
        max_tokens: tokens to generate at most, the room that the context leaves where params does not say.
        salt: namespace of the prefix cache; only requests with the same salt share blocks.
        arrival_time: seconds of `time.monotonic`.
        seed: the seed that is used, from the first attempt to submit on.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    salt: bytes = b""
    arrival_time: float = field(default_factory=time.monotonic)
    seed: int | None = None

    def token_array(self) -> NDArray[np.int32]:
        """The prompt as the core takes it."""
        return np.asarray(self.prompt_token_ids, dtype=np.int32)


def make_request(
    prompt: Prompt, params: SamplingParams, tokenizer: "Tokenizer", limits: Limits, *, salt: bytes = b""
) -> Request:
    """Encodes and checks one prompt. Raises InvalidRequest, naming field, value and what is allowed."""
    text, token_ids = _encode(prompt, tokenizer)
    if not token_ids:
        raise InvalidRequest("prompt is empty, allowed: at least one token")
    _check_token_ids("prompt", token_ids, limits.vocab_size)
    _check_token_ids("stop_token_ids", params.stop_ids, limits.vocab_size)
    max_tokens = _room(len(token_ids), params.max_tokens, limits.max_model_len)
    return Request(text, token_ids, params, max_tokens, salt)


def split_prompts(prompts: Prompts) -> list[Prompt]:
    """The prompts that were given as one argument: a single one in any form, or a list of them.

    A list of integers is one prompt of token ids. Raises InvalidRequest for anything else.
    """
    if isinstance(prompts, str | dict):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequest(f"prompts is {_name(prompts)}, allowed: {_FORMS}, or a list of those")
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
        raise InvalidRequest(f"sampling_params is {_name(params)}, allowed: SamplingParams or a list of them")
    if len(params) != num_prompts:
        raise InvalidRequest(
            f"sampling_params has {len(params)} entries, allowed: one, or one for each of {num_prompts}"
        )
    return list(params)


def _encode(prompt: object, tokenizer: "Tokenizer") -> tuple[str | None, list[int]]:
    if isinstance(prompt, dict):
        if set(prompt) == {"prompt_token_ids"}:
            return None, _as_token_ids(prompt["prompt_token_ids"])
        if set(prompt) != {"prompt"} or not isinstance(prompt["prompt"], str):
            raise InvalidRequest(f"prompt is a dict with {sorted(map(str, prompt))}, allowed: {_FORMS}")
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        try:
            return prompt, tokenizer.encode(prompt)
        except TextError as error:
            raise InvalidRequest(f"prompt cannot be encoded: {error}") from error
    return None, _as_token_ids(prompt)


def _as_token_ids(value: object) -> list[int]:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return [int(token_id) for token_id in value]
    if not isinstance(value, Sequence) or isinstance(value, bytes | str):
        raise InvalidRequest(f"prompt is {_name(value)}, allowed: {_FORMS}")
    for idx, item in enumerate(value):
        if not isinstance(item, int | np.integer) or isinstance(item, bool):
            raise InvalidRequest(
                f"prompt has {_name(item)} at place {idx}, allowed: token ids, which are integers"
            )
    return [int(item) for item in value]


def _check_token_ids(field_name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{field_name} has the token id {wrong}, allowed: 0..{vocab_size - 1}")


def _room(prompt_len: int, max_tokens: int | None, max_model_len: int) -> int:
    """How many tokens may be generated. Clients tell this error from others by its wording."""
    head = f"This model's maximum context length is {max_model_len} tokens"
    if prompt_len >= max_model_len:
        raise InvalidRequest(
            f"{head}, but the prompt has {prompt_len}, which leaves no room for an answer; "
            f"allowed: a prompt of at most {max_model_len - 1} tokens"
        )
    if max_tokens is None:
        return max_model_len - prompt_len
    if prompt_len + max_tokens > max_model_len:
        raise InvalidRequest(
            f"{head}, but {prompt_len + max_tokens} were requested ({prompt_len} in the prompt, "
            f"{max_tokens} for the answer); allowed: max_tokens of at most {max_model_len - prompt_len} here"
        )
    return max_tokens


def _name(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
