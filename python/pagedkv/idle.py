"""What is done for an engine while nobody asks anything of it.

The thread of `AsyncLLM` waits for requests and does this in between. `LLM` has no thread that waits, so it
lends one out between its calls.
"""

import weakref
from threading import Event, Thread, main_thread

from pagedkv.engine import Engine


class IdleThread:
    """Has an engine use its idle time, in a thread that ends when there is nothing left to do.

    It keeps no engine alive that nobody else wants. One thread at a time may resume and pause it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._paused = Event()
        self._thread: Thread | None = None

    def resume(self) -> None:
        """Goes on. From now on, until `pause` has returned, the engine must not be stepped."""
        # Each thread has an event of its own, so that none that starts late goes on for another.
        self._paused = Event()
        # Not a daemon: a thread that the interpreter cuts off inside a library aborts the process.
        self._thread = Thread(target=self._run, args=(self._paused,), name="pagedkv-idle")
        try:
            self._thread.start()
        except RuntimeError:
            # The system has no thread to give, or the interpreter is about to exit.
            self._thread = None

    def pause(self) -> None:
        """Waits until what is being done is done, at most some milliseconds."""
        self._paused.set()
        # One that an interrupt kept from starting has nothing to wait for.
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._thread = None

    def _run(self, paused: Event) -> None:
        # At exit the interpreter waits for this thread, after the main one has ended.
        while not paused.is_set() and main_thread().is_alive():
            engine = self._engine()
            if engine is None or not engine.use_idle_time():
                return
            del engine
