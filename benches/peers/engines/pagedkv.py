"""pagedkv through `LLM`, which steps the engine in the caller's thread, as the other engines are stepped."""

import importlib
import time
from collections.abc import Sequence
from typing import Any

from engines.contract import Options, Result
from workloads import Job


class Engine:
    """`LLM.generate`; the outputs say when the first token was there."""

    shares_at_once = True

    def __init__(self, options: Options) -> None:
        # By name, because this file has the package's.
        self._pagedkv = importlib.import_module("pagedkv")
        self._llm = self._pagedkv.LLM(
            options.model_directory,
            dtype=options.dtype,
            enable_prefix_caching=options.prefix_cache,
            cpu_isa=options.cpu_isa,
            threads=options.threads,
            max_model_len=4096,
            max_num_seqs=256,
            kv_memory="4GiB",
        )

    def run(self, jobs: Sequence[Job]) -> Result:
        """See `EngineProtocol.run`."""
        began = time.monotonic()
        params = [self._params(job) for job in jobs]
        outputs = self._llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
        first_token_s = min(output.metrics.first_token_time for output in outputs) - began
        return Result(first_token_s, sum(len(one.token_ids) for output in outputs for one in output.outputs))

    def _params(self, job: Job) -> Any:
        return self._pagedkv.SamplingParams(
            n=job.samples,
            max_tokens=job.num_tokens,
            ignore_eos=True,
            temperature=0.0 if job.samples == 1 else 1.0,
            detokenize=False,
        )

    def close(self) -> None:
        """The process ends with it."""
