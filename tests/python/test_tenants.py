"""Tenants: how they are given, that they share nothing, and what is kept for them."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedkv import LLM, EngineConfig, Tenant
from pagedkv.serve.command import api_keys
from pagedkv.tenants import key_namespace, read_tenants
from tiny_llm import GREEDY, Checkpoint, assert_at_rest, async_engine, at_rest, last

ACME = {"name": "acme", "cache_salt": "s3cret", "min_blocks": 8, "eviction_weight": 0.5}


def test_a_file_and_a_list_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps([ACME, {"name": "b", "api_key": "sk-1"}]))
    tenants = read_tenants(str(path))
    assert tenants == (Tenant(**ACME), Tenant(name="b", api_key="sk-1"))
    assert EngineConfig(tenants=[ACME, tenants[1]]).named_tenants == tenants
    assert [tenant.core_option[1:] for tenant in tenants] == [(False, 8, 512), (True, 0, 1024)]
    assert EngineConfig().named_tenants == ()


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ([{"cache_salt": "x"}], "every tenant needs a name"),
        ([{"name": "a b", "cache_salt": "x"}], r"name is 'a b', allowed: 1 to 64 of"),
        ([{"name": "other", "cache_salt": "x"}], "name is 'other', allowed: .* but not 'other'"),
        ([{"name": "a"}], "tenant 'a': needs exactly one of cache_salt and api_key"),
        ([{"name": "a", "cache_salt": "x", "api_key": "y"}], "tenant 'a': needs exactly one"),
        ([{"name": "a", "cache_salt": ""}], "tenant 'a': needs exactly one"),
        ([{"name": "a", "cache_salt": "\ud800"}], "tenant 'a': cache_salt and api_key must be valid Unicode"),
        ([ACME | {"min_blocks": -1}], "tenant 'acme': min_blocks is -1, allowed: 0 to"),
        (
            [ACME | {"eviction_weight": 0}],
            "tenant 'acme': eviction_weight is 0, allowed: a number in 0.01..100",
        ),
        ([ACME | {"weight": 1}], "a tenant has no field 'weight', allowed: api_key, cache_salt,"),
        ([ACME, ACME], "two have the name 'acme'"),
        ([ACME, ACME | {"name": "b"}], "'acme' and 'b' have the same cache_salt or api_key"),
        ([7], "tenants has a int, allowed"),
        ({"name": "a"}, "tenants is no list"),
        ("/nowhere/tenants.json", "'/nowhere/tenants.json' cannot be read"),
        (
            [{"name": str(idx), "cache_salt": str(idx)} for idx in range(64)],
            "has 64 entries, allowed: up to 63",
        ),
    ],
)
def test_what_is_wrong_is_named(tenants: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(tenants=tenants)


def test_secrets_are_not_shown() -> None:
    config = EngineConfig(tenants=[ACME, {"name": "b", "api_key": "sk-123"}])
    assert "s3cret" not in repr(config)
    assert "sk-123" not in repr(config)
    with pytest.raises(ValueError, match="needs exactly one") as refused:
        EngineConfig(tenants=[ACME | {"api_key": "sk-123"}])
    assert "sk-123" not in str(refused.value)


def test_floors_must_fit_the_pool(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="min_blocks is 401, allowed: up to 400 for all tenants together"):
        LLM(**checkpoint.options, tenants=[ACME | {"min_blocks": 401}])


def test_no_salt_is_the_namespace_of_a_key() -> None:
    keys = ["", "a", "a\0", "ab", "sk-1", "\udcff"]
    namespaces = [key_namespace(key) for key in keys]
    assert len({*namespaces}) == len(keys)
    assert {len(one) for one in namespaces} == {33}
    for namespace in namespaces:
        with pytest.raises(UnicodeDecodeError):
            namespace.decode()


def test_one_key_is_everybody_s_and_several_are_tenants() -> None:
    named = EngineConfig(tenants=[{"name": "a", "api_key": "k1"}])
    salted = EngineConfig(tenants=[ACME])
    assert api_keys([], EngineConfig()) == ((), False, set())
    assert api_keys(["k"], EngineConfig()) == (("k",), False, set())
    assert api_keys(["k", "l", "k"], EngineConfig()) == (("k", "l"), True, set())
    assert api_keys([], named) == (("k1",), True, {"k1"})
    assert api_keys(["k"], named) == (("k", "k1"), True, {"k1"})
    assert api_keys(["k"], salted) == (("k",), False, set())
    # Where keys tell tenants apart, nobody comes with a salt alone.
    for keys, tenants in ((["k", "l"], [ACME]), ([], [ACME, *named.named_tenants])):
        with pytest.raises(ValueError, match="'acme' has a cache_salt, allowed: an api_key for every tenant"):
            api_keys(keys, EngineConfig(tenants=tenants))


async def test_a_floor_keeps_a_tenant_s_prompt(checkpoint: Checkpoint) -> None:
    kept = {"name": "kept", "cache_salt": "kept", "min_blocks": 8}
    prompt = list(range(4, 100))
    found = {}
    sizes = {"num_blocks": 40, "max_model_len": 512}
    async with async_engine(checkpoint, tenants=[kept], **sizes) as llm:
        for salt in (b"kept", b"not kept"):
            await last(llm.generate(prompt, GREEDY, salt=salt))
            for start in range(4, 54):
                await last(llm.generate([start, *prompt[:80]], GREEDY, salt=b"crowd"))
            found[salt] = (await last(llm.generate(prompt, GREEDY, salt=salt))).num_cached_tokens
        stats = await llm.tenant_stats()
        await at_rest(llm)
    assert found == {b"kept": 95, b"not kept": 0}
    assert [*stats] == ["other", "kept"]
    assert stats["kept"]["prefix_hits"] == 95
    assert stats["kept"]["requests"] == 2
    assert 1 <= stats["kept"]["blocks_cached"] <= 9
    assert stats["other"]["evictions"] > 0


def test_llm_names_its_tenants(checkpoint: Checkpoint) -> None:
    llm = LLM(**checkpoint.options, tenants=[ACME])
    llm.generate([5, 6, 7], GREEDY, use_tqdm=False)
    stats = llm.tenant_stats()
    assert (stats["other"]["requests"], stats["acme"]["requests"]) == (1, 0)
    assert_at_rest(llm)
