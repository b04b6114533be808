"""What is done for an engine while nobody asks anything of it.

The thread of `AsyncLLM` waits for requests and does this in between. `LLM` has no thread that waits, so it
lends one out between its calls.
"""

import weakref
from threading import Thread, current_thread

from pagedkv.engine import Engine


class IdleThread:
    """Has an engine use its idle time, in a thread that ends when there is nothing left to do.

    It keeps no engine alive that nobody else wants. One thread at a time may resume and pause it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._thread: Thread | None = None
        self._paused = False
        # Called at exit if the engine lives till then: a thread that the interpreter cuts off inside a
        # library aborts the process.
        self._at_exit = weakref.finalize(engine, self.pause)

    def resume(self) -> None:
        """Goes on. From now on, until `pause` has returned, the engine must not be stepped."""
        if not self._at_exit.alive:
            return
        self._paused = False
        self._thread = Thread(target=self._run, name="pagedkv-idle", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Waits until what is being done is done, at most some milliseconds."""
        self._paused = True
        # It may be the last one that held the engine.
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._paused:
            engine = self._engine()
            if engine is None or not engine.use_idle_time():
                return
            del engine
