"""Whose request it is: the namespace of the prefix cache that a request works in.

It is made of the API key, where keys tell tenants apart, and of the salt: the field `cache_salt`, or the
header `x-cache-salt` where there is no such field.
"""

from aiohttp import web

from pagedkv.serve.errors import refuse
from pagedkv.serve.middleware import API_KEY
from pagedkv.serve.protocol import MAX_SALT_CHARS
from pagedkv.serve.served import SERVED
from pagedkv.tenants import key_namespace

SALT_HEADER = "x-cache-salt"


def namespace_of(request: web.Request, cache_salt: str | None = None) -> bytes:
    """The salt of a request, as the engine takes it. `cache_salt` is the field of its body, where it has one.

    Raises ApiError 400 for a header that is no salt.
    """
    salt = cache_salt
    if salt is None and SALT_HEADER in request.headers:
        salt = request.headers[SALT_HEADER]
        if not 1 <= len(salt) <= MAX_SALT_CHARS:
            refuse(SALT_HEADER, f"{SALT_HEADER} must have 1 to {MAX_SALT_CHARS} characters, has {len(salt)}.")
    try:
        own = (salt or "").encode()
    except UnicodeEncodeError:
        refuse(SALT_HEADER, f"{SALT_HEADER} must be UTF-8.")
    key = request.get(API_KEY)
    if key is None or not request.app[SERVED].options.keys_are_tenants:
        return own
    return key_namespace(key) + own
