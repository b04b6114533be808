"""Tenants: who shares the cache with whom, and what the cache keeps for those that are named in advance.

A tenant is a namespace of the prefix cache: a salt that requests bring, or an API key where a server has
several. Whoever is in no list has a namespace as well; a list gives floors of blocks, eviction weights and
names in the metrics.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from pagedkv.checks import check_float, check_int, refusal

MAX_TENANTS: Final = 63
MAX_BLOCKS: Final = 2**24
MIN_WEIGHT: Final = 0.01
MAX_WEIGHT: Final = 100.0
# The core counts weights in parts of this.
_WEIGHT_ONE: Final = 1024
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
# The name of all who are in no list, in metrics.
OTHERS: Final = "other"
# No UTF-8 text has this byte, so what a client sends as a salt never begins like the namespace of a key.
_KEY_TAG: Final = b"\xff"


def key_namespace(api_key: str) -> bytes:
    """The salt of whoever comes with an API key; what a request says beside it is appended.

    The digest has a fixed length, so (key, salt) pairs never give the same bytes, whatever the keys contain;
    and it keeps the key itself out of the core.
    """
    return _KEY_TAG + hashlib.sha256(api_key.encode(errors="surrogateescape")).digest()


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A tenant that is known in advance. Raises ValueError, naming the field, its value and what is allowed.

    Attributes:
        name: what metrics call it. The salt and the key are secrets and are shown nowhere.
        cache_salt: the salt that its requests bring, or
        api_key: the key that they come with; a server accepts it, and refuses tenants with a salt beside it.
            Exactly one of the two is given.
        min_blocks: as long as no more than so many of its blocks are cached, they are evicted only where
            nobody else has an idle block. The sum of all tenants must fit the pool.
        eviction_weight: how fast its idle blocks age beside those of others: with 2 they are evicted as if
            twice as old, with 0.5 as if half as old.
    """

    name: str
    cache_salt: str | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    min_blocks: int = 0
    eviction_weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name == OTHERS:
            allowed = f"1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-', but not {OTHERS!r}"
            raise refusal(_invalid, "tenants: name", self.name, allowed)
        where = f"tenant {self.name!r}: "
        secrets = [secret for secret in (self.cache_salt, self.api_key) if secret is not None]
        if len(secrets) != 1 or not isinstance(secrets[0], str) or not secrets[0]:
            # The values are secrets, so the message does not quote them.
            raise ValueError(f"{where}needs exactly one of cache_salt and api_key, a text that is not empty")
        try:
            secrets[0].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}cache_salt and api_key must be valid Unicode") from error
        check_int(_invalid, where + "min_blocks", self.min_blocks, 0, MAX_BLOCKS, f"0 to {MAX_BLOCKS}")
        allowed = f"a number in {MIN_WEIGHT}..{MAX_WEIGHT:g}"
        check_float(
            _invalid, where + "eviction_weight", self.eviction_weight, MIN_WEIGHT, MAX_WEIGHT, allowed
        )

    @property
    def salt(self) -> bytes:
        """Its namespace, or the beginning of its namespaces."""
        return (self.cache_salt or "").encode() if self.api_key is None else key_namespace(self.api_key)

    @property
    def core_option(self) -> tuple[bytes, bool, int, int]:
        """The tenant as the core takes it."""
        weight = max(round(self.eviction_weight * _WEIGHT_ONE), _WEIGHT_ONE // 100)
        return self.salt, self.api_key is not None, self.min_blocks, weight


# Ways to give them: a path to a JSON file, or a list of tenants or of mappings with their fields.
Tenants = str | os.PathLike[str] | Sequence[Tenant | Mapping[str, Any]]


def read_tenants(given: Tenants) -> tuple[Tenant, ...]:
    """The tenants of a file or a list. Raises ValueError.

    A file holds a list of objects with the fields of `Tenant`; being a file, it keeps keys out of the list of
    processes.
    """
    entries: object = given
    if isinstance(given, str | os.PathLike):
        try:
            entries = json.loads(Path(given).read_text())
        except OSError as error:
            raise ValueError(f"tenants: {str(given)!r} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"tenants: {str(given)!r} is not JSON: {error}") from error
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        raise ValueError(
            "tenants is no list, allowed: a list of tenants, or the path of a JSON file with one"
        )
    if len(entries) > MAX_TENANTS:
        raise ValueError(f"tenants has {len(entries)} entries, allowed: up to {MAX_TENANTS}")
    tenants = tuple(_tenant(entry) for entry in entries)
    for idx, tenant in enumerate(tenants):
        for other in tenants[:idx]:
            if other.name == tenant.name:
                raise ValueError(f"tenants: two have the name {tenant.name!r}")
            if other.salt == tenant.salt:
                names = f"{other.name!r} and {tenant.name!r}"
                raise ValueError(f"tenants: {names} have the same cache_salt or api_key")
    return tenants


def _tenant(entry: object) -> Tenant:
    if isinstance(entry, Tenant):
        return entry
    if not isinstance(entry, Mapping):
        raise ValueError(f"tenants has a {type(entry).__name__}, allowed: objects with the fields of Tenant")
    known = {one.name for one in fields(Tenant)}
    if unknown := sorted(map(str, entry.keys() - known)):
        raise ValueError(
            f"tenants: a tenant has no field {unknown[0]!r}, allowed: {', '.join(sorted(known))}"
        )
    if "name" not in entry:
        raise ValueError("tenants: every tenant needs a name")
    return Tenant(**entry)


def _invalid(message: str, _field: str) -> ValueError:
    return ValueError(message)
