"""The README's snippets, run as they stand there, each in a process of its own as a reader would run it."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedkv.config import EngineConfig
from pagedkv.serve.command import api_keys

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "127.0.0.1:8000"
START_S = 120


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def snippet(language: str, text: str) -> str:
    found = [snippet for snippet in snippets(language) if text in snippet]
    assert len(found) == 1, f"the README has {len(found)} {language} snippets with {text!r}"
    return found[0]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the demo model on a free port. It must end when told to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as sink:
        command = [sys.executable, "-m", "pagedkv.serve", "--port", str(port), "--num-blocks", "512"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT)
        try:
            address = f"127.0.0.1:{port}"
            wait_until_healthy(address, process, log)
            yield address
            process.terminate()
            assert process.wait(timeout=30) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def wait_until_healthy(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://{address}/health", timeout=5) as reply:
                assert reply.status == 200
                return
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        time.sleep(0.2)
    pytest.fail(f"the server did not answer within {START_S} s:\n{log.read_text()}")


@pytest.mark.slow
def test_offline_snippet() -> None:
    printed = run(snippet("python", "llm.chat"))
    lines = printed.splitlines()
    assert lines[0].startswith("The capital of France is -> ")
    assert any(
        line.startswith("Water boils at -> ") and len(line) > len("Water boils at -> ") for line in lines
    )
    assert "Paris" in lines[0]
    assert "Paris" in lines[-1]


def test_openai_snippet(server: str) -> None:
    code = snippet("python", "from openai import OpenAI")
    assert ADDRESS in code
    assert "Paris" in run(code.replace(ADDRESS, server))


def test_curl_line(server: str) -> None:
    """The request that the curl line makes, sent without curl, which not every machine has."""
    words = shlex.split(snippet("sh", "curl -N"))
    assert words[:2] == ["curl", "-N"]
    assert words[3:6:2] == ["-H", "-d"]
    name, _, value = words[4].partition(": ")
    request = urllib.request.Request(words[2].replace(ADDRESS, server), words[6].encode(), {name: value})
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        events = [line[6:] for line in reply.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert "Paris" in "".join(choice["delta"].get("content") or "" for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


@pytest.mark.slow
def test_shared_prefix_snippet() -> None:
    printed = run(snippet("python", "num_cached_tokens"))
    counts = [
        tuple(map(int, pair))
        for pair in re.findall(r"^(\d+) tokens, (\d+) of them found", printed, re.MULTILINE)
    ]
    assert len(counts) == 2
    assert "1871" in printed
    assert "1932" in printed
    (first_len, first_cached), (second_len, second_cached) = counts
    assert first_cached == 0
    assert first_len > 200
    # The document's full blocks are hits: computed are the question and less than a block of the document.
    assert second_len - 32 < second_cached < second_len
    answers = re.findall(r"^([0-3]) ", printed, re.MULTILINE)
    assert {"0", "1", "2", "3"} <= set(answers)


def test_every_make_target_named_exists() -> None:
    """A command in the documents is a target of the Makefile, and the listing shows it."""
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MAKEFLAGS": ""},
    ).stdout
    targets = set(re.findall(r"^ {2}([a-z-]+) ", listed, re.MULTILINE))
    assert {"build", "serve", "test", "lint", "bench", "clean"} <= targets
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benches/README.md", "cuda/README.md"):
        document = (ROOT / name).read_text(encoding="utf-8")
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", document, re.MULTILINE)) <= targets, name


def test_the_tenants_are_accepted() -> None:
    tenants = EngineConfig(tenants=json.loads(snippet("json", "min_blocks")))
    keys, are_tenants, _ = api_keys([], tenants)
    assert len(keys) == 2
    assert are_tenants
