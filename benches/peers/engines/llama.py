"""llama.cpp's server, driven over HTTP; the client's own cost is included."""

import asyncio
import importlib
import json
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from engines.contract import Options, Result
from workloads import Job

PORT = 18080
SLOTS = 64
CONTEXT = 81920


class Engine:
    """A server in a child process, one stream a request."""

    shares_at_once = False

    def __init__(self, options: Options) -> None:
        self._aiohttp = importlib.import_module("aiohttp")
        self._cache = options.prefix_cache
        kind = "f32" if options.dtype == "float32" else "bf16"
        log = (options.peers / "logs" / "llama-server.log").open("w")
        command = [
            str(options.peers / "llama" / "llama-server"),
            *("-m", str(options.peers / "models" / f"smollm2-135m-{kind}.gguf")),
            *("--host", "127.0.0.1", "--port", str(PORT)),
            *("-t", str(options.threads), "-tb", str(options.threads)),
            *(
                "-np",
                str(SLOTS),
                "-c",
                str(CONTEXT),
                "--no-kv-unified",
                "-fa",
                "on",
                "--cache-ram",
                "0",
                "--offline",
            ),
            *options.extra.split(),
        ]
        self._server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._url = f"http://127.0.0.1:{PORT}"
        asyncio.run(self._wait())

    async def _wait(self) -> None:
        async with self._aiohttp.ClientSession() as session:
            while self._server.poll() is None:
                try:
                    async with session.get(f"{self._url}/health") as response:
                        if response.status == 200:
                            return
                except self._aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.02)
        raise RuntimeError("llama-server ended, see logs/llama-server.log")

    def run(self, jobs: Sequence[Job]) -> Result:
        """See `EngineProtocol.run`."""
        return asyncio.run(self._run(jobs))

    async def _run(self, jobs: Sequence[Job]) -> Result:
        timeout = self._aiohttp.ClientTimeout(total=600)
        connector = self._aiohttp.TCPConnector(limit=0)
        async with self._aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            answers = await asyncio.gather(*(self._answer(session, job) for job in jobs))
        return Result(min(first for first, _ in answers), sum(count for _, count in answers))

    async def _answer(self, session: Any, job: Job) -> tuple[float, int]:
        body: dict[str, Any] = {
            "prompt": job.prompt,
            "n_predict": job.num_tokens,
            "temperature": 0.0 if job.samples == 1 else 1.0,
            "ignore_eos": True,
            "cache_prompt": self._cache,
            "stream": job.samples == 1,
        }
        if job.samples > 1:
            body["n_cmpl"] = job.samples
        began = time.perf_counter()
        async with session.post(f"{self._url}/completion", json=body) as response:
            response.raise_for_status()
            if job.samples > 1:
                answers = await response.json()
                return time.perf_counter() - began, sum(answer["tokens_predicted"] for answer in answers)
            first_token_s, count = 0.0, 0
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                first_token_s = first_token_s or time.perf_counter() - began
                event = json.loads(line[5:])
                if event.get("stop"):
                    count = event["tokens_predicted"]
            return first_token_s, count

    def close(self) -> None:
        """Ends the server."""
        self._server.terminate()
        self._server.wait(10)
