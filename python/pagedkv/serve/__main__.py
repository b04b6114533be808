"""`python -m pagedkv.serve`: the first lines that run, so that a signal is answered from the start.

The server itself is `command`. Its imports and the model take seconds, in which Python would answer Ctrl-C
by a trace of whatever it was doing, and SIGTERM not at all where it is the first process of a container.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

STDERR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server. Returns the exit code: 0 after a signal to stop, 1 if it cannot start.

    A signal before the server takes requests, or after its engine has ended, ends the process at once.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from pagedkv.serve.command import run

    return run(arguments)


def _end(number: int, _frame: FrameType | None) -> None:
    # There is nothing that would have to be brought to an end. An exception instead could be swallowed by
    # whatever code it lands in, and a print could land within another print.
    line = f"pagedkv: stopped by {signal.Signals(number).name}\n"
    try:
        os.write(STDERR, ("\n" + line if os.isatty(STDERR) else line).encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
