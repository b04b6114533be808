"""Which address is answered by what."""

from aiohttp import web

from pagedkv.serve import (
    cache_routes,
    chat,
    completions,
    explain,
    models,
    session_routes,
    status,
)


def routes() -> list[web.RouteDef]:
    """All addresses. A model's name may hold slashes, raw or quoted."""
    return [
        web.post("/v1/completions", completions.create_completion),
        web.post("/v1/chat/completions", chat.create_chat_completion),
        web.get("/v1/cache/explain/{id}", explain.show_explanation),
        web.get("/v1/models", models.list_models),
        web.get("/v1/models/{model:.+}", models.show_model),
        web.post("/v1/cache/pins", cache_routes.create_pin),
        web.get("/v1/cache/pins", cache_routes.list_pins),
        web.delete("/v1/cache/pins/{id}", cache_routes.delete_pin),
        web.post("/v1/cache/lookup", cache_routes.look_up),
        web.post("/v1/cache/reset", cache_routes.reset),
        web.get("/v1/sessions", session_routes.list_sessions),
        web.get("/v1/sessions/{id}", session_routes.show_session),
        web.delete("/v1/sessions/{id}", session_routes.delete_session),
        web.post("/v1/sessions/{id}/fork", session_routes.fork_session),
        web.get("/health", status.health),
        web.get("/metrics", status.metrics),
        web.get("/version", status.version),
    ]
