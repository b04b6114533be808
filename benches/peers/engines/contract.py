"""What the bench asks of an engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workloads import Job


@dataclass(frozen=True)
class Options:
    """How an engine is to run.

    Attributes:
        peers: where setup.sh put environments and models.
        dtype: "bfloat16" or "float32", of weights and cache.
        prefix_cache: whether equal prefixes may be computed once.
        threads: threads that compute.
        cpu_isa: the instruction sets that pagedkv may use; oneDNN gets them from its environment.
        extra: further arguments of the engine's own.
    """

    peers: Path
    dtype: str
    prefix_cache: bool
    threads: int
    cpu_isa: str = "auto"
    extra: str = ""

    @property
    def model_directory(self) -> str:
        """The model as transformers and vLLM read it."""
        name = "smollm2-135m-f32" if self.dtype == "float32" else "smollm2-135m"
        return str(self.peers / "models" / name)


@dataclass(frozen=True)
class Result:
    """What a run gave: seconds to the first token of all, and the number of generated tokens."""

    first_token_s: float
    num_tokens: int


class EngineProtocol(Protocol):
    """An engine that has loaded its model.

    Attributes:
        shares_at_once: whether requests that arrive together share a prefix that none of them has computed
            yet. Where not, the bench sends the first one alone: the engine's better case.
    """

    shares_at_once: bool

    def run(self, jobs: Sequence[Job]) -> Result:
        """Answers all jobs, sent at once. Greedy for one sample, temperature 1 for several."""

    def close(self) -> None:
        """Ends whatever the engine started."""
