"""What a request may say: pydantic models of the bodies, and the way from raw bytes to one of them.

The rules, from what real clients send: null means absent, everywhere; a wrong type or value is refused with
the field's name, the value and what is allowed; numbers are numbers, never strings or booleans; unknown
keys inside messages are ignored. `fields` says what happens to the fields that no model here has.
"""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from pagedkv.beam_search import MAX_LENGTH_PENALTY, EarlyStopping
from pagedkv.holds import MAX_NAME_CHARS, MAX_TTL_S
from pagedkv.sampling_params import (
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOKEN_ID,
    MIN_PRIORITY,
    CachePriority,
)
from pagedkv.serve.errors import refuse, shown
from pagedkv.serve.fields import refuse_unsupported, unknown_fields
from pagedkv.serve.json_body import parse_json
from pagedkv.text.chat_template import RESERVED_VARIABLES

MAX_FIELDS = 256
"""Bound on the fields of the body, and of every object in it that is checked."""
MAX_SEQUENCES = 1024
"""Bound on n times the number of prompts of one request."""
MAX_MESSAGES = 4096
MAX_PARTS = 16384
"""Bound on the content parts and tool calls of all messages together."""
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_SALT_CHARS = 1024

Prompt = str | list[int]
"""One prompt: a text, or its token ids."""


def _without_nulls(value: Any) -> Any:
    """Null is absent: the defaults of the model apply."""
    if isinstance(value, dict):
        if len(value) > MAX_FIELDS:
            raise _wrong(f"must have at most {MAX_FIELDS} fields")
        return {key: item for key, item in value.items() if item is not None}
    return value


def _wrong(message: str) -> PydanticCustomError:
    # The message is data, not a template: braces in a quoted value must stay as they are.
    return PydanticCustomError("pagedkv", "{message}", {"message": message})


def _check_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise _wrong(f"must have at most {MAX_STOPS} strings")
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong("must be a string or a list of strings")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise _wrong(f"must hold strings of 1 to {MAX_STOP_CHARS} characters")
    return stops


def _check_early_stopping(value: Any) -> EarlyStopping:
    if isinstance(value, bool) or value == "never":
        return cast(EarlyStopping, value)
    raise _wrong('must be true, false or "never"')


def _check_prompt(value: Any) -> list[Prompt]:
    """Brings the four forms of a prompt into one: a list of texts or of lists of token ids.

    What a list of numbers holds is left to the engine, which looks at every number only once.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if type(value[0]) is int:
            return [value]
        if len(value) > MAX_SEQUENCES:
            raise _wrong(f"must have at most {MAX_SEQUENCES} prompts, has {len(value)}")
        if any(all(isinstance(item, kind) for item in value) for kind in (str, list)):
            return value
    raise _wrong(
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids, not empty"
    )


def _check_messages(value: Any) -> Any:
    """Bounds what there is to check, before it is checked one by one."""
    if not isinstance(value, list):
        raise _wrong("must be a list of messages")
    if len(value) > MAX_MESSAGES:
        raise _wrong(f"must have at most {MAX_MESSAGES} messages, has {len(value)}")
    messages = [message for message in value if isinstance(message, dict)]
    lists = (message.get(name) for message in messages for name in ("content", "tool_calls"))
    num_parts = sum(len(items) for items in lists if isinstance(items, list))
    if num_parts > MAX_PARTS:
        raise _wrong(f"must have at most {MAX_PARTS} content parts and tool calls, have {num_parts}")
    return value


def _check_content(value: Any) -> Any:
    """A message's content is a text, or a list of parts that are checked one by one."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]
    raise _wrong("must be a string, null or a list of text parts")


Null = BeforeValidator(_without_nulls)
Stops = Annotated[list[str], BeforeValidator(_check_stop)]
Prompts = Annotated[list[Prompt], PlainValidator(_check_prompt)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)]
SessionId = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Ttl = Annotated[float, Field(gt=0, le=MAX_TTL_S, allow_inf_nan=False)]
"""Seconds, at most a day."""


