import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from pagedkv import _core
from pagedkv.bench import __main__ as command
from pagedkv.bench import core, replay, trace
from pagedkv.ops import cpu
from prefix_cache_sim import Sim
from tiny_llm import Checkpoint

CUT = Path(__file__).parent.parent / "data" / "conversation_cut.jsonl"


@pytest.mark.parametrize("policy", ["lru", "turn"])
@pytest.mark.parametrize("num_blocks", [64, 256, 512])
def test_replay_finds_what_the_slow_simulation_finds(policy: str, num_blocks: int) -> None:
    requests = trace.read(CUT)
    sim = Sim(num_blocks, 512, policy)
    for request in requests:
        sim.request(request.input_len, request.ids.tolist())
    outcome = replay.run(requests, policy, num_blocks, 512)
    assert outcome.hit_tokens == sim.hit_tokens > 0
    assert outcome.evictions == sim.evictions > 0
    assert outcome.token_hit_ratio == sim.token_hit_ratio
    assert (outcome.preemptions, outcome.refused) == (0, 0)
    if policy == "turn" and num_blocks == 256:
        assert sim.weights != [4096] * 4, "the policies differ here"


def test_a_pool_that_holds_everything_finds_every_repetition() -> None:
    requests = trace.read(CUT)
    known: set[tuple[int, ...]] = set()
    found = 0
    for request in requests:
        ids = request.ids.tolist()
        prefixes = [tuple(ids[: end + 1]) for end in range(request.input_len // 512)]
        usable = prefixes[: (request.input_len - 1) // 512]
        found += 512 * sum(1 for prefix in usable if prefix in known)
        known.update(prefixes)
    outcome = replay.run(requests, "turn", 8000, 512)
    assert (outcome.hit_tokens, outcome.evictions) == (found, 0)


def test_results_are_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, drawing = tmp_path / "results.json", tmp_path / "blocks.svg"
    arguments = ["--blocks", "128,256", "--limit", "200", "--json", str(results), "--plot", str(drawing)]
    assert command.main(["replay", str(CUT), "--policy", "lru,turn", *arguments]) == 0
    rows = json.loads(results.read_text())
    fields = ["policy", "blocks", "token_hit_ratio", "evictions", "preemptions", "seconds"]
    assert [list(row) for row in rows] == [fields] * 4
    assert [(row["policy"], row["blocks"]) for row in rows] == [
        ("lru", 128),
        ("turn", 128),
        ("lru", 256),
        ("turn", 256),
    ]
    lines = ET.fromstring(drawing.read_text()).findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 8
    assert all(len(line.attrib["points"].split()) == 200 for line in lines)
    assert f"{rows[0]['token_hit_ratio']:.4f}" in capsys.readouterr().out


def test_requests_arrive_and_end_in_virtual_time() -> None:
    requests = trace.read(CUT)[:300]
    timing = replay.Timing(max_num_seqs=16, max_num_batched_tokens=4096, step_s=0.05, token_s=1e-5)
    outcome = replay.run(requests, "turn", 512, 512, timing)
    times = [point.at for point in outcome.points]
    assert times == sorted(times)
    assert times[-1] >= requests[-1].time_s
    assert all(0 < point.owned <= 512 for point in outcome.points)
    assert 0 < outcome.token_hit_ratio < 1
    # Alone there is room for everything; together some have to wait or give way.
    crowded = replay.run(requests, "lru", 32, 512, timing)
    assert crowded.preemptions > 0
    assert crowded.token_hit_ratio < outcome.token_hit_ratio


def test_a_request_that_can_never_fit_counts_as_missed() -> None:
    requests = trace.read(CUT)[:50]
    outcome = replay.run(requests, "lru", 16, 512)
    assert outcome.refused == sum(-(-request.input_len // 512) > 16 for request in requests) > 0
    assert outcome.prompt_tokens == sum(request.input_len for request in requests)


def test_azure_lengths_share_no_content(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,1024,0\n"
    )
    first, second = trace.read(path)
    assert (first.time_s, first.input_len, first.output_len) == (0.0, 374, 44)
    assert (round(second.time_s, 4), second.output_len) == (4.3146, 1)
    assert second.prompt().tolist() == [1] * 512 + [2] * 512
    assert replay.run([first, second], "turn", 8, 512).hit_tokens == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.txt", "", "'.txt'; allowed: .jsonl, .csv"),
        ("trace.jsonl", '{"timestamp": 0}\n', "request 1 cannot be read"),
        ("trace.jsonl", '{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}\n', "513"),
        ("trace.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,x\n", "request 1 cannot be read"),
    ],
)
def test_a_bad_trace_is_named(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert command.main(["replay", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert message in error


@pytest.mark.parametrize("arguments", [["--policy", "fifo"], ["--blocks", "0"], ["--step-ms", "nan"]])
def test_a_bad_option_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["replay", str(CUT), *arguments])
    assert "allowed" in capsys.readouterr().err


def test_steps_are_timed() -> None:
    result = core.time_steps(4, 64)
    assert list(result) == ["sequences", "schedule_us", "commit_us", "step_us"]
    assert result["sequences"] == 4
    assert 0 < result["schedule_us"] < result["step_us"]
    assert 0 < result["commit_us"] < result["step_us"]


def test_prompts_differ_where_their_ids_do() -> None:
    request = trace.TraceRequest(0.0, 700, 1, np.array([5, 9], np.int32))
    assert request.prompt().tolist() == [5] * 512 + [9] * 188


def test_no_torch_is_needed() -> None:
    program = "import sys, pagedkv.bench.__main__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sharing_counts_the_prompt_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    figures, drawing = tmp_path / "sharing.json", tmp_path / "sharing.svg"
    options = [
        "--model",
        str(checkpoint.path),
        "--threads",
        "1",
        "--num-blocks",
        "400",
        "--max-model-len",
        "128",
    ]
    sizes = ["--prompt-len", "60", "--max-tokens", "6"]
    assert command.main(["sharing", *options, *sizes, "--json", str(figures), "--plot", str(drawing)]) == 0
    by_name = {(one["group"], one["name"]): one for one in json.loads(figures.read_text())}
    assert len(by_name) == 7
    for name in ("one request, n=16", "16 requests"):
        assert by_name["samples", name]["prompt_tokens"] < 60 + 16 * 16
    assert by_name["samples", "16 requests, no prefix cache"]["prompt_tokens"] == 16 * 60
    one = by_name["samples", "one request, n=16"]
    # Three full blocks are shared, and each sample has a tail of its own that it outgrows by two tokens.
    assert (one["prompt_tokens"], one["peak_blocks"], one["copies"]) == (60, 3 + 16 * 2, 15)
    beam = by_name["beams", "one request, beam width 8"]
    assert beam["prompt_tokens"] == 60
    assert beam["peak_blocks"] <= 3 + 8 * 2
    assert beam["steps"] == by_name["beams", "one request, n=8"]["steps"] == 6
    assert beam["step_ms"] > 0
    root = ET.fromstring(drawing.read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 3 * 7


def test_sharing_refuses_a_prompt_that_it_has_no_text_for(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["sharing", "--model", str(checkpoint.path), "--num-blocks", "400", "--prompt-len", "9999999"]
    assert command.main(arguments) == 2
    assert "--prompt-len allows no more" in capsys.readouterr().err


def test_the_time_of_a_run_is_shared_out(checkpoint, tmp_path, capsys):
    path = tmp_path / "where.json"
    arguments = ["where", "--model", str(checkpoint.path), "--workload", "single", "--json", str(path)]
    if _core.cpu_isa() == "portable":
        assert command.main(arguments) == 2
        assert "torch multiplies" in capsys.readouterr().err
        return
    assert command.main(arguments) == 0
    (result,) = json.loads(path.read_text())
    parts = result["parts"]
    # 2 layers of 4 products, and the head; a step for the prompt and 127 for the other tokens.
    assert parts["linear, up to 1 rows"]["calls"] == 127 * 9 + 1
    assert parts["linear, up to 128 rows"]["calls"] == 8
    assert parts["attention, one token each"]["calls"] == 127 * 2
    assert parts["attention, with prompts"]["calls"] == 2
    assert parts["Python"]["calls"] == parts["sample"]["calls"] == 128
    assert sum(part["seconds"] for part in parts.values()) == pytest.approx(result["seconds"])
    assert result["ceilings"]["read"] > 1e8
    assert "attention, with prompts" in capsys.readouterr().out
    assert cpu._core is _core
