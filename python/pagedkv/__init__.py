"""pagedkv: serves Llama-family language models from a paged KV cache that you can see and control.

The names below are the public interface. They are looked up on first use, so that `import pagedkv` costs
milliseconds: torch and transformers are imported only when a model is about to be loaded.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.async_llm import AsyncLLM
    from pagedkv.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from pagedkv.config import EngineConfig
    from pagedkv.errors import (
        Conflict,
        EngineDead,
        InvalidRequest,
        ModelError,
        NotFound,
        PagedKVError,
        QueueFull,
        RequestFailed,
    )
    from pagedkv.explanation import Explanation
    from pagedkv.holds import CacheLookup, CacheReset, Pin, Session
    from pagedkv.llm import LLM
    from pagedkv.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SampleChange
    from pagedkv.sampling_params import SamplingParams
    from pagedkv.tenants import Tenant

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CacheLookup",
    "CacheReset",
    "CompletionOutput",
    "Conflict",
    "EngineConfig",
    "EngineDead",
    "Explanation",
    "InvalidRequest",
    "Logprob",
    "ModelError",
    "NotFound",
    "PagedKVError",
    "Pin",
    "QueueFull",
    "RequestFailed",
    "RequestMetrics",
    "RequestOutput",
    "SampleChange",
    "SamplingParams",
    "Session",
    "Tenant",
    "__version__",
]

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "BeamSearchOutput": "beam_search",
    "BeamSearchParams": "beam_search",
    "BeamSearchSequence": "beam_search",
    "CacheLookup": "holds",
    "CacheReset": "holds",
    "CompletionOutput": "outputs",
    "Conflict": "errors",
    "EngineConfig": "config",
    "EngineDead": "errors",
    "Explanation": "explanation",
    "InvalidRequest": "errors",
    "Logprob": "outputs",
    "ModelError": "errors",
    "NotFound": "errors",
    "PagedKVError": "errors",
    "Pin": "holds",
    "QueueFull": "errors",
    "RequestFailed": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SampleChange": "outputs",
    "SamplingParams": "sampling_params",
    "Session": "holds",
    "Tenant": "tenants",
}

# libgomp, which runs torch's loops on Linux, reads its environment once, when torch is loaded. By default
# its idle threads spin for good. That matters where torch multiplies, which is on processors that the Rust
# kernels have no vectors for: with one of two cores taken by something else, its products of a decode took 74
# to 261 ms on two threads instead of 16 on one. A bounded spin takes 9 to 25 ms, and loses nothing on an idle
# machine. Whoever has chosen otherwise is heeded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def __getattr__(name: str) -> Any:
    """Imports the module that holds `name`; called only for names that are not there yet."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
    value = getattr(import_module(f"pagedkv.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
