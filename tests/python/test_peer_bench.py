"""The comparison with other engines: its workloads and its arithmetic. No engine is needed for that."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benches" / "peers"))

from report import Figure, chart, table
from workloads import WORKLOADS, w2, w3

FIGURES = [
    Figure("W2 s", False, {"pagedkv": [4.0, 5.0, 30.0], "one": [8.0, 10.0, 40.0], "two": [9.0, 9.0, 50.0]}),
    Figure("W1 decode tokens/s", True, {"pagedkv": [100.0], "one": [80.0], "two": [50.0]}),
]


def test_the_workloads_have_the_sizes_that_their_figures_are_known_by() -> None:
    jobs = w2(0)
    assert (len(jobs), sum(len(job.prompt) for job in jobs), sum(job.num_tokens for job in jobs)) == (
        32,
        10_627,
        4_259,
    )
    shared = w3(0)
    assert {tuple(job.prompt[:1024]) for job in shared} == {tuple(shared[0].prompt[:1024])}
    assert len({tuple(job.prompt) for job in shared}) == 64


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_run_is_like_itself_and_unlike_the_next(name: str) -> None:
    make = WORKLOADS[name]
    assert make(1) == make(1)
    assert {tuple(job.prompt[:32]) for job in make(1)}.isdisjoint(tuple(job.prompt[:32]) for job in make(2))


def test_the_ratio_pairs_the_rounds_with_the_best_peer() -> None:
    assert [figure.best_peer() for figure in FIGURES] == ["two", "one"]
    # 4/9, 5/9 and 30/50: the median of the ratios, not the ratio of the medians.
    assert FIGURES[0].ratio() == pytest.approx(5 / 9)
    assert Figure("start s", False, {"pagedkv": [1.0]}).ratio() is None


def test_table_and_chart_show_every_engine() -> None:
    lines = table(FIGURES, ["pagedkv", "one", "two"]).splitlines()
    assert lines[0] == "| | pagedkv | one | two | ratio to the best peer |"
    assert lines[2] == "| W2 s | 5 | 10 | 9 | 0.56 |"
    drawing = chart(FIGURES)
    assert drawing.count("<rect") == 1 + 6
    assert drawing.count(">one</text>") == 2
