"""The command line of the server: loads a model, serves it until Ctrl-C or SIGTERM, says how to talk to it.

`__main__` calls `run`, and answers the signals that come before the server does.
"""

import argparse
import asyncio
import contextlib
import errno
import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import web

from pagedkv import config as engine_config
from pagedkv.config import EngineConfig
from pagedkv.errors import PagedKVError
from pagedkv.serve.app import build_app
from pagedkv.serve.served import SERVED, ServeOptions

if TYPE_CHECKING:
    from pagedkv.async_llm import AsyncLLM

# How long running requests may go on after the signal to stop, before they end with an error. A second signal
# ends them at once.
GRACE_S = 5.0
# How long a client then has to read that error.
_LAST_WORDS_S = 1.0
_DRAIN_LOOK_S = 0.05
_BACKLOG = 1024
_MAX_PORT = 65535


class StartError(Exception):
    """The server cannot start; the message is the one line that the user sees."""


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port, allowed: 0 to {_MAX_PORT} (0: any free one)")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line: the engine's options, as `EngineConfig` documents them, and the server's own."""
    result = argparse.ArgumentParser(
        prog="python -m pagedkv.serve", description="Serves a model with OpenAI's API from a paged KV cache."
    )
    engine_config.add_cli_options(result)
    group = result.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=_port, default=8000, metavar="N", help="port to listen on (default: 8000)"
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may use for the model (default: the model's own)",
    )
    group.add_argument(
        "--strict", action="store_true", help="refuse unknown request fields instead of ignoring them"
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help="ask for one of these keys on /v1/* (default: no key); where there are several, clients with "
        "different keys share nothing in the cache",
    )
    return result


class ApiKeys(NamedTuple):
    """The keys that are accepted, whether they tell tenants apart, and which of them named tenants have."""

    accepted: tuple[str, ...]
    are_tenants: bool
    of_tenants: frozenset[str]


def api_keys(given: Sequence[str], config: EngineConfig) -> ApiKeys:
    """The keys on the command line and those of the tenants.

    A single key does not tell tenants apart: everybody has it. Raises ValueError for a tenant that nobody
    could be: where keys tell tenants apart, no request comes with a salt alone.
    """
    of_tenants = [tenant.api_key for tenant in config.named_tenants if tenant.api_key is not None]
    keys = tuple(dict.fromkeys([*given, *of_tenants]))
    are_tenants = len(keys) > 1 or bool(of_tenants)
    unreachable = [tenant.name for tenant in config.named_tenants if tenant.cache_salt is not None]
    if are_tenants and unreachable:
        raise ValueError(
            f"tenants: {unreachable[0]!r} has a cache_salt, allowed: an api_key for every tenant where API "
            "keys tell tenants apart"
        )
    return ApiKeys(keys, are_tenants, frozenset(of_tenants))


def bind(host: str, port: int) -> socket.socket:
    """A socket that owns the address but does not listen yet. Raises StartError if the address cannot be had.

    It is taken before the model is loaded, so that a port in use shows at once, and listens only
    afterwards, so that nobody connects to a server that cannot answer.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StartError(f"cannot listen on {host}: {error.strerror or error}") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"port {port} on {host} is in use; choose another one with --port") from error
        raise StartError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return bound


def greeting(host: str, port: int, model_name: str) -> str:
    """What is printed when the server is ready: where it is, and a command that talks to it."""
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1" if host != "::" else "::1"
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    # Greedy, so that the first answer that a newcomer sees is the model's best one, and short.
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model_name, "messages": question, "temperature": 0, "stream": True})
    # In a shell's single quotes only the quote itself needs care.
    body = body.replace("'", "'\\''")
    return (
        f"Serving {model_name} at {url}\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
        "Ctrl-C stops the server."
    )


def load_engine(config: EngineConfig) -> "AsyncLLM":
    """The running engine. Raises StartError with one line that says what is wrong."""
    try:
        # This brings torch in, which takes seconds; mistakes on the command line have shown by now.
        from pagedkv.async_llm import AsyncLLM

        return AsyncLLM.from_config(config)
    except (PagedKVError, ValueError) as error:
        raise StartError(str(error)) from error
    except ImportError as error:
        if error.name != "pagedkv._core":
            raise
        message = "the extension pagedkv._core is not built; run `make build`, or `maturin develop --release`"
        raise StartError(message) from error


async def serve(app: web.Application, host: str, bound: socket.socket) -> None:
    """Serves until a signal comes; the application shuts its engine down. Raises StartError."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_LAST_WORDS_S, access_log=None)
    port = bound.getsockname()[1]
    with _heard(signals):
        await runner.setup()
        try:
            site = web.SockSite(runner, bound, backlog=_BACKLOG)
            try:
                await site.start()
            except OSError as error:
                raise StartError(
                    f"cannot listen on {host}, port {port}: {error.strerror or error}"
                ) from error
            # What lives now lives as long as the server. A collection that passed through it, 200,000 objects
            # of torch's and ours, would hold the GIL for 45 ms, and all streams with it.
            gc.freeze()
            print(greeting(host, port, app[SERVED].options.model_names[0]), flush=True)
            await signals.get()
            print("Stopping.", flush=True)
            await site.stop()
            await _drain(app[SERVED].engine, signals)
        finally:
            await runner.cleanup()


@contextlib.contextmanager
def _heard(signals: asyncio.Queue[int]) -> Iterator[None]:
    """Puts the signals to stop into a queue instead of what answered them before."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _drain(engine: "AsyncLLM", signals: asyncio.Queue[int]) -> None:
    """Waits until nothing is in flight any more, for a while, or until the next signal."""
    deadline = asyncio.get_running_loop().time() + GRACE_S
    while engine.num_in_flight and signals.empty() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_DRAIN_LOOK_S)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the server. Returns the exit code: 0 after a signal to stop, 1 if it cannot start."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = engine_config.from_cli(options)
        keys = api_keys(options.api_key or [], config)
    except ValueError as error:
        command_line.error(str(error))
    try:
        with contextlib.closing(bind(options.host, options.port)) as bound:
            engine = load_engine(config)
            names = tuple(options.served_model_name or [engine.model_name])
            root = config.model or engine.model_name
            serve_options = ServeOptions(
                names, root, options.strict, keys.accepted, keys.are_tenants, keys.of_tenants
            )
            asyncio.run(serve(build_app(engine, serve_options), options.host, bound))
    except StartError as error:
        print(f"pagedkv: {error}", file=sys.stderr)
        return 1
    return 0
