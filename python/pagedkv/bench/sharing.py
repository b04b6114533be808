"""What sharing saves: several samples, and a beam search, beside the same work sent as separate requests.

One engine steps through each case on an empty prefix cache. Blocks are counted while a step is computed, when
copies have been made and nothing has been given back yet.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

from pagedkv.beam_search import BeamSearchParams
from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.front import Front
from pagedkv.loading import load
from pagedkv.request import AnyParams
from pagedkv.sampling_params import SamplingParams

NUM_SAMPLES: Final = 16
BEAM_WIDTH: Final = 8
_SEED: Final = 17


@dataclass
class Case:
    """One way to get a number of answers to one prompt.

    Attributes:
        group: cases of one group give equally many answers.
        name: what is sent.
        prefix_caching: whether the engine finds blocks again.
        params: of each request.
    """

    group: str
    name: str
    prefix_caching: bool
    params: list[AnyParams] = field(repr=False)


@dataclass
class Outcome:
    """What a case cost. `step_ms` is the median of the steps in which every answer got one token."""

    group: str
    name: str
    prompt_tokens: int
    peak_blocks: int
    copies: int
    steps: int
    step_ms: float
    wall_s: float


def cases(max_tokens: int) -> list[Case]:
    """All cases, those of an engine next to each other."""

    def sampled(seed: int, n: int) -> SamplingParams:
        return SamplingParams(n=n, seed=seed, max_tokens=max_tokens, ignore_eos=True)

    result = []
    for caching in (True, False):
        for group, num_answers in (("samples", NUM_SAMPLES), ("beams", BEAM_WIDTH)):
            separate: list[AnyParams] = [sampled(_SEED + place, 1) for place in range(num_answers)]
            if caching:
                shared: list[AnyParams] = [sampled(_SEED, num_answers)]
                result.append(Case(group, f"one request, n={num_answers}", True, shared))
                if group == "beams":
                    beam = BeamSearchParams(num_answers, max_tokens, ignore_eos=True)
                    result.append(Case(group, f"one request, beam width {num_answers}", True, [beam]))
            suffix = "" if caching else ", no prefix cache"
            result.append(Case(group, f"{num_answers} requests{suffix}", caching, separate))
    return result


def prompt_of(front: Front, num_tokens: int) -> list[int]:
    """A text of so many tokens that does not repeat itself."""
    lines = (f"{number} squared is {number * number}, and its cube {number**3}." for number in range(3, 400))
    token_ids = front.tokenizer.encode(" ".join(lines))[:num_tokens]
    if len(token_ids) < num_tokens:
        raise ValueError(f"the prompt has {len(token_ids)} tokens; --prompt-len allows no more")
    return token_ids


def run_case(engine: Engine, front: Front, case: Case, prompt: Sequence[int]) -> Outcome:
    """Runs one case from an empty prefix cache to its last answer."""
    engine.core.reset_prefix_cache()
    num_answers = sum(one.beam_width if isinstance(one, BeamSearchParams) else one.n for one in case.params)
    peak = 0

    def note_blocks(*_: object) -> None:
        nonlocal peak
        stats = engine.edge.stats()
        peak = max(peak, stats["blocks_owned"] + stats["blocks_fenced"])

    hook = engine.runner.model.register_forward_pre_hook(note_blocks)
    before = engine.edge.stats()
    num_scheduled = before["scheduled_tokens"]
    step_s = []
    start = time.perf_counter()
    for params in case.params:
        front.submit(front.request(list(prompt), params))
    while len(front.streams):
        step_start = time.perf_counter()
        report = engine.step()
        if report is None:
            raise RuntimeError("nothing runs although requests are in flight")
        front.streams.apply(report, engine.events.take(report.step_id))
        after = engine.edge.stats()
        if after["scheduled_tokens"] - num_scheduled == num_answers:
            step_s.append(time.perf_counter() - step_start)
        num_scheduled = after["scheduled_tokens"]
    wall_s = time.perf_counter() - start
    engine.settle()
    hook.remove()
    after = engine.edge.stats()
    return Outcome(
        case.group,
        case.name,
        prompt_tokens=after["prompt_tokens"] - before["prompt_tokens"],
        peak_blocks=peak,
        copies=after["copies"] - before["copies"],
        steps=after["steps"] - before["steps"],
        step_ms=1e3 * median(step_s) if step_s else 0.0,
        wall_s=wall_s,
    )


def run(config: EngineConfig, prompt_len: int, max_tokens: int, num_rounds: int) -> list[Outcome]:
    """Runs every case and prints a line for each. Raises what loading a model raises.

    The cases of an engine take turns for `num_rounds` rounds, and the quickest run of each counts: a machine
    that changes its speed meanwhile favours none of them.
    """
    outcomes = []
    print(
        f"{'':34}{'prompt tokens':>14}{'peak blocks':>13}{'copies':>8}{'steps':>7}{'step ms':>9}{'wall s':>8}"
    )
    for caching in (True, False):
        engine, front = load(EngineConfig(**asdict(config) | {"enable_prefix_caching": caching}))
        prompt = prompt_of(front, prompt_len)
        # The first steps of a process are slower than the rest.
        warm_up: list[AnyParams] = [SamplingParams(n=NUM_SAMPLES, max_tokens=4, ignore_eos=True)]
        run_case(engine, front, Case("", "", caching, warm_up), prompt)
        of_engine = [case for case in cases(max_tokens) if case.prefix_caching == caching]
        rounds = [[run_case(engine, front, case, prompt) for case in of_engine] for _ in range(num_rounds)]
        for runs in zip(*rounds, strict=True):
            outcome = min(runs, key=lambda run: run.wall_s)
            outcomes.append(outcome)
            print(
                f"{outcome.name:34}{outcome.prompt_tokens:14}{outcome.peak_blocks:13}{outcome.copies:8}"
                f"{outcome.steps:7}{outcome.step_ms:9.1f}{outcome.wall_s:8.2f}"
            )
    return outcomes


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The fields that are written to a file."""
    return [asdict(outcome) for outcome in outcomes]
