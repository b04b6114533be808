"""A full queue, steps that raise and interrupts: `LLM` stays usable and leaks nothing."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from pagedkv import LLM, RequestFailed, loading
from tiny_llm import GREEDY, assert_at_rest, check_all


def test_a_full_queue_is_waited_for(checkpoint, expected, monkeypatch):
    monkeypatch.setattr(loading._core, "Core", partial(loading._core.Core, max_queued_requests=2))
    check_all(LLM(**checkpoint.options), expected)


FORKED = """
import os, sys
from pagedkv import LLM, EngineDead, SamplingParams

llm = LLM(sys.argv[1], device="cpu", threads=2, num_blocks=100)
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
llm.generate([[5] * 20], params, use_tqdm=False)
child = os.fork()
if child == 0:
    try:
        llm.generate([[5] * 20], params, use_tqdm=False)
    except EngineDead as error:
        os.write(1, str(error).encode())
    os._exit(0)
os.waitpid(child, 0)
assert len(llm.generate([[5] * 20], params, use_tqdm=False)) == 1
"""


def test_a_fork_says_that_it_cannot_compute(checkpoint):
    command = [sys.executable, "-c", FORKED, str(checkpoint.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the engine was loaded before a fork; load it in the process that uses it"


@pytest.mark.parametrize(
    ("overlap", "fails_at"), [(False, 3), (True, 1), (True, 2), (True, 3), (True, 4), (True, 9)]
)
def test_a_step_that_raises_ends_its_requests_only(checkpoint, expected, monkeypatch, overlap, fails_at):
    llm = LLM(**checkpoint.options, overlap=overlap)
    forward, calls = llm._engine.runner.launch, []

    def broken(header, arena, meanwhile):
        calls.append(header.step_id)
        if len(calls) == fails_at:
            raise ArithmeticError("a bad step")
        return forward(header, arena, meanwhile)

    monkeypatch.setattr(llm._engine.runner, "launch", broken)
    with pytest.raises(RequestFailed, match="ArithmeticError: a bad step") as failure:
        llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    assert isinstance(failure.value.__cause__, ArithmeticError)
    assert_at_rest(llm)
    check_all(llm, expected)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_of_nan_ends_its_request_only(checkpoint, expected, monkeypatch, overlap):
    llm = LLM(**checkpoint.options, overlap=overlap)
    forward, prompts = llm._engine.runner.model, [one.prompt for one in expected]
    # Only its prompt has a token at this position in a step of this length.
    broken = max(range(len(prompts)), key=lambda one: len(prompts[one]))
    last, failed = len(prompts[broken]) - 1, []

    def spoilt(batch, *rest):
        logits = forward(batch, *rest)
        rows = torch.nonzero(batch.positions[batch.sample_rows.long()] == last).squeeze(1)
        if len(rows) and not failed:
            failed.append(len(rows))
            logits[rows] = torch.nan
        return logits

    monkeypatch.setattr(llm._engine.runner, "model", spoilt)
    params = replace(GREEDY, logprobs=2)
    with pytest.raises(RequestFailed, match="of the logits is NaN somewhere, allowed: numbers"):
        llm.generate(prompts, params, use_tqdm=False)
    assert failed == [1]
    assert llm.stats()["finished_error"] == 1
    assert_at_rest(llm)
    check_all(llm, expected)


def test_an_interrupt_ends_what_runs_and_leaves_the_engine_usable(checkpoint, expected, monkeypatch):
    llm = LLM(**checkpoint.options)
    with monkeypatch.context() as patch:
        forward, calls = llm._engine.runner.launch, []

        def interrupted(header, arena, meanwhile):
            calls.append(header.step_id)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return forward(header, arena, meanwhile)

        patch.setattr(llm._engine.runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    assert_at_rest(llm)
    check_all(llm, expected)


def test_an_interrupt_before_the_forward_pass_leaves_the_engine_usable(checkpoint, expected, monkeypatch):
    llm = LLM(**checkpoint.options)

    class Interrupted:
        """A core that is interrupted between deciding a step and computing it."""

        def __init__(self, core):
            self.core, self.calls = core, 0

        def __getattr__(self, name):
            return getattr(self.core, name)

        def schedule(self, arena):
            self.calls += 1
            header = self.core.schedule(arena)
            if self.calls == 4:
                raise KeyboardInterrupt
            return header

    monkeypatch.setattr(llm._engine, "core", Interrupted(llm._engine.core))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    assert_at_rest(llm)
    check_all(llm, expected)


def test_an_interrupt_between_steps_leaves_the_engine_usable(checkpoint, expected, monkeypatch):
    llm = LLM(**checkpoint.options)
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr(llm._front.streams, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    assert_at_rest(llm)
    check_all(llm, expected)


@pytest.mark.parametrize("overlap", [False, True])
def test_calls_from_several_threads_take_turns(checkpoint, expected, overlap):
    llm = LLM(**checkpoint.options, overlap=overlap)
    with ThreadPoolExecutor(3) as threads:
        calls = [
            threads.submit(llm.generate, [one.prompt], GREEDY, use_tqdm=False)
            for _ in range(3)
            for one in expected
        ]
        calls += [threads.submit(llm.pin, expected[0].prompt) for _ in range(3)]
        for call, one in zip(calls, expected * 3, strict=False):
            one.check(call.result()[0].outputs[0])
        for call in calls[-3:]:
            llm.unpin(call.result().id)
    assert_at_rest(llm)
