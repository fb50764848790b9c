"""SIGTERM and Ctrl-C: finish the update, save, leave. A second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopSignals:
    """Inside this context, SIGTERM and SIGINT only leave a note here."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # signals are the main thread's
            for each in (signal.SIGTERM, signal.SIGINT):
                self._before[each] = signal.signal(each, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
