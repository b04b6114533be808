"""The run of one HTTP request on the engine: all of its prompts at once, each with n sequences.

An engine's stream joins the steps that went by while nobody read it into one output that holds everything
so far. So a client that reads slowly costs the memory of its own answer and no more, and never holds up the
engine or another stream: when it reads again, what has come meanwhile goes out in one piece.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pagedkv.outputs import RequestOutput
from pagedkv.sampling_params import SamplingParams
from pagedkv.serve.metrics import Metrics, Stopwatch

if TYPE_CHECKING:
    from pagedkv.async_llm import AsyncLLM, Stream

# The prompts that have news, each with its newest output.
Changes = list[tuple[int, RequestOutput]]


@dataclass(frozen=True)
class Submission:
    """One prompt on its way to the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


class Generation:
    """Runs submissions as a context manager: leaving it, for whatever reason, ends what still runs."""

    def __init__(
        self, engine: "AsyncLLM", metrics: Metrics, submissions: Sequence[Submission], salt: bytes
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._submissions = submissions
        self._salt = salt
        self._streams: list[Stream] = []
        self._stopwatches: list[Stopwatch] = []

    @property
    def num_prompts(self) -> int:
        """How many prompts run."""
        return len(self._submissions)

    def __enter__(self) -> Self:
        """Submits everything, or nothing. Raises what the engine raises at submit."""
        try:
            for one in self._submissions:
                stopwatch = self._metrics.stopwatch(one.params)
                stream = self._engine.submit(
                    one.prompt_token_ids, one.params, one.request_id, salt=self._salt
                )
                self._streams.append(stream)
                self._stopwatches.append(stopwatch)
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._abort()

    def changes(self) -> AsyncGenerator[Changes, None]:
        """Yields news until all prompts are finished. Close it where it is left early.

        Raises what the engine raised, for the first prompt that failed.
        """
        return self._changes_of_one() if len(self._streams) == 1 else self._changes_of_many()

    async def outputs(self) -> list[RequestOutput]:
        """Waits for the end and returns the final output of every prompt, in order."""
        latest: dict[int, RequestOutput] = {}
        async with aclosing(self.changes()) as changes:
            async for changed in changes:
                latest.update(changed)
        return [latest[index] for index in range(len(self._streams))]

    def _abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    async def _changes_of_one(self) -> AsyncGenerator[Changes, None]:
        """The usual case, without a task between the engine and the client: it is paid at every token."""
        async for output in self._streams[0]:
            self._stopwatches[0].saw(output)
            yield [(0, output)]

    async def _changes_of_many(self) -> AsyncGenerator[Changes, None]:
        """A task per stream keeps the newest output; whoever reads takes all that are new at once."""
        changed: dict[int, RequestOutput] = {}
        news = asyncio.Event()

        async def pump(index: int) -> None:
            async for output in self._streams[index]:
                self._stopwatches[index].saw(output)
                changed[index] = output
                news.set()

        pumps = [asyncio.create_task(pump(index)) for index in range(len(self._streams))]
        for task in pumps:
            task.add_done_callback(lambda _: news.set())
        try:
            running = set(pumps)
            while running:
                await news.wait()
                news.clear()
                ended = {task for task in running if task.done()}
                running -= ended
                for task in ended:
                    task.result()
                if changed:
                    taken = sorted(changed.items())
                    changed.clear()
                    yield taken
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
