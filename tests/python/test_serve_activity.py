"""The log line that says what the server did."""

import logging

from fake_engine import serving
from pagedkv import AsyncLLM, SamplingParams
from pagedkv.serve import activity
from pagedkv.serve.activity import activity_line
from tiny_llm import async_engine, last


def stats(**changes: int) -> dict[str, int]:
    names = (
        "steps prompt_tokens generation_tokens num_running num_waiting blocks_owned blocks_fenced "
        "blocks_total prefix_queries prefix_hits preemptions"
    )
    return dict.fromkeys(names.split(), 0) | {"blocks_total": 200} | changes


def test_nothing_is_said_of_an_idle_engine() -> None:
    assert activity_line(stats(steps=5), stats(steps=5, num_waiting=3), 10) is None


def test_rates_are_of_the_interval_and_states_of_its_end() -> None:
    now = stats(steps=9, prompt_tokens=120, generation_tokens=1055, num_running=3, num_waiting=1)
    now |= {"blocks_owned": 49, "blocks_fenced": 1}
    assert activity_line(stats(prompt_tokens=20, generation_tokens=5), now, 10) == (
        "10.0 prompt and 105.0 generated tokens/s, 3 running, 1 waiting, cache 25.0% used"
    )
    now |= {"prefix_queries": 80, "prefix_hits": 20, "preemptions": 2}
    line = activity_line(stats(), now, 10)
    assert line is not None
    assert line.endswith("cache 25.0% used, 25.0% of the prompts found in it, 2 preemptions")


async def test_the_server_reports_what_its_engine_did(checkpoint, monkeypatch, caplog) -> None:
    monkeypatch.setattr(activity, "INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO, logger="pagedkv")
    llm: AsyncLLM
    async with async_engine(checkpoint) as llm, serving(llm, keeps_engine=True):
        prompt = llm.tokenizer.encode("the cat")
        for _ in range(100):
            await last(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4)))
            if "generated tokens/s" in caplog.text:
                break
        else:
            raise AssertionError("100 requests and no line")
