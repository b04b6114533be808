"""pagedkv: serves Llama-family language models from a paged KV cache that you can see and control.

The names below are the public interface. They are looked up on first use, so that `import pagedkv` costs
milliseconds: torch and transformers are imported only when a model is about to be loaded.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.async_llm import AsyncLLM
    from pagedkv.config import EngineConfig
    from pagedkv.errors import EngineDead, InvalidRequest, ModelError, PagedKVError, QueueFull, RequestFailed
    from pagedkv.explanation import Explanation
    from pagedkv.llm import LLM
    from pagedkv.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SampleChange
    from pagedkv.sampling_params import SamplingParams
    from pagedkv.tenants import Tenant

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineDead",
    "Explanation",
    "InvalidRequest",
    "Logprob",
    "ModelError",
    "PagedKVError",
    "QueueFull",
    "RequestFailed",
    "RequestMetrics",
    "RequestOutput",
    "SampleChange",
    "SamplingParams",
    "Tenant",
    "__version__",
]

_HOME = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "EngineDead": "errors",
    "Explanation": "explanation",
    "InvalidRequest": "errors",
    "Logprob": "outputs",
    "ModelError": "errors",
    "PagedKVError": "errors",
    "QueueFull": "errors",
    "RequestFailed": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "SampleChange": "outputs",
    "SamplingParams": "sampling_params",
    "Tenant": "tenants",
}

# libgomp, which runs torch's loops on Linux, reads its environment once, when torch is loaded. By default
# its idle threads spin for good: with one of two cores taken by something else, the linear layers of a decode
# took 74 to 261 ms on two threads instead of 16 on one. A bounded spin takes 9 to 25 ms, and loses nothing on
# an idle machine. Whoever has chosen otherwise is heeded.
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
