"""The run of one HTTP request on the engine: all of its prompts at once, each with n sequences.

An engine's stream joins the steps that went by while nobody read it into one list of changes. So a client
that reads slowly costs the memory of its own answer and no more, and never holds up the engine or another
stream: when it reads again, what has come meanwhile goes out in one piece.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pagedkv.outputs import SampleChange
from pagedkv.request import Request
from pagedkv.serve.explain import explanation, name_of
from pagedkv.serve.metrics import Metrics, Stopwatch

if TYPE_CHECKING:
    from pagedkv.async_llm import AsyncLLM, Stream

# The prompts that have news, each with what is new of its sequences.
Changes = list[tuple[int, list[SampleChange]]]


class Generation:
    """Runs requests as a context manager: leaving it, for whatever reason, ends what still runs."""

    def __init__(
        self, engine: "AsyncLLM", metrics: Metrics, requests: Sequence[Request], reply_id: str
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._reply_id = reply_id
        self._streams: list[Stream] = []
        self._stopwatches = [Stopwatch(metrics, request) for request in requests]

    def __enter__(self) -> Self:
        """Submits everything, or nothing. Raises what the engine raises at submit."""
        try:
            for index, request in enumerate(self._requests):
                name = name_of(self._reply_id, index)
                self._streams.append(self._engine.submit(request, request_id=name))
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._abort()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts. A prompt with n sequences counts once."""
        return sum(len(request.prompt_token_ids) for request in self._requests)

    @property
    def num_cached_tokens(self) -> int:
        """Of those, tokens that were found in the cache, as far as that is known."""
        return sum(stream.num_cached_tokens for stream in self._streams)

    async def explanations(self) -> dict[str, Any] | list[dict[str, Any] | None] | None:
        """Why the prompt was found in the cache as far as it was; a list where there are several."""
        found = [
            await explanation(self._engine, request.salt, self._reply_id, index)
            for index, request in enumerate(self._requests)
        ]
        return found[0] if len(found) == 1 else found

    def changes(self) -> AsyncGenerator[Changes, None]:
        """Yields news until all prompts are finished. Close it where it is left early.

        Raises what the engine raised, for the first prompt that failed.
        """
        return self._changes_of_one() if len(self._streams) == 1 else self._changes_of_many()

    def _abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    async def _changes_of(self, index: int) -> AsyncGenerator[list[SampleChange], None]:
        stream, stopwatch = self._streams[index], self._stopwatches[index]
        async with aclosing(stream.changes()) as all_changes:
            async for changes in all_changes:
                stopwatch.saw(changes, stream.metrics)
                yield changes

    async def _changes_of_one(self) -> AsyncGenerator[Changes, None]:
        """The usual case, without a task between the engine and the client: it is paid at every token."""
        async with aclosing(self._changes_of(0)) as all_changes:
            async for changes in all_changes:
                yield [(0, changes)]

    async def _changes_of_many(self) -> AsyncGenerator[Changes, None]:
        """A task per stream fetches what is new; whoever reads takes all that was fetched at once."""
        fetched: dict[int, list[SampleChange]] = {}
        news = asyncio.Event()
        room = [asyncio.Event() for _ in self._streams]

        async def fetch(index: int) -> None:
            async with aclosing(self._changes_of(index)) as all_changes:
                async for changes in all_changes:
                    fetched[index] = changes
                    room[index].clear()
                    news.set()
                    # Until these are taken, the stream itself joins what comes.
                    await room[index].wait()

        tasks = [asyncio.create_task(fetch(index)) for index in range(len(self._streams))]
        for task in tasks:
            task.add_done_callback(lambda _: news.set())
        try:
            running = set(tasks)
            while running:
                await news.wait()
                news.clear()
                ended = {task for task in running if task.done()}
                running -= ended
                for task in ended:
                    task.result()
                taken = sorted(fetched.items())
                fetched.clear()
                for index, _ in taken:
                    room[index].set()
                if taken:
                    yield taken
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
