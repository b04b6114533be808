"""Puts the application together: one engine, the routes, and what happens around every request."""

from typing import TYPE_CHECKING

from aiohttp import web

from pagedkv.serve import middleware
from pagedkv.serve.activity import report_activity
from pagedkv.serve.malformed import quiet_malformed
from pagedkv.serve.metrics import Metrics
from pagedkv.serve.routes import routes
from pagedkv.serve.served import SERVED, Served, ServeOptions

if TYPE_CHECKING:
    from pagedkv.async_llm import AsyncLLM

# A body becomes several times its size in memory, so it may be as large as what the model can read needs:
# some bytes for every token of its context, but a small model as well has room for a long conversation or
# many prompts.
_BODY_BYTES_PER_TOKEN = 64
_MIN_BODY_BYTES = 8 * 2**20
_MAX_BODY_BYTES = 64 * 2**20


def max_body_bytes(max_model_len: int) -> int:
    """The size of the largest body that is read, for a context of `max_model_len` tokens."""
    return min(max(_MIN_BODY_BYTES, _BODY_BYTES_PER_TOKEN * max_model_len), _MAX_BODY_BYTES)


def build_app(engine: "AsyncLLM", options: ServeOptions) -> web.Application:
    """The application around a running engine, which it shuts down when it ends itself.

    Run it with `handler_cancellation=True`: a client that leaves must cancel its handler, because that is
    what aborts its request.
    """
    app = web.Application(
        client_max_size=max_body_bytes(engine.max_model_len),
        middlewares=[
            middleware.count_responses,
            middleware.errors_as_json,
            middleware.preflight,
            middleware.require_key,
        ],
    )
    quiet_malformed()
    metrics = Metrics(options.model_names[0], engine.stats, _cache_config(engine))
    app[SERVED] = Served(engine, options, metrics)
    app.add_routes(routes())
    app.on_response_prepare.append(middleware.add_headers)
    app.cleanup_ctx.append(report_activity)
    app.on_shutdown.append(_end_engine)
    return app


async def _end_engine(app: web.Application) -> None:
    """Ends the engine while the connections are still open: whoever still waits hears an error."""
    await app[SERVED].engine.shutdown()


def _cache_config(engine: "AsyncLLM") -> dict[str, str]:
    """Labels of `cache_config_info`, which does not change while the engine lives."""
    config = engine.config
    return {
        "block_size": str(config.block_size),
        "enable_prefix_caching": str(config.enable_prefix_caching),
    }
