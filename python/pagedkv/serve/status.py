"""What operators ask for: /health, /metrics and /version. None of them needs a key."""

from contextlib import suppress

from aiohttp import web

import pagedkv
from pagedkv.errors import EngineDead
from pagedkv.serve.metrics import CONTENT_TYPE
from pagedkv.serve.served import SERVED

# The engine thread beats at every step and several times a second when idle. A step of a large model on a
# CPU may take long, but not this long.
STALLED_AFTER_S = 60.0


async def health(request: web.Request) -> web.Response:
    """200 while the engine thread makes steps or waits for work; 503 once it has died or stands still."""
    engine = request.app[SERVED].engine
    age = engine.heartbeat_age
    if not engine.is_alive:
        status = "dead"
    elif age > STALLED_AFTER_S:
        status = "stalled"
    else:
        status = "ok"
    body = {"status": status, "heartbeat_age_s": round(age, 3)}
    return web.json_response(body, status=200 if status == "ok" else 503)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format."""
    served = request.app[SERVED]
    # Those of tenants come from the engine's thread, between two steps.
    has_tenants = bool(served.engine.config.named_tenants) and served.engine.is_alive
    with suppress(EngineDead):
        served.metrics.tenants = await served.engine.tenant_stats() if has_tenants else {}
    body = served.metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def version(_request: web.Request) -> web.Response:
    """The version of pagedkv."""
    return web.json_response({"version": pagedkv.__version__})
