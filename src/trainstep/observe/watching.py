"""A user's own training loop watched from inside: the hooks, rows and report of `trainstep run`, in this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from trainstep.base.errors import UsageError
from trainstep.base.files import cannot_write
from trainstep.base.guards import launch_folder
from trainstep.observe.log import LogWriter, log_path, read_logs
from trainstep.observe.rows import kernel_records, script_records
from trainstep.observe.supervise import Rank
from trainstep.report.page import Report
from trainstep.rows.records import Row, write_whole

OUT = Path("results/watch")


class Watch:
    """Measures the training steps taken inside `with watch(): …`; afterwards the first rank has a report.

    Args:
        out: folder for results.jsonl, report.html, tables/, the ranks' logs and the profiler's trace.
        name: what the report calls the loop; by default the script's file name.
        profiled_steps: steps whose kernels the profiler records; 0 for none.
        profile_after: steps before those.
        memory: whether every allocation of one step, and the dtypes of its modules, are recorded.
    """

    def __init__(
        self,
        out: Path | str = OUT,
        *,
        name: str | None = None,
        profiled_steps: int = 2,
        profile_after: int = 30,
        memory: bool = True,
    ) -> None:
        self.out = Path(out)
        self.name = name or Path(sys.argv[0] or "python").name
        self.rows: Sequence[Row] = ()
        """Rows of the measurement; empty until the end, and on other ranks than the first."""
        self._options: dict[str, Any] = {"profiled_steps": profiled_steps, "profile_after": profile_after}
        self._options |= {"is_deep": True, "has_memory": memory}
        self._rank = Rank.of(os.environ)
        self._session: Any = None
        self._held = contextlib.ExitStack()

    @property
    def report(self) -> Report:
        """The report of what was measured."""
        return Report(self.rows)

    def start(self) -> None:
        """Measure from here on.

        Raises:
            UsageError: it measures already, or the folder cannot be written.
        """
        from trainstep.observe.session import Plan, Session

        if self._session is not None:
            raise UsageError("this watch measures already, or has measured; make another one")
        name = None if self.out != OUT else Path(self.name).stem
        launch, rank = self._rank.shared_launch, self._rank.rank
        self.out = self._held.enter_context(launch_folder(self.out, "watch", name, launch=launch, rank=rank))
        self._options["folder"] = str(self.out)
        try:
            log = LogWriter(log_path(self.out, self._rank.rank), self._rank.rank)
        except OSError as error:
            raise cannot_write(self.out, error) from error
        known = {"rank": self._rank.rank, "world_size": self._rank.world_size, "launch": self._rank.launch}
        log.write("header", {"pid": os.getpid(), "script": self.name, **known})
        self._session = Session(Plan(**self._options), log, self.name)
        self._session.start()
        atexit.register(self.stop)  # a loop that is left by an exception, where nobody calls it

    def stop(self, error: BaseException | None = None) -> None:
        """Take the hooks back; on the first rank make the rows and write the report."""
        if self._session is None or self.rows:
            return
        with self._held:
            self._stop(error)

    def _stop(self, error: BaseException | None) -> None:
        atexit.unregister(self.stop)
        self._session.finish()
        log = self._session.log
        if error is None:
            log.write("end", {"how": "returned"})
        else:
            log.write("end", {"how": "raised", "error": type(error).__name__})
        log.close()
        if self._rank.rank != 0:
            return
        logs = read_logs(self.out, self._rank.launch, self._rank.world_size)
        rows = script_records(logs, self.name, None)
        self.rows = [*rows, *kernel_records(logs[0], rows, self.out)]
        write_whole(self.out / "results.jsonl", self.rows)
        self.report.write(self.out)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(error)


def watch(out: Path | str = OUT, **options: Any) -> Watch:
    """`with trainstep.watch() as watch: …` around a training loop; then `watch.report`. Options as `Watch` has them."""
    return Watch(out, **options)


def trainer_callback(out: Path | str = OUT, **options: Any) -> Any:
    """A `transformers.TrainerCallback` that watches `Trainer.train`; its `watch.report` is there when that returns.

    Options as `Watch` has them.
    """
    base: Any = import_module("transformers").TrainerCallback

    class Watching(base):  # type: ignore[misc]
        """Starts where training begins and stops where it ends."""

        def __init__(self) -> None:
            self.watch = Watch(out, **options)

        def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
            self.watch.start()

        def on_train_end(self, *arguments: Any, **keywords: Any) -> None:
            self.watch.stop()

    return Watching()


def lightning_callback(out: Path | str = OUT, **options: Any) -> Any:
    """A Lightning `Callback` that watches `Trainer.fit`; its `watch.report` is there when that returns.

    Options as `Watch` has them.
    """
    base: Any = import_module("lightning.pytorch").Callback

    class Watching(base):  # type: ignore[misc]
        """Starts where training begins and stops where it ends."""

        def __init__(self) -> None:
            self.watch = Watch(out, **options)

        def on_train_start(self, *arguments: Any) -> None:
            self.watch.start()

        def on_train_end(self, *arguments: Any) -> None:
            self.watch.stop()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            self.watch.stop(exception)

    return Watching()
