"""pagedkv through `AsyncLLM`, as its server drives it."""

import asyncio
import importlib
import time
from collections.abc import Sequence

from engines.contract import Options, Result
from workloads import Job


class Engine:
    """All jobs are tasks of one event loop."""

    shares_at_once = True

    def __init__(self, options: Options) -> None:
        # By name, because this file has the package's.
        self._pagedkv = importlib.import_module("pagedkv")
        self._loop = asyncio.new_event_loop()
        self._llm = self._pagedkv.AsyncLLM(
            options.model_directory,
            dtype=options.dtype,
            enable_prefix_caching=options.prefix_cache,
            cpu_isa=options.cpu_isa,
            max_model_len=4096,
            max_num_seqs=256,
            kv_memory="4GiB",
        )

    def run(self, jobs: Sequence[Job]) -> Result:
        """See `EngineProtocol.run`."""
        return self._loop.run_until_complete(self._run(jobs))

    async def _run(self, jobs: Sequence[Job]) -> Result:
        began = time.perf_counter()
        answers = await asyncio.gather(*(self._answer(job, began) for job in jobs))
        return Result(min(first for first, _ in answers), sum(count for _, count in answers))

    async def _answer(self, job: Job, began: float) -> tuple[float, int]:
        params = self._pagedkv.SamplingParams(
            n=job.samples,
            max_tokens=job.num_tokens,
            ignore_eos=True,
            temperature=0.0 if job.samples == 1 else 1.0,
        )
        stream = self._llm.submit(job.prompt, params)
        first_token_s, count = 0.0, 0
        async for changes in stream.changes():
            first_token_s = first_token_s or time.perf_counter() - began
            count += sum(len(change.token_ids) for change in changes)
        return first_token_s, count

    def close(self) -> None:
        """Ends the engine's thread."""
        self._loop.run_until_complete(self._llm.shutdown())
        self._loop.close()
