"""Whose cache a request is about: the salt in its body, or else in the header `x-cache-salt`."""

from aiohttp import web

from pagedkv.serve.errors import refuse
from pagedkv.serve.protocol import MAX_SALT_CHARS

HEADER = "x-cache-salt"


def tenant_of(http_request: web.Request, cache_salt: str | None = None) -> bytes:
    """The salt as the engine takes it; empty where none is given. `cache_salt` is what the body says."""
    if cache_salt is not None:
        return cache_salt.encode()
    salt = http_request.headers.get(HEADER, "")
    if len(salt) > MAX_SALT_CHARS:
        refuse(HEADER, f"{HEADER} must have at most {MAX_SALT_CHARS} characters, has {len(salt)}.")
    # A header is bytes; those that are no text come as halves of surrogate pairs.
    return salt.encode(errors="surrogateescape")
