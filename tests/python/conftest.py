"""Fixtures of several modules: the tiny checkpoint, the answers that it should give, engines, a client."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import torch
from aiohttp.test_utils import TestClient

from fake_engine import serving
from pagedkv import LLM, AsyncLLM
from tiny_llm import (
    NUM_TOKENS,
    Checkpoint,
    Greedy,
    assert_at_rest,
    async_engine,
    at_rest,
    make_checkpoint,
    prompts,
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def expected(checkpoint: Checkpoint) -> list[Greedy]:
    """Prompts, and the greedy answers of transformers to them."""
    return [checkpoint.greedy(prompt, NUM_TOKENS) for prompt in prompts(12, checkpoint.vocab_size)]


@pytest.fixture(scope="session")
def shared_llm(checkpoint: Checkpoint) -> LLM:
    return LLM(**checkpoint.options, seed=11)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """An engine that tests share; each leaves it at rest."""
    yield shared_llm
    assert_at_rest(shared_llm)


@pytest.fixture(scope="module")
def shared_async_llm(checkpoint: Checkpoint) -> Iterator[AsyncLLM]:
    llm = async_engine(checkpoint)
    yield llm
    asyncio.run(llm.shutdown())
    assert not llm.is_alive


@pytest_asyncio.fixture
async def async_llm(shared_async_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    """A served engine that the tests of a module share; each leaves it at rest."""
    yield shared_async_llm
    await at_rest(shared_async_llm)


@pytest_asyncio.fixture
async def engine(checkpoint: Checkpoint) -> AsyncIterator[AsyncLLM]:
    """An engine that must be at rest when the test is over."""
    async with AsyncLLM(**checkpoint.options, seed=7) as llm:
        yield llm
        if llm.is_alive:
            await at_rest(llm)


@pytest_asyncio.fixture
async def client(engine: AsyncLLM) -> AsyncIterator[TestClient]:
    """A client of a server around `engine`, which a module may replace by one of its own."""
    async with serving(engine, keeps_engine=True) as client:
        yield client
