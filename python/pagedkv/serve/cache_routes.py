"""/v1/cache/*: pins, a look before the leap, a reset."""

from dataclasses import asdict
from typing import Any

from aiohttp import web

from pagedkv.holds import Pin
from pagedkv.serve.bodies import read_request
from pagedkv.serve.cache_bodies import LookupRequest, PinRequest
from pagedkv.serve.errors import ApiError
from pagedkv.serve.middleware import API_KEY
from pagedkv.serve.prompts import prompt_request
from pagedkv.serve.served import SERVED
from pagedkv.serve.tenancy import namespace_of


async def create_pin(http_request: web.Request) -> web.Response:
    """Keeps the blocks of a prompt, which is computed if need be."""
    served = http_request.app[SERVED]
    body = await read_request(http_request, PinRequest)
    served.name_for(body.model)
    salt = namespace_of(http_request, body.cache_salt)
    request = await prompt_request(served, body, salt)
    return web.json_response(_pin(await served.engine.pin(request, body.ttl, salt=salt)))


async def list_pins(http_request: web.Request) -> web.Response:
    """The tenant's pins, the oldest first."""
    pins = await http_request.app[SERVED].engine.pins(salt=namespace_of(http_request))
    return web.json_response({"object": "list", "data": [_pin(pin) for pin in pins]})


async def delete_pin(http_request: web.Request) -> web.Response:
    """Ends a pin."""
    pin_id = http_request.match_info["id"]
    await http_request.app[SERVED].engine.unpin(pin_id, salt=namespace_of(http_request))
    return web.json_response({"id": pin_id, "object": "cache.pin", "deleted": True})


async def look_up(http_request: web.Request) -> web.Response:
    """What would become of a prompt if it came now."""
    served = http_request.app[SERVED]
    body = await read_request(http_request, LookupRequest)
    served.name_for(body.model)
    salt = namespace_of(http_request, body.cache_salt)
    found = await served.engine.lookup(await prompt_request(served, body, salt), salt=salt)
    return web.json_response({"object": "cache.lookup", **asdict(found)})


async def reset(http_request: web.Request) -> web.Response:
    """Forgets what was computed, of all tenants, so none of them may ask for it. Raises ApiError 403."""
    served = http_request.app[SERVED]
    if http_request.get(API_KEY) in served.options.tenant_keys:
        message = "A reset concerns all tenants: it takes a key of --api-key, not the key of a tenant."
        raise ApiError(403, message, code="insufficient_permissions")
    counts = await served.engine.reset_prefix_cache()
    return web.json_response({"object": "cache.reset", **counts._asdict()})


def _pin(pin: Pin) -> dict[str, Any]:
    return {"object": "cache.pin", **asdict(pin)}
