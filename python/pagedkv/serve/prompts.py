"""From the prompt of a request to token ids that are sure to fit: what can be refused is refused here.

All prompts of a request pass before the first one is submitted, so that one bad entry refuses the request
as a whole.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pagedkv.serve.errors import refuse, shown
from pagedkv.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest, Prompt
from pagedkv.serve.served import Served
from pagedkv.text.errors import ChatTemplateError

DEFAULT_COMPLETION_TOKENS = 16
# Texts up to this length are tokenised in place, in about a millisecond; longer ones in a thread.
_INLINE_CHARS = 4096

Result = TypeVar("Result")


async def completion_prompts(served: Served, request: CompletionRequest) -> list[list[int]]:
    """Token ids of every prompt, in order. Ids that the caller gives are used as they are, without a BOS."""
    texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]

    def encode() -> list[list[int]]:
        return [_token_ids(served, prompt, request.add_special_tokens) for prompt in request.prompt]

    prompts = await _off_loop(encode, sum(map(len, texts)))
    for index, token_ids in enumerate(prompts):
        param = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        _check_token_ids(served, param, token_ids)
        _check_room(served, param, len(token_ids), request)
    return prompts


async def chat_prompt(served: Served, request: ChatRequest) -> list[int]:
    """Token ids of the conversation in the model's chat template, which writes the special tokens itself."""
    turns = [message.as_template_input() for message in request.messages]
    opens_reply = request.add_generation_prompt
    if opens_reply is None:
        opens_reply = not request.continue_final_message

    def render() -> list[int]:
        return served.engine.tokenizer.chat_prompt(
            turns,
            add_generation_prompt=opens_reply,
            continue_final_message=request.continue_final_message,
            **request.chat_template_kwargs,
        )

    try:
        token_ids = await _off_loop(render, sum(len(turn["content"]) for turn in turns))
    except ChatTemplateError as error:
        refuse("messages", f"The messages cannot be rendered: {error}")
    _check_token_ids(served, "messages", token_ids)
    _check_room(served, "messages", len(token_ids), request)
    return token_ids


def max_tokens_for(served: Served, prompt_len: int, limit: int | None, default: int | None) -> int:
    """How many tokens to generate at most: as asked for, else the default, else the rest of the context."""
    room = served.max_model_len - prompt_len
    if limit is not None:
        return limit
    return room if default is None else min(default, room)


async def _off_loop(work: Callable[[], Result], num_chars: int) -> Result:
    """Runs `work` in place where it is short, else in a thread: the tokenizer lets go of the interpreter."""
    if num_chars <= _INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)


def _token_ids(served: Served, prompt: Prompt, add_special_tokens: bool) -> list[int]:
    if isinstance(prompt, str):
        return served.engine.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    return prompt


def _check_token_ids(served: Served, param: str, token_ids: list[int]) -> None:
    if not token_ids:
        refuse(param, f"{param} is empty: it must have at least 1 token.", code="invalid_value")
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= served.vocab_size:
        wrong = lowest if lowest < 0 else highest
        allowed = f"token ids must be 0 to {served.vocab_size - 1}"
        refuse(param, f"{param}: {allowed}, got {shown(wrong)}.", code="invalid_value")


def _check_room(served: Served, param: str, prompt_len: int, request: GenerationRequest) -> None:
    """Prompt and answer must fit into the context together; the numbers say which of them is too large."""
    longest = served.max_model_len
    wanted = request.token_limit
    if prompt_len + (wanted or 1) <= longest:
        return
    message = f"This model's maximum context length is {longest} tokens. "
    if prompt_len >= longest:
        message += f"{param} has {prompt_len} tokens, and at least 1 must be left for the answer."
    else:
        name = request.token_limit_field
        message += (
            f"{param} has {prompt_len} tokens and {name} is {wanted}, {prompt_len + (wanted or 0)} in all."
        )
        param = name
    refuse(param, message, code="context_length_exceeded")
