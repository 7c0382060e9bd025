"""The thread of an engine: asked to end by `close`, or ended by a fault, which is kept and told to whoever waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from relax.engines.base import EngineError

logger = logging.getLogger(__name__)


class EngineThread:
    """`body` runs until `closing`, waiting on `wake`; `ended` then answers with its error all that is left.

    `wake` guards `closing` and `failure` and may guard the engine's own state (it is re-entrant).
    """

    def __init__(self, name: str, body: Callable[[], None], ended: Callable[[EngineError], None]) -> None:
        self.wake = threading.Condition(threading.RLock())
        self.closing = False
        self.failure: str | None = None
        """Text of the exception that ended the thread."""
        self._body, self._ended = body, ended
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Stop the thread; what is left ends with an error. Raises `EngineError` past the deadline."""
        with self.wake:
            self.closing = True
            self.wake.notify()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                raise EngineError(f"the engine's thread {self._thread.name} did not end within {deadline_s} s")

    def healthy(self) -> bool:
        return not self.closing and self._thread.is_alive()

    def check_running(self) -> None:
        """Raises `EngineError` if the thread ends or has ended; call it with `wake` held."""
        if self.closing:
            raise self._error()

    def _error(self) -> EngineError:
        return EngineError("the engine was closed" if self.failure is None else f"the engine failed: {self.failure}")

    def _run(self) -> None:
        try:
            self._body()
        except Exception as error:  # the thread's supervisor boundary: recorded and reported
            logger.exception("%s failed", self._thread.name)
            with self.wake:
                self.failure = f"{type(error).__name__}: {error}"
                self.closing = True
        self._ended(self._error())
