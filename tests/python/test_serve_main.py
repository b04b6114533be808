"""`python -m pagedkv.serve` as a process: how it starts, what it says, how it ends."""

import asyncio
import gc
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from fake_engine import FakeEngine
from pagedkv.serve.app import build_app
from pagedkv.serve.command import StartError, bind, greeting, run, serve
from pagedkv.serve.served import ServeOptions
from tiny_llm import make_checkpoint

START_S = 180
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Served:
    """A server in a process of its own."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def post(self, path: str, key: str = "x", **fields: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(self.url + path, json.dumps(fields).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            body: dict[str, Any] = json.load(reply)
        return body

    def end(self, number: int, timeout_s: float) -> None:
        """Sends a signal; the process must end cleanly in time."""
        self.process.send_signal(number)
        assert self.process.wait(timeout_s) == 0, self.log.read_text()
        assert "Traceback" not in self.log.read_text()


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[Served]:
    """Starts a server on a free port and waits for its greeting."""
    log = folder / "log"
    command = [sys.executable, "-m", "pagedkv.serve", "--port", "0", *arguments]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"Serving .* at (http://\S+)\n[^$]*stops the server", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield Served(process, found[1], log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model").path


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("demo"), "--dtype", "float32", "--num-blocks", "256") as server:
        yield server


def test_demo_model_knows_the_capital(demo: Served) -> None:
    body = demo.post("/v1/chat/completions", messages=QUESTION, temperature=0, max_tokens=24)
    assert "Paris" in body["choices"][0]["message"]["content"]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["model"] == "SmolLM2-135M-Instruct"


def test_printed_line_works(demo: Served) -> None:
    printed = re.search(r"^  curl .*$", demo.log.read_text(), re.MULTILINE)
    assert printed is not None
    words = shlex.split(printed[0])
    assert words[:2] == ["curl", "-N"]
    assert words[3] == "-H"
    assert words[5] == "-d"
    name, value = words[4].split(": ")
    request = urllib.request.Request(words[2], words[6].encode(), {name: value})
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        received = reply.read()
    assert received.endswith(b"data: [DONE]\n\n")
    assert b"Paris" in received


def test_official_client_with_the_demo_model(demo: Served) -> None:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="x") as client:
        model = next(iter(client.models.list())).id
        reply = client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, max_tokens=24, n=3
        )
        texts = {choice.message.content for choice in reply.choices}
        assert len(texts) == 1
        stream = client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, max_tokens=24, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) in texts
        emoji = client.completions.create(
            model=model,
            prompt="Emoji: \U0001f600 \U0001f601 \U0001f602 \U0001f603",
            temperature=0,
            max_tokens=24,
            stop=["\n"],
        )
        assert emoji.choices[0].text
        with pytest.raises(openai.BadRequestError, match="maximum context length is"):
            client.completions.create(model=model, prompt=[5] * 9000)


def test_running_stream_hears_of_the_end(demo: Served) -> None:
    """The last test of the demo model: it ends the server with SIGTERM while a stream goes on."""
    fields = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(demo.url + "/v1/completions", json.dumps(fields).encode())
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert reply.readline().startswith(b"data: {")
        demo.process.send_signal(signal.SIGTERM)
        rest = reply.read()
    assert b'"code":"engine_dead"' in rest.split(b"\n\n")[-2]
    demo.end(signal.SIGTERM, 30)


def test_server_s_own_options(tiny: Path, tmp_path: Path) -> None:
    names = ("--served-model-name", "first", "org/second", "--strict", "--api-key", "s3cret")
    engine = ("--num-blocks", "64", "--no-enable-prefix-caching", "--max-num-seqs", "4", "--seed", "1")
    with served(tmp_path, "--model", str(tiny), *names, *engine) as server:
        fields = {"prompt": "the cat", "max_tokens": 4}
        assert server.post("/v1/completions", key="s3cret", **fields)["model"] == "first"
        body = server.post("/v1/completions", key="s3cret", model="org/second", **fields)
        assert body["model"] == "org/second"
        for key, more, status in (
            ("no", {}, 401),
            ("s3cret", {"foo": 1}, 400),
            ("s3cret", {"model": "x"}, 404),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                server.post("/v1/completions", key=key, **fields, **more)
            assert refused.value.code == status
            refused.value.close()
        with urllib.request.urlopen(server.url + "/metrics", timeout=30) as reply:
            assert b'enable_prefix_caching="False"' in reply.read()
        server.end(signal.SIGINT, 15)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["--model", "/no/such/model"], 1, r"pagedkv: .*/no/such/model.*"),
        (["--block-size", "3"], 2, r".*block_size is 3, allowed: a power of two in 1\.\.256"),
        (["--port", "99999"], 2, r".*99999 is not a port, allowed: 0 to 65535.*"),
        (["--host", "256.1.1.1"], 1, r"pagedkv: cannot listen on 256\.1\.1\.1: .*"),
    ],
)
def test_wrong_option_is_one_clear_line(
    arguments: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        result = run(["--port", "0", *arguments])
    except SystemExit as exit:
        result = int(str(exit.code))
    assert result == code
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(line, said[-1])
    # argparse prints its usage first; nothing else does.
    assert len(said) == 1 or said[0].startswith("usage:")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["importing", "loading"])
def test_signal_before_the_server_runs_is_one_line(
    number: signal.Signals, stage: str, tiny: Path, tmp_path: Path
) -> None:
    # The process opens the fifo where it comes to the stage, and reads what nobody ever writes.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    place = "aiohttp" if stage == "importing" else "pagedkv.text.hf_tokenizer"
    program = (
        "import sys\n"
        "class Stuck:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {place!r}:\n"
        f"            open({str(fifo)!r}).read()\n"
        "sys.meta_path.insert(0, Stuck())\n"
        "from pagedkv.serve.__main__ import main\n"
        "sys.exit(main(['--port', '0', '--model', sys.argv[1]]))\n"
    )
    command = [sys.executable, "-c", program, str(tiny)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            # Waits until the other end is opened, which is when the stage is reached.
            with fifo.open("w"):
                process.send_signal(number)
                out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert out == ""
    said = [line for line in err.splitlines() if " INFO " not in line]
    assert said == [f"pagedkv: stopped by {number.name}"]


def test_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "pagedkv.serve", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == f"pagedkv: port {port} on 127.0.0.1 is in use; choose another one with --port\n"


def test_missing_extension_is_one_clear_line() -> None:
    program = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pagedkv._core':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from pagedkv.serve.__main__ import main\n"
        "sys.exit(main(['--port', '0']))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("pagedkv: the extension pagedkv._core is not built; run `make build`")


async def test_objects_that_stay_are_left_out_of_collections(capfd: pytest.CaptureFixture[str]) -> None:
    app = build_app(FakeEngine(), ServeOptions(("mock",), "mock-root"))
    with bind("127.0.0.1", 0) as bound:
        serving = asyncio.create_task(serve(app, "127.0.0.1", bound))
        try:
            while "mock" not in capfd.readouterr().out:
                assert not serving.done()
                await asyncio.sleep(0.01)
            assert gc.get_freeze_count() > 10_000
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(serving, 30)
        finally:
            gc.unfreeze()


def test_bound_port_refuses_connections_until_it_listens() -> None:
    with bind("127.0.0.1", 0) as bound, socket.socket() as probe:
        assert probe.connect_ex(bound.getsockname()) != 0
    with pytest.raises(StartError, match="cannot listen on no\\.such\\.host"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80")],
)
def test_greeting_is_a_line_for_a_shell(host: str, address: str) -> None:
    words = shlex.split(greeting(host, 80, "it's").splitlines()[2])
    assert words[2] == f"{address}/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "it's"
