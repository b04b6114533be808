"""vLLM's CPU build, its engine stepped in this process."""

import importlib
import os
import time
from collections.abc import Sequence
from typing import Any

from engines.contract import Options, Result
from workloads import Job


class Engine:
    """`LLMEngine.step` until everything has ended."""

    shares_at_once = True

    def __init__(self, options: Options) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        vllm = importlib.import_module("vllm")
        self._params = vllm.SamplingParams
        self._only_final = importlib.import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
        llm = vllm.LLM(
            options.model_directory,
            dtype=options.dtype,
            enable_prefix_caching=options.prefix_cache,
            max_model_len=4096,
            max_num_seqs=256,
        )
        self._engine = llm.llm_engine
        self._num_requests = 0

    def run(self, jobs: Sequence[Job]) -> Result:
        """See `EngineProtocol.run`."""
        began = time.perf_counter()
        for job in jobs:
            self._add(job)
        first_token_s, count = 0.0, 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if not first_token_s and output.outputs[0].token_ids:
                    first_token_s = time.perf_counter() - began
                if output.finished:
                    count += sum(len(sample.token_ids) for sample in output.outputs)
        return Result(first_token_s, count)

    def _add(self, job: Job) -> None:
        sampling: dict[str, Any] = {"temperature": 0.0}
        if job.samples > 1:
            sampling = {"temperature": 1.0, "n": job.samples, "output_kind": self._only_final}
        params = self._params(
            max_tokens=job.num_tokens,
            min_tokens=job.num_tokens,
            ignore_eos=True,
            detokenize=False,
            **sampling,
        )
        self._num_requests += 1
        self._engine.add_request(str(self._num_requests), {"prompt_token_ids": job.prompt}, params)

    def close(self) -> None:
        """The process ends with it."""
