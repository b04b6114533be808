"""The official `openai` client against the server: replies, streams, errors as its exception types."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from fake_engine import ANSWER, FakeEngine, serving

USER = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(engine: FakeEngine, api_keys: tuple[str, ...] = ()) -> AsyncIterator[openai.AsyncOpenAI]:
    """An `openai` client of a server around `engine`."""
    async with serving(engine, api_keys=api_keys) as server:
        base_url = str(server.make_url("/v1"))
        async with openai.AsyncOpenAI(base_url=base_url, api_key="sk-x", max_retries=0) as client:
            yield client


def text_of(index: int, prompt: str, num_bytes: int) -> str:
    text = ANSWER.format(index=index, prompt=prompt).encode()
    return (text * (1 + num_bytes // len(text)))[:num_bytes].decode()


async def test_models() -> None:
    async with client_of(FakeEngine()) as client:
        assert [model.id async for model in await client.models.list()] == ["mock"]
        assert (await client.models.retrieve("mock")).owned_by == "pagedkv"


async def test_chat() -> None:
    async with client_of(FakeEngine()) as client:
        reply = await client.chat.completions.create(model="mock", messages=USER, max_tokens=20, stop=None)
        assert reply.choices[0].message.role == "assistant"
        assert reply.choices[0].message.content == text_of(0, "<use", 20)
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 20
        history = [*USER, reply.choices[0].message.model_dump(), *USER]
        again = await client.chat.completions.create(model="mock", messages=history, max_tokens=3)
        assert again.choices[0].message.content is not None


async def test_three_answers() -> None:
    async with client_of(FakeEngine()) as client:
        reply = await client.chat.completions.create(model="mock", messages=USER, n=3, max_tokens=20)
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert [choice.message.content for choice in reply.choices] == [
            text_of(i, "<use", 20) for i in range(3)
        ]


async def test_completions() -> None:
    async with client_of(FakeEngine()) as client:
        reply = await client.completions.create(
            model="mock", prompt=["ab", "cd"], n=2, max_tokens=20, logprobs=1
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        assert reply.choices[3].text == text_of(1, "cd", 20)
        assert reply.choices[0].logprobs is not None
        assert len(reply.choices[0].logprobs.tokens or []) == 20
        reply = await client.completions.create(model="mock", prompt=[104, 105])
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 16


async def test_streams() -> None:
    async with client_of(FakeEngine()) as client:
        stream = await client.chat.completions.create(
            model="mock", messages=USER, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of(
            0, "<use", 20
        )
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 20
        pieces = await client.completions.create(model="mock", prompt="ab", max_tokens=20, stream=True)
        assert "".join([piece.choices[0].text async for piece in pieces]) == text_of(0, "ab", 20)


async def test_stream_helper_builds_the_whole_reply() -> None:
    async with client_of(FakeEngine()) as client:
        whole = await client.chat.completions.create(
            model="mock", messages=USER, n=3, stop=["of"], logprobs=True, top_logprobs=2
        )
        helper = client.chat.completions.stream(
            model="mock", messages=USER, n=3, stop=["of"], logprobs=True, top_logprobs=2
        )
        async with helper as stream:
            async for _ in stream:
                pass
            built = await stream.get_final_completion()
        for ours, theirs in zip(whole.choices, built.choices, strict=True):
            assert theirs.message.content == ours.message.content
            assert theirs.message.role == "assistant"
            assert theirs.finish_reason == ours.finish_reason
        # The helper counts the first log-probability of every choice but the first twice, so only that is
        # compared.
        ours, theirs = whole.choices[0].logprobs, built.choices[0].logprobs
        assert ours is not None
        assert theirs is not None
        assert theirs.content == ours.content


async def test_streams_share_a_connection() -> None:
    async with client_of(FakeEngine()) as client:
        ports = set()
        for _ in range(10):
            stream = await client.completions.create(model="mock", prompt="a", max_tokens=1, stream=True)
            async for _chunk in stream:
                pass
            ports.add(stream.response.extensions["network_stream"].get_extra_info("client_addr"))
        # The client gives up a connection whose body goes on after [DONE].
        assert len(ports) == 1


async def test_errors_as_exception_types() -> None:
    async with client_of(FakeEngine(max_model_len=64)) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model="mock", messages=USER, temperature=1000)
        assert bad.value.param == "temperature"
        assert "1000" in str(bad.value)
        with pytest.raises(openai.BadRequestError) as overflow:
            await create(model="mock", messages=[{"role": "user", "content": "x" * 99}])
        assert overflow.value.code == "context_length_exceeded"
        assert "maximum context length is 64 tokens" in str(overflow.value)
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="other", messages=USER)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as unsupported:
            await create(model="mock", messages=USER, response_format={"type": "json_object"})
        assert unsupported.value.param == "response_format"
    async with client_of(FakeEngine(), api_keys=("other",)) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with client_of(FakeEngine(capacity=0)) as client:
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model="mock", messages=USER)
        assert full.value.response.headers["retry-after"] == "1"
    async with client_of(FakeEngine(dead=True)) as client:
        with pytest.raises(openai.InternalServerError) as dead:
            await client.chat.completions.create(model="mock", messages=USER)
        assert dead.value.status_code == 503
    async with client_of(FakeEngine(fail_after=5)) as client:
        stream = await client.chat.completions.create(model="mock", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="the step failed"):
            async for _ in stream:
                pass


async def test_client_comes_back_after_a_full_queue() -> None:
    engine = FakeEngine(capacity=0)
    async with client_of(engine) as client:
        patient = client.with_options(max_retries=2)
        started = time.monotonic()
        call = asyncio.create_task(patient.completions.create(model="mock", prompt="ab", max_tokens=2))
        await asyncio.sleep(0.3)
        engine.capacity = 1
        assert (await call).choices[0].text == "Gr"
        assert time.monotonic() - started > 0.9
