"""OpenVINO GenAI's continuous batching pipeline."""

import importlib
import time
from collections.abc import Sequence
from typing import Any

from engines.contract import Options, Result
from workloads import Job

# More than its default of 256 tokens a step: faster on long prompts.
MAX_BATCHED_TOKENS = 2048


class Engine:
    """`ContinuousBatchingPipeline.step` until everything has ended."""

    shares_at_once = False

    def __init__(self, options: Options) -> None:
        openvino = importlib.import_module("openvino")
        genai = importlib.import_module("openvino_genai")
        self._genai, self._tensor = genai, openvino.Tensor
        self._numpy = importlib.import_module("numpy")
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 4
        scheduler.enable_prefix_caching = options.prefix_cache
        scheduler.max_num_seqs = 256
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        bits, precision = ("32", "f32") if options.dtype == "float32" else ("16", "bf16")
        properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": options.threads,
        }
        if options.dtype == "float32":
            properties["KV_CACHE_PRECISION"] = "f32"
        model = str(options.peers / "models" / f"smollm2-135m-ov-f{bits}")
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._num_requests = 0

    def run(self, jobs: Sequence[Job]) -> Result:
        """See `EngineProtocol.run`."""
        began = time.perf_counter()
        handles = [self._add(job) for job in jobs]
        first_token_s, count = 0.0, 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle in handles:
                if not handle.can_read():
                    continue
                first_token_s = first_token_s or time.perf_counter() - began
                count += sum(len(output.generated_ids) for output in handle.read().values())
        return Result(first_token_s, count)

    def _add(self, job: Job) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = job.num_tokens
        config.ignore_eos = True
        config.do_sample = job.samples > 1
        if job.samples > 1:
            config.temperature = 1.0
            config.num_return_sequences = job.samples
        self._num_requests += 1
        ids = self._tensor(self._numpy.array([job.prompt], dtype=self._numpy.int64))
        return self._pipeline.add_request(self._num_requests, ids, config)

    def close(self) -> None:
        """Nothing runs beside."""
