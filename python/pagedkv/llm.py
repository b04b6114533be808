"""`LLM`: a model in this process, for work that is there as a whole. It steps the engine itself."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from tqdm import tqdm

from pagedkv._core import Core
from pagedkv.base_llm import BaseLLM
from pagedkv.beam_search import BeamSearchOutput, BeamSearchParams
from pagedkv.cache_control import CacheControl, check_session_arguments
from pagedkv.engine import Engine
from pagedkv.errors import InvalidRequest, QueueFull
from pagedkv.explanation import Explanation
from pagedkv.holds import Keeping
from pagedkv.idle import IdleThread
from pagedkv.outputs import RequestOutput
from pagedkv.ranked import BeamState
from pagedkv.request import Prompt, Prompts, Request, params_for, split_prompts
from pagedkv.sampling_params import SamplingParams
from pagedkv.streams import RequestState
from pagedkv.text.chat_template import RESERVED_VARIABLES

Message = Mapping[str, Any]
T = TypeVar("T")


class LLM(BaseLLM, CacheControl):
    """Generates answers to lists of prompts. `AsyncLLM` serves requests as they come.

    Calls from several threads run one after another.

    The arguments are the fields of `EngineConfig`, which says what they mean and allow.
    """

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        # Whoever steps the engine takes the events of all requests, so only one call may be at it.
        self._turn = threading.RLock()
        self._idle = IdleThread(engine)
        self._idle.resume()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        session_id: str | None = None,
        session_ttl: float | None = None,
        append: bool = False,
    ) -> list[RequestOutput]:
        """Continues prompts and returns the answers in the prompts' order.

        Args:
            prompts: a text, a list of token ids, {"prompt": ...}, {"prompt_token_ids": ...}, or a list of
                such.
            sampling_params: one for all or one per prompt; None for the defaults (temperature 1, 16 tokens).
            use_tqdm: shows a progress bar.
            session_id: keeps prompt and answer as a session of this name; for a single prompt with n = 1.
            session_ttl: seconds for which the session lives unused. None for an hour.
            append: begins the prompt with the session's tokens; the prompt may be empty then.

        Raises:
            InvalidRequest: a prompt or its parameters can never be served. Nothing is generated then.
            NotFound: there is no such session to continue.
            RequestFailed: a step raised.
            EngineDead: the process was forked after the model had been loaded.
        """
        split = split_prompts(prompts)
        params = params_for(sampling_params, len(split))
        check_session_arguments(session_id, session_ttl, append)
        if session_id is not None:
            if len(split) != 1:
                raise InvalidRequest(
                    f"session_id with {len(split)} prompts, allowed: one prompt", "session_id"
                )
            keeping = Keeping(
                self._front,
                split[0],
                params[0],
                kind="session",
                name=session_id,
                ttl=session_ttl,
                append=append,
            )
            return self._run_kept(keeping, use_tqdm=use_tqdm)
        # All of them are checked before the first one runs.
        requests = [self._front.request(prompt, one) for prompt, one in zip(split, params, strict=True)]
        return [state.output() for state in self._run(requests, use_tqdm=use_tqdm)]

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Searches for the likeliest continuations of prompts, and returns them in the prompts' order.

        Args:
            prompts: as in `generate`.
            params: for all of them.
            use_tqdm: shows a progress bar.

        Raises: as `generate` does.
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params is of type {type(params).__name__}, allowed: BeamSearchParams")
        requests = [self._front.request(prompt, params) for prompt in split_prompts(prompts)]
        states = self._run(requests, use_tqdm=use_tqdm)
        return [state.beam_output() for state in states if isinstance(state, BeamState)]

    def chat(  # noqa: PLR0913 - keyword arguments, one for each choice
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        session_id: str | None = None,
        session_ttl: float | None = None,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of conversations, through the model's chat template.

        Args:
            messages: [{"role": "user", "content": "Hello"}], or a list of such lists. As for the server,
                content that is None or absent counts as empty, and texts in parts are joined by line breaks.
            sampling_params: as in `generate`.
            use_tqdm: as in `generate`.
            add_generation_prompt: ends the prompt with the opening of the assistant's answer.
            continue_final_message: goes on within the last message instead.
            tools: descriptions of functions, for templates that know them.
            chat_template_kwargs: further variables of the template; none of what has an argument of its own.
            session_id: as in `generate`, for a single conversation. What was computed before is found again.
            session_ttl: as in `generate`.

        Raises:
            ChatTemplateError: the model has no chat template, or it refuses the conversation.
            InvalidRequest: as in `generate`.
        """
        variables = _template_variables(chat_template_kwargs)
        prompts: list[Prompt] = [
            self.tokenizer.chat_prompt(
                _with_content(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **variables,
            )
            for conversation in _conversations(messages)
        ]
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, session_id=session_id, session_ttl=session_ttl
        )

    def stats(self) -> dict[str, int]:
        """Counters as of the last step."""
        return self._engine.edge.stats()

    def explain(self, request_id: str) -> Explanation | None:
        """Why the prompt of a request was found in the cache as far as it was, and no further.

        None for an id that no output had, or had too long ago: the last 1024 are known.
        """
        core_id = self._front.names.find(b"", request_id)
        if core_id is None:
            return None
        with self._turn:
            return self._explain(self._engine.core, core_id, b"")

    def tenant_stats(self) -> dict[str, dict[str, int]]:
        """What every named tenant did and has, and under "other" all that were not named."""
        with self._turn:
            return self._tenant_stats(self._engine.core)

    def snapshot(self) -> dict[str, Any]:
        """A consistent picture of the cache."""
        with self._turn:
            return self._engine.core.snapshot()

    def check_invariants(self) -> None:
        """Raises RuntimeError naming the first rule of the cache that does not hold."""
        with self._turn:
            self._engine.core.check_invariants()

    def _ask(self, question: Callable[[Core], T]) -> T:
        # A fork would wait for good for a turn that another thread had.
        self._engine.require_own_process()
        with self._turn:
            return self._engine.ask(question)

    def _generate_kept(self, keeping: Keeping) -> None:
        self._run_kept(keeping, use_tqdm=False)

    def _run_kept(self, keeping: Keeping, *, use_tqdm: bool) -> list[RequestOutput]:
        """Runs a request that leaves something behind."""
        self._engine.require_own_process()
        try:
            self._ask(keeping.ask)
            return [state.output() for state in self._run([keeping.request()], use_tqdm=use_tqdm)]
        finally:
            # Nothing happens if the promise was kept.
            self._ask(keeping.give_up)

    def _run(self, requests: Sequence[Request], *, use_tqdm: bool) -> list[RequestState]:
        self._engine.require_own_process()
        with self._turn:
            self._idle.pause()
            try:
                return self._run_alone(requests, use_tqdm=use_tqdm)
            finally:
                self._idle.resume()

    def _run_alone(self, requests: Sequence[Request], *, use_tqdm: bool) -> list[RequestState]:
        waiting = deque(requests)
        states: list[RequestState] = []
        streams = self._front.streams
        try:
            with tqdm(total=len(requests), desc="prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while waiting or len(streams):
                    self._submit(waiting, states)
                    bar.update(self._step())
        finally:
            # After the last answer this only hears out the core. After an error or Ctrl-C it ends what is
            # left.
            for state in streams:
                streams.abort(state)
            self._engine.settle()
        return states

    def _submit(self, waiting: deque[Request], states: list[RequestState]) -> None:
        """Submits as many as the queue takes; the rest follows when some have ended."""
        while waiting:
            try:
                states.append(self._front.submit(waiting[0]))
            except QueueFull:
                return
            waiting.popleft()

    def _step(self) -> int:
        """Takes a step and returns how many requests ended by it."""
        report = self._engine.step()
        if report is None:
            raise RuntimeError(f"nothing runs although {len(self._front.streams)} requests are in flight")
        num_ended = 0
        for state in self._front.streams.apply(report, self._engine.events.take(report.step_id)):
            if state.error is not None:
                raise state.error from self._engine.last_error
            num_ended += state.finished
        return num_ended


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    """One conversation, or many, as a list of them. Raises InvalidRequest."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        allowed = 'a list of messages such as {"role": "user", "content": "Hello"}, or a list of such lists'
        raise InvalidRequest(f"messages is a {type(messages).__name__}, allowed: {allowed}", "messages")
    single = bool(messages) and isinstance(messages[0], Mapping)
    return cast(Sequence[Sequence[Message]], [messages] if single else messages)


def _with_content(conversation: Sequence[Message]) -> Sequence[Message]:
    """The conversation with texts as contents: templates join them to other text."""
    if not isinstance(conversation, Sequence) or not all(isinstance(one, Mapping) for one in conversation):
        return conversation  # The renderer says what is wrong with it.
    return [{**message, "content": _as_text(message.get("content"))} for message in conversation]


def _as_text(content: Any) -> Any:
    """What the server makes of a content: None is empty, and texts in parts are joined by line breaks.

    What else there may be is left to the template, which may know it.
    """
    if content is None:
        return ""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    texts = [_text_of_part(part) for part in content]
    return content if None in texts else "\n".join(map(str, texts))


def _text_of_part(part: Any) -> str | None:
    """The text of a part of a content; None of what is no text."""
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None


def _template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The further variables of a template. Raises InvalidRequest for names that it cannot have."""
    variables = {} if given is None else given
    field = "chat_template_kwargs"
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidRequest(f"{field} is {given!r}, allowed: a mapping of names to values", field)
    if reserved := RESERVED_VARIABLES & variables.keys():
        raise InvalidRequest(
            f"{field} has the name {min(reserved)!r}, allowed: names of the template's own variables", field
        )
    return dict(variables)
