"""The caller's side of an engine: from a prompt to a request in flight.

`LLM` and `AsyncLLM` each own one `Front`. It holds what the engine's thread does not need: the tokenizer, the
limits that requests are checked against, the seeds of requests that bring none, and the requests in flight.
"""

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from pagedkv import _core
from pagedkv._core import Edge
from pagedkv.checks import refusal
from pagedkv.config import EngineConfig
from pagedkv.errors import InvalidRequest
from pagedkv.explanation import RequestNames
from pagedkv.ranked import state_of
from pagedkv.request import AnyParams, Limits, Prompt, Request, encode_continuation, make_request
from pagedkv.streams import RequestState, Streams

if TYPE_CHECKING:
    from pagedkv.models import ModelConfig
    from pagedkv.text.tokenizer import Tokenizer

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
# The least normal float32. The core takes float32, where a smaller top_p would be 0, which keeps no token.
_LEAST_TOP_P: Final = 2.0**-126


class Seeds:
    """An endless row of 64-bit seeds that depends on its start alone: SplitMix64 (Steele et al. 2014)."""

    def __init__(self, start: int) -> None:
        self._state = start & _MASK

    def draw(self) -> int:
        """The next seed."""
        self._state = (self._state + _GOLDEN) & _MASK
        value = self._state
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        return value ^ (value >> 31)


class Front:
    """Checks, encodes and submits requests. One thread at a time may submit.

    Attributes:
        config: the options as given.
        seed: the option `seed`, or what was drawn for it.
        limits: what a request must keep to.
        streams: the requests in flight.
        names: the requests that were submitted last, for those who ask about them.
    """

    def __init__(
        self,
        edge: Edge,
        tokenizer: "Tokenizer",
        config: EngineConfig,
        model_config: "ModelConfig",
        limits: Limits,
        seed: int,
    ) -> None:
        self.edge = edge
        self.tokenizer = tokenizer
        self.config = config
        self.model_config = model_config
        self.limits = limits
        self.seed = seed
        self.streams = Streams(edge)
        self.names: RequestNames[int] = RequestNames()
        self._seeds = Seeds(seed)
        self._num_submitted = 0

    def request(
        self,
        prompt: Prompt,
        params: AnyParams,
        *,
        salt: bytes = b"",
        priority: int = 0,
        add_special_tokens: bool = True,
        default_max_tokens: int | None = None,
    ) -> Request:
        """Encodes and checks a prompt, as `make_request` does. Any thread may call this.

        Raises InvalidRequest.
        """
        return make_request(
            prompt,
            params,
            self.tokenizer,
            self.limits,
            salt=salt,
            priority=priority,
            add_special_tokens=add_special_tokens,
            default_max_tokens=default_max_tokens,
        )

    def continuation(self, prompt: Prompt) -> NDArray[np.int32]:
        """The token ids of what continues a session. Any thread may call this. Raises InvalidRequest."""
        return encode_continuation(prompt, self.tokenizer, self.limits)

    def submit(self, request: Request, request_id: str | None = None) -> RequestState:
        """Hands a request to the core. Raises InvalidRequest if it could never be served, or QueueFull."""
        if request_id is not None and not isinstance(request_id, str):
            # Found out only once the core has the request, it would leave that running for nobody.
            raise refusal(InvalidRequest, "request_id", request_id, "a text, or None for a number")
        params, beam = request.params, request.beam
        ranks = params.num_samples > params.n
        num_logprobs = params.logprobs if params.logprobs is not None else 0 if ranks else -1
        try:
            core_id = self.edge.submit(
                request.tokens,
                max_tokens=request.max_tokens,
                n=1 if beam is not None else params.num_samples,
                temperature=float(params.temperature),
                top_p=max(float(params.top_p), _LEAST_TOP_P),
                top_k=max(params.top_k, 0),
                min_p=float(params.min_p),
                seed=self._seed_of(request),
                stop_token_ids=params.stop_ids,
                ignore_eos=params.ignore_eos,
                num_logprobs=num_logprobs,
                salt=request.salt,
                priority=request.priority,
                beam=None if beam is None else beam.for_core,
                promise=request.promise,
                evict_first=params.cache_priority == "low",
            )
        except _core.InvalidRequest as error:
            raise InvalidRequest(str(error)) from error
        if request_id is None:
            request_id = str(self._num_submitted)
        self._num_submitted += 1
        state = state_of(request, request_id, core_id, self.tokenizer)
        self.names.add(request.salt, request_id, core_id)
        self.streams.add(state)
        return state

    def _seed_of(self, request: Request) -> int:
        # Drawn once a request, also if the queue is full at first: the seeds depend on the order of requests
        # alone.
        if request.seed is None:
            given = request.params.seed
            request.seed = self._seeds.draw() if given is None else given
        return request.seed