class Body(BaseModel):
    """An object of a request: strict about types, silent about keys that it does not know."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    def check(self) -> None:
        """Refuses what each field allows but their combination does not."""


class StreamOptions(Body):
    """What a stream carries besides the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Body):
    """The fields that completions and chat share."""

    model: str | None = None
    stream: bool = False
    stream_options: Annotated[StreamOptions, Null] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] = 1.0
    early_stopping: Annotated[EarlyStopping, PlainValidator(_check_early_stopping)] = False
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_ID)] = 0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = None
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] = Field(
        default_factory=list
    )
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_salt: Salt | None = None
    cache_priority: CachePriority = "normal"
    explain_cache: bool = False
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] = 0
    session_id: SessionId | None = None
    session_ttl: Ttl | None = None

    @property
    def token_limit(self) -> int | None:
        """How many tokens the caller wants at most; the newer field wins where both are given."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def token_limit_field(self) -> str:
        """The name of the field that `token_limit` comes from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives are wanted for each token; None for no log-probabilities at all."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuses what each field allows but their combination does not."""
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "stream_options is only allowed where stream is true.")
        if self.session_id is None and self.session_ttl is not None:
            refuse("session_ttl", "session_ttl is only allowed together with session_id.")
        if self.session_id is not None:
            self._check_session()
        if self.best_of is not None and self.best_of < self.n:
            refuse("best_of", f"best_of must be at least n ({self.n}), got {self.best_of}.")
        if self.use_beam_search:
            self._check_beam_search()
            return
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if (value := getattr(self, name)) != neutral:
                message = f"{name} is only allowed where use_beam_search is true, got {shown(value)}."
                refuse(name, message, code="unsupported_parameter")

    def _check_beam_search(self) -> None:
        """Refuses what would change drawn answers and has no meaning in a search."""
        if self.temperature not in (0, 1):
            allowed = "temperature must be 0 or 1 where use_beam_search is true"
            refuse("temperature", f"{allowed}, got {shown(self.temperature)}.")
        drawing: dict[str, tuple[Any, ...]] = {
            "best_of": (None, self.n),
            "top_p": (1.0,),
            "top_k": (0, -1),
            "min_p": (0.0,),
            "stop": ([],),
            "stop_token_ids": ([],),
        }
        if self.num_logprobs is not None:
            refuse(
                "logprobs",
                "logprobs is not supported together with use_beam_search.",
                code="unsupported_parameter",
            )
        for name, neutral in drawing.items():
            if (value := getattr(self, name)) not in neutral:
                message = f"{name} is not supported together with use_beam_search, got {shown(value)}."
                refuse(name, message, code="unsupported_parameter")

    def _check_session(self) -> None:
        """Refuses what has no single answer that could be kept."""
        if self.n != 1:
            refuse("n", f"n must be 1 where a session is kept (session_id), got {self.n}.")
        if self.best_of not in (None, 1):
            refuse("best_of", f"best_of must be 1 where a session is kept (session_id), got {self.best_of}.")
        if self.use_beam_search:
            refuse("use_beam_search", "use_beam_search must be false where a session is kept (session_id).")


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True
    append: bool = False

    @property
    def num_logprobs(self) -> int | None:
        """The field itself: 0 asks for the chosen token only."""
        return self.logprobs

    def check(self) -> None:
        """Bounds the number of sequences that one request may start."""
        super().check()
        each = max(self.n, self.best_of or 0)
        num_sequences = each * len(self.prompt)
        if num_sequences > MAX_SEQUENCES:
            product = f"n or best_of ({each}) times the number of prompts ({len(self.prompt)})"
            refuse("prompt", f"{product} must be at most {MAX_SEQUENCES}, got {num_sequences}.")
        if self.append and self.session_id is None:
            refuse("append", "append is only allowed together with session_id.")
        if self.session_id is not None and len(self.prompt) != 1:
            refuse("prompt", f"prompt must be a single one where session_id is, got {len(self.prompt)}.")


class ContentPart(Body):
    """A piece of a message. Only text is understood; a refusal that is sent back is text as well."""

    type: Literal["text", "input_text", "output_text", "refusal"] = "text"
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if self.text is None and self.refusal is None:
            raise _wrong("must have a text")
        return self


