"""From the body of a POST to requests that the engine is sure to take: what can be refused is refused here.

The engine's own checks say what is wrong; here it is said in the words of the endpoint. All prompts of a body
pass before the first one is submitted, so that one bad entry refuses the body as a whole.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pagedkv.beam_search import BeamSearchParams
from pagedkv.cache_control import PIN_PARAMS
from pagedkv.errors import InvalidRequest
from pagedkv.request import AnyParams, Request, off_loop
from pagedkv.sampling_params import SamplingParams
from pagedkv.serve.cache_bodies import PromptBody
from pagedkv.serve.errors import from_invalid, refuse
from pagedkv.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest, TemplateFields
from pagedkv.serve.served import Served
from pagedkv.text.errors import ChatTemplateError

DEFAULT_COMPLETION_TOKENS = 16


async def completion_requests(served: Served, body: CompletionRequest, salt: bytes) -> list[Request]:
    """A request for every prompt, in order. Ids that the caller gives are used as they are, without a BOS."""
    params = _params(body)
    if body.append:
        return [await _appended(served, body, params, salt)]

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

    requests = await _prepared(prepare_all, body, sum(map(len, body.prompt)))
    return await _kept(served, body, requests)


async def chat_request(served: Served, body: ChatRequest, salt: bytes) -> list[Request]:
    """The request for a conversation, alone in a list.

    The prompt is what the model's chat template makes of the conversation; it writes the special tokens
    itself.
    """
    turns = [message.as_template_input() for message in body.messages]

    def prepare() -> list[Request]:
        text = chat_text(served, turns, body)
        with _in_words_of(body, "messages"):
            request = served.engine.prepare(
                text, _params(body), salt=salt, priority=body.priority, add_special_tokens=False
            )
            return [request]

    requests = await _prepared(prepare, body, sum(len(turn["content"]) for turn in turns))
    return await _kept(served, body, requests)


def chat_text(served: Served, turns: Sequence[dict[str, Any]], fields: TemplateFields) -> str:
    """What the model's chat template makes of a conversation. Raises ApiError 400."""
    opens_reply = fields.add_generation_prompt
    if opens_reply is None:
        opens_reply = not fields.continue_final_message
    try:
        return served.engine.tokenizer.chat_text(
            turns,
            add_generation_prompt=opens_reply,
            continue_final_message=fields.continue_final_message,
            **fields.template_variables,
        )
    except ChatTemplateError as error:
        refuse("messages", f"The messages cannot be rendered: {error}")


async def prompt_request(served: Served, body: PromptBody, salt: bytes) -> Request:
    """The prompt of a command about the cache, encoded as the endpoint that generates would do it."""
    turns = [message.as_template_input() for message in body.messages or ()]

    def prepare() -> Request:
        prompt = chat_text(served, turns, body) if body.prompt is None else body.prompt[0]
        special = body.prompt is not None and body.add_special_tokens
        try:
            return served.engine.prepare(prompt, PIN_PARAMS, salt=salt, add_special_tokens=special)
        except InvalidRequest as error:
            field = "messages" if body.prompt is None else "prompt"
            raise from_invalid(error, {"prompt": field, "max_tokens": field}) from error

    num_chars = sum(len(turn["content"]) for turn in turns) + sum(map(len, body.prompt or ()))
    return await off_loop(num_chars, prepare)


async def _appended(served: Served, body: CompletionRequest, params: AnyParams, salt: bytes) -> Request:
    """The request that continues a session."""
    assert body.session_id is not None, "the body was checked"
    assert isinstance(params, SamplingParams), "the body was checked"
    arrival_time = time.monotonic()
    with _in_words_of(body, "prompt"):
        request = await served.engine.prepare_session(
            body.prompt[0],
            params,
            session_id=body.session_id,
            session_ttl=body.session_ttl,
            append=True,
            salt=salt,
            priority=body.priority,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        )
    request.arrival_time = arrival_time
    return request


async def _kept(served: Served, body: GenerationRequest, requests: list[Request]) -> list[Request]:
    """The requests; where a session is asked for, the only one will leave it behind."""
    if body.session_id is None:
        return requests
    request = requests[0]
    kept = await served.engine.prepare_session(
        request, request.params, session_id=body.session_id, session_ttl=body.session_ttl, salt=request.salt
    )
    return [kept]


async def _prepared(
    prepare: Callable[[], list[Request]], body: GenerationRequest, prompt_len: int
) -> list[Request]:
    """Runs `prepare`, off the event loop where there is much to do.

    The tokenizer lets go of the interpreter (`Tokenizer.encode`), and Python code gives way to others itself.
    """
    arrival_time = time.monotonic()
    num_chars = prompt_len + sum(map(len, body.stop))
    requests = await off_loop(num_chars, prepare)
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
        names = {"prompt": prompt_param, "max_tokens": body.token_limit_field, "beam_width": "n"}
        raise from_invalid(error, names) from error


def _params(body: GenerationRequest) -> AnyParams:
    if body.use_beam_search:
        return BeamSearchParams(
            beam_width=body.n,
            max_tokens=body.token_limit,
            ignore_eos=body.ignore_eos,
            length_penalty=body.length_penalty,
            early_stopping=body.early_stopping,
            skip_special_tokens=body.skip_special_tokens,
            include_stop_str_in_output=body.include_stop_str_in_output,
            cache_priority=body.cache_priority,
        )
    return SamplingParams(
        n=body.n,
        best_of=body.best_of,
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
        cache_priority=body.cache_priority,
    )
