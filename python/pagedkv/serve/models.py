"""GET /v1/models, and one model by name."""

from aiohttp import web

from pagedkv.serve.served import SERVED


async def list_models(request: web.Request) -> web.Response:
    """The model, once under each of its names."""
    served = request.app[SERVED]
    entries = [served.model_entry(name) for name in served.options.model_names]
    return web.json_response({"object": "list", "data": entries})


async def show_model(request: web.Request) -> web.Response:
    """One entry of the list; 404 for a name that is not in it."""
    served = request.app[SERVED]
    name = served.name_for(request.match_info["model"])
    return web.json_response(served.model_entry(name))