class CalledFunction(Body):
    """Which function an assistant called, with the arguments as JSON text."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    """A call in the history of a conversation."""

    id: str | None = None
    type: str = "function"
    function: Annotated[CalledFunction, Null]


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        list[Annotated[ContentPart, Null]], Field(fail_fast=True), BeforeValidator(_check_content)
    ] = Field(default_factory=list)
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Annotated[ToolCall, Null]], Field(fail_fast=True)] = Field(
        default_factory=list
    )
    tool_call_id: str | None = None

    def as_template_input(self) -> dict[str, Any]:
        """The turn as chat templates expect it.

        Texts are joined by line breaks, because parts are separate paragraphs to the clients that send
        them. Templates know no developer, and they index the arguments of calls, so those are parsed.
        """
        role = "system" if self.role == "developer" else self.role
        content = "\n".join(part.text or part.refusal or "" for part in self.content)
        turn: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            turn["tool_calls"] = [_call_as_template_input(call) for call in self.tool_calls]
        for name in ("name", "reasoning_content", "tool_call_id"):
            value = getattr(self, name)
            if value is not None:
                turn[name] = value
        return turn


def _call_as_template_input(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


Messages = Annotated[
    list[Annotated[Message, Null]], Field(min_length=1, fail_fast=True), BeforeValidator(_check_messages)
]


class TemplateFields(Body):
    """What may be said about rendering a conversation through the model's chat template."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """What a template sees besides the conversation. Of one name, `chat_template_kwargs` decides.

        Clients send the two fields for models that were trained with them; other templates do not look.
        """
        fields = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort}
        given = {name: value for name, value in fields.items() if value is not None}
        return given | self.chat_template_kwargs

    def check_template(self, messages: Sequence[Message]) -> None:
        """Checks these fields against the conversation."""
        if self.continue_final_message:
            if self.add_generation_prompt:
                message = "add_generation_prompt and continue_final_message cannot both be true."
                refuse("continue_final_message", message)
            if messages[-1].role != "assistant":
                message = "continue_final_message needs a last message with the role assistant."
                refuse("continue_final_message", message)
        for name in self.chat_template_kwargs:
            if name in RESERVED_VARIABLES:
                refuse("chat_template_kwargs", f"chat_template_kwargs must not set {shown(name)}.")


class ChatRequest(GenerationRequest, TemplateFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """`top_logprobs` where `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Checks the fields that lean on one another."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "top_logprobs is only allowed where logprobs is true.")
        self.check_template(self.messages)


Request = TypeVar("Request", bound=Body)


def parse_request(
    kind: type[Request], raw: bytes, *, strict: bool, yielding: bool = False
) -> tuple[Request, list[str]]:
    """Reads a body and says which of its fields were ignored because nobody knows them.

    Args:
        kind: the model of the endpoint's body.
        raw: the bytes of the body.
        strict: refuse unknown fields instead of ignoring them.
        yielding: as in `parse_json`.

    Raises:
        ApiError: 400, with the field, its value and what is allowed.
    """
    body = parse_json(raw, yielding=yielding)
    if len(body) > MAX_FIELDS:
        refuse(None, f"The request body must have at most {MAX_FIELDS} fields, has {len(body)}.")
    body = _without_nulls(body)
    refuse_unsupported(body, kind.model_fields)
    ignored = unknown_fields(body, kind.model_fields)
    if ignored and strict:
        refuse(ignored[0], f"{shown(ignored[0])} is not a field of this endpoint.", code="unknown_parameter")
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        _refuse_invalid(error.errors(include_url=False, include_context=False)[0])
    request.check()
    return request, ignored


_SUBJECT = re.compile("^[A-Z][a-z]+ should ")
_AFTERTHOUGHT = re.compile(r" after validation, not \d+")


def _refuse_invalid(detail: ErrorDetails) -> NoReturn:
    """Turns pydantic's first finding into a 400 that names the field, the value and what is allowed."""
    path = ""
    for step in detail["loc"]:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    if detail["type"] == "missing":
        refuse(path, f"{path} is required.", code="missing_required_parameter")
    # pydantic says "Input should be ..." or "List should have at least 1 item after validation, not 0".
    allowed = _SUBJECT.sub("must ", detail["msg"])
    allowed = _AFTERTHOUGHT.sub("", allowed)
    refuse(path, f"{path} {allowed}, got {shown(detail['input'])}.", code="invalid_value")
