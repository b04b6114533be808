"""One line for every ten seconds in which something was computed: how much, how full it is."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

from pagedkv.serve.served import SERVED

logger = logging.getLogger("pagedkv")

INTERVAL_S = 10.0

Stats = Mapping[str, int]


def activity_line(before: Stats, now: Stats, interval_s: float) -> str | None:
    """What happened between two looks at the counters; None if no step was taken."""
    if now["steps"] == before["steps"]:
        return None
    grown = {name: now[name] - before[name] for name in now}
    line = (
        f"{grown['prompt_tokens'] / interval_s:.1f} prompt and "
        f"{grown['generation_tokens'] / interval_s:.1f} generated tokens/s, "
        f"{now['num_running']} running, {now['num_waiting']} waiting, "
        f"cache {(now['blocks_owned'] + now['blocks_fenced']) / now['blocks_total']:.1%} used"
    )
    if grown["prefix_queries"]:
        line += f", {grown['prefix_hits'] / grown['prefix_queries']:.1%} of the prompts found in it"
    if grown["preemptions"]:
        line += f", {grown['preemptions']} preemptions"
    return line


async def report_activity(app: web.Application) -> AsyncIterator[None]:
    """Reports while the application runs."""
    task = asyncio.create_task(_report(app))
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _report(app: web.Application) -> None:
    stats = app[SERVED].engine.stats
    before = stats()
    while True:
        await asyncio.sleep(INTERVAL_S)
        now = stats()
        line = activity_line(before, now, INTERVAL_S)
        if line is not None:
            logger.info(line)
        before = now
