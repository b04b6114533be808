"""What the handlers know besides the request: the engine, the model's names and limits, the options."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pagedkv.explanation import RequestNames
from pagedkv.serve.errors import ApiError, shown
from pagedkv.serve.metrics import Metrics

if TYPE_CHECKING:
    from pagedkv.async_llm import AsyncLLM


@dataclass(frozen=True)
class ServeOptions:
    """The options of the server itself; the engine has its own.

    Attributes:
        model_names: names that requests may use; the first one is reported where a request gives none. Not
            empty.
        model_root: where the model came from, as /v1/models says it.
        strict: refuse unknown request fields instead of ignoring them.
        api_keys: the keys of which /v1/* asks for one. Empty: no key is needed and any is accepted.
        keys_are_tenants: every key has a namespace of the prefix cache of its own.
        tenant_keys: those of api_keys that named tenants have. They may not do what concerns everybody.
    """

    model_names: tuple[str, ...]
    model_root: str
    strict: bool = False
    api_keys: tuple[str, ...] = ()
    keys_are_tenants: bool = False
    tenant_keys: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Served:
    """One engine behind one address.

    Attributes:
        engine: runs the requests.
        options: the server's options.
        metrics: what /metrics shows.
        created: when the model was loaded, in seconds since 1970.
        logged_names: ignored request fields that the log has named.
        reply_ids: the ids of the last replies, by what the header X-Request-Id called their requests.
    """

    engine: "AsyncLLM"
    options: ServeOptions
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    logged_names: set[str] = field(default_factory=set)
    reply_ids: RequestNames[str] = field(default_factory=RequestNames)

    def name_for(self, requested: str | None) -> str:
        """The name under which the request is answered. Raises ApiError 404 for a model that is not here."""
        names = self.options.model_names
        if requested is None:
            return names[0]
        if requested in names:
            return requested
        here = ", ".join(names)
        message = f"The model {shown(requested)} does not exist here. Served: {here}."
        raise ApiError(404, message, param="model", code="model_not_found")

    def model_entry(self, name: str) -> dict[str, Any]:
        """The entry of /v1/models for one of the names."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "pagedkv",
            "root": self.options.model_root,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
        }


SERVED = web.AppKey("served", Served)
