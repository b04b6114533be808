"""transformers' `generate`: one padded batch, as long as its longest answer."""

import importlib
import time
from collections.abc import Sequence
from typing import Any

from engines.contract import Options, Result
from workloads import Job


class _Clock:
    """A streamer that notes when the first generated token came; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _tokens: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Engine:
    """Static batching."""

    shares_at_once = True

    def __init__(self, options: Options) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(options.threads)
        model_class = importlib.import_module("transformers").AutoModelForCausalLM
        # Its eager attention is the faster one for padded batches on CPUs.
        self._model = model_class.from_pretrained(
            options.model_directory, attn_implementation="eager", dtype=options.dtype
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def run(self, jobs: Sequence[Job]) -> Result:
        """See `EngineProtocol.run`."""
        torch = self._torch
        longest = max(len(job.prompt) for job in jobs)
        num_tokens = max(job.num_tokens for job in jobs)
        ids = torch.zeros(len(jobs), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, longest - len(job.prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        samples = jobs[0].samples
        if samples > 1:
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": samples}
        clock = _Clock() if len(jobs) == 1 and samples == 1 else None
        began = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                streamer=clock,
                **sampling,
            )
        first = clock.times[1] if clock else time.perf_counter()
        return Result(first - began, sum(job.num_tokens * job.samples for job in jobs))

    def close(self) -> None:
        """Nothing runs beside."""
