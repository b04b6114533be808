"""From the body of a POST to requests that the engine is sure to take: what can be refused is refused here.

The engine's own checks say what is wrong; here it is said in the words of the endpoint. All prompts of a body
pass before the first one is submitted, so that one bad entry refuses the body as a whole.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagedkv.errors import InvalidRequest
from pagedkv.request import INLINE_LEN, Request
from pagedkv.sampling_params import SamplingParams
from pagedkv.serve.errors import from_invalid, refuse
from pagedkv.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from pagedkv.serve.served import Served
from pagedkv.text.errors import ChatTemplateError

DEFAULT_COMPLETION_TOKENS = 16


async def completion_requests(served: Served, body: CompletionRequest, salt: bytes) -> list[Request]:
    """A request for every prompt, in order. Ids that the caller gives are used as they are, without a BOS."""
    params = _params(body)

    def prepare(index: int) -> Request:
        with _in_words_of(body, "prompt" if len(body.prompt) == 1 else f"prompt[{index}]"):
            return served.engine.prepare(
                body.prompt[index],
                params,
                salt=salt,
                priority=body.priority,
                add_special_tokens=body.add_special_tokens,
                default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            )

    def prepare_all() -> list[Request]:
        return [prepare(index) for index in range(len(body.prompt))]

    return await _prepared(prepare_all, body, sum(map(len, body.prompt)))


async def chat_request(served: Served, body: ChatRequest, salt: bytes) -> list[Request]:
    """The request for a conversation, alone in a list.

    The prompt is what the model's chat template makes of the conversation; it writes the special tokens
    itself.
    """
    turns = [message.as_template_input() for message in body.messages]
    opens_reply = body.add_generation_prompt
    if opens_reply is None:
        opens_reply = not body.continue_final_message

    def prepare() -> list[Request]:
        try:
            text = served.engine.tokenizer.chat_text(
                turns,
                add_generation_prompt=opens_reply,
                continue_final_message=body.continue_final_message,
                **body.chat_template_kwargs,
            )
        except ChatTemplateError as error:
            refuse("messages", f"The messages cannot be rendered: {error}")
        with _in_words_of(body, "messages"):
            request = served.engine.prepare(
                text, _params(body), salt=salt, priority=body.priority, add_special_tokens=False
            )
            return [request]

    return await _prepared(prepare, body, sum(len(turn["content"]) for turn in turns))


async def _prepared(
    prepare: Callable[[], list[Request]], body: GenerationRequest, prompt_len: int
) -> list[Request]:
    """Runs `prepare`; where there is much to do in a thread, so that the event loop goes on.

    The tokenizer lets go of the interpreter (`Tokenizer.encode`), and Python code gives way to others itself.
    """
    arrival_time = time.monotonic()
    num_chars = prompt_len + sum(map(len, body.stop))
    requests = prepare() if num_chars <= INLINE_LEN else await asyncio.to_thread(prepare)
    for request in requests:
        # The client waits for the tokenizer as well.
        request.arrival_time = arrival_time
    return requests


@contextmanager
def _in_words_of(body: GenerationRequest, prompt_param: str) -> Iterator[None]:
    """Names the body's fields in a refusal of the engine's."""
    try:
        yield
    except InvalidRequest as error:
        raise from_invalid(error, {"prompt": prompt_param, "max_tokens": body.token_limit_field}) from error


def _params(body: GenerationRequest) -> SamplingParams:
    return SamplingParams(
        n=body.n,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        max_tokens=body.token_limit,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logprobs=body.num_logprobs,
        skip_special_tokens=body.skip_special_tokens,
        include_stop_str_in_output=body.include_stop_str_in_output,
    )
