"""Which address is answered by what."""

from aiohttp import web

from pagedkv.serve import chat, completions, explain, models, status


def routes() -> list[web.RouteDef]:
    """All addresses. A model's name may hold slashes, raw or quoted."""
    return [
        web.post("/v1/completions", completions.create_completion),
        web.post("/v1/chat/completions", chat.create_chat_completion),
        web.get("/v1/cache/explain/{id}", explain.show_explanation),
        web.get("/v1/models", models.list_models),
        web.get("/v1/models/{model:.+}", models.show_model),
        web.get("/health", status.health),
        web.get("/metrics", status.metrics),
        web.get("/version", status.version),
    ]
