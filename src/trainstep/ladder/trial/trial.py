"""A run of a script for the ladder, in the script's process: seeds, changes from outside, and what it is checked by.

Importing this imports no torch: a script may choose its own moment.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import io
import os
import random
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainstep.observe.imports import after_import

WATCHED = 2
"""Updates of each optimizer in which models are looked for, and copies made: they are not timed."""
WATCHING = "watched by the ladder"
PROBABILITIES, INDUCTOR = "probabilities of dropout", "torch._inductor.config"


class Trial:
    """Does what a task asks for.

    Args:
        task: "seed"; "changes" (functions as `module:name`, called with this); "rounding" (a precision and a seed, or
            None); "without_dropout" (whether nothing is dropped, and compiled code draws as eager code does);
            "sources" (path → text that is run in its place); "captured" (the folder for what it is judged by; None
            for a run that is only timed).
        log: of the run.
    """

    def __init__(self, task: Mapping[str, Any], log: Any) -> None:
        self._task, self._log = task, log
        self._capture: Any = None
        self._outermost: Any = None
        self._settings: Any = None
        self._finder: Any = None
        self._hooks: Any = None
        self._entered: Any = None
        self._dropped: dict[float, int] | None = None
        self._updates = 0
        self.on_first_call: list[Callable[[Any], object]] = []
        """Called with each model that is about to be called in training for the first time."""
        self.places: dict[str, dict[str, str]] = {}
        """Change → line of code → how that was changed, of the changes that find their places themselves."""

    def begin(self) -> None:
        """Before the script: seeds, and what replaces its sources."""
        seed = self._task["seed"]
        random.seed(seed)
        after_import("numpy", lambda: sys.modules["numpy"].random.seed(seed))
        if self._task["sources"]:
            read_instead({os.path.realpath(path): text for path, text in self._task["sources"].items()})

    def prepare(self) -> None:
        """Once torch is there: seeds, changes, and what watches; hooks come after this."""
        import torch

        from trainstep.ladder.trial.capture import Capture
        from trainstep.ladder.trial.drawn import draw_by_indices
        from trainstep.ladder.trial.outermost import Outermost
        from trainstep.ladder.trial.settings import Settings

        torch.manual_seed(self._task["seed"])
        draw_by_indices(self._task["seed"], lambda: self._log.write_from_child("facts", {"draws_batches": True}))
        captured = self._task["captured"]
        self._capture = Capture(None if captured is None else Path(captured))
        self._outermost = Outermost(None if captured is None else self._see_call)
        self._settings = Settings()
        self.on_first_call, self._outermost.on_first_over = self._outermost.on_first, self._settings.see_results
        self.on_first_call += [self._see_model, self._settings.see_model]
        if self._task["without_dropout"]:
            from trainstep.check.dropout import without_dropout

            self._entered = without_dropout()
            self._dropped = self._entered.__enter__().elements
            after_import(INDUCTOR, lambda: sys.modules[INDUCTOR].__setattr__("fallback_random", True))
        for reference in self._task["changes"]:
            module, _, name = reference.partition(":")
            getattr(importlib.import_module(module), name)(self)
        if self._task["rounding"]:
            self._round_at_random(*self._task["rounding"])
        self._settings.install()
        self._outermost.install()

    def attach(self, session: Any) -> None:
        """The session's hooks are there."""
        self._finder, self._hooks = session.finder, session.hooks
        self._hooks.before_update = self._update_begins
        self._hooks.on_loss = self._see_loss
        leave = [self.finish, session.on_stop]  # while the frames are there that hold copies of the weights
        session.on_stop = lambda: [each() for each in leave]

    def finish(self) -> None:
        """The script ends."""
        if self._capture is not None and self._finder is not None:
            self._outermost.remove()
            self._settings.remove()
            with self._hooks.aside():
                self._capture.finish(self._finder.ended, self._said())
            self._log.write("facts", {"places": self.places, "judge_s": self._capture.took_s})

    def _said(self) -> dict[str, str]:
        """Describe what would have been dropped, where dropout is off. Compiled code hides how often."""
        if self._dropped is None:
            return {}
        dropped, dynamo = sorted(self._dropped.items()), sys.modules.get("torch._dynamo.utils")
        said = {PROBABILITIES: ", ".join(f"{p:g}" for p, _ in dropped)}
        if dynamo is None or not dynamo.counters["frames"]["ok"]:
            said["elements that dropout has"] = ", ".join(f"{elements:,} for {p:g}" for p, elements in dropped)
        return said

    def _see_model(self, module: Any) -> None:
        with self._hooks.aside():
            self._capture.see_model(module)

    def _see_call(self, module: Any, results: Any) -> None:
        with self._hooks.aside():
            self._capture.shown.see_call(module, results)

    def _see_loss(self, tensors: Any) -> None:
        self._capture.see_loss(tensors)
        if self._updates <= WATCHED * len(self._capture.optimizers):
            self._settings.see_loss(tensors)

    def _update_begins(self, optimizer: Any) -> None:
        with self._hooks.aside():
            number = self._capture.before_optimizer(optimizer)
        if number <= WATCHED:
            self._finder.tag(WATCHING)
        if number == 1:
            found = self._settings.found(self._capture.optimizers)
            self._log.write("facts", {"settings": found | {"draws": self._outermost.draws}})
        self._updates += 1
        if self._updates > WATCHED * len(self._capture.optimizers):
            self._outermost.remove()
            self._settings.remove()

    def _round_at_random(self, precision: Any, seed: int) -> None:
        """From the first call of a model on, as long as the process lives; what is compiled runs as it is written.

        Not in calls without gradients whose outputs are not kept, such as those that generate hundreds of tokens.
        """
        import torch

        from trainstep.check.rounding import RandomRounding

        torch.compiler.set_stance("force_eager")
        rounding = RandomRounding(precision, seed)
        entered: list[bool] = []

        def enter(_: Any) -> None:
            if not entered:
                entered.append(True)
                rounding.__enter__()

        @contextmanager
        def around() -> Iterator[None]:
            rounding.is_off = self._capture.shown.is_full and not torch.is_grad_enabled()
            try:
                yield
            finally:
                rounding.is_off = False

        self.on_first_call.append(enter)
        self._outermost.around = around


def encoded(text: str) -> bytes:
    """A source's bytes in the encoding that it declares."""
    return text.encode(tokenize.detect_encoding(io.BytesIO(text.encode()).readline)[0])


def read_instead(texts: Mapping[str, str]) -> None:
    """Have Python read these texts where it would read files, whose real paths they stand under."""
    compiled = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> Any:  # importing a module
        text = texts.get(os.path.realpath(self.path))
        return compiled(self, fullname) if text is None else compile(text, self.path, "exec", dont_inherit=True)

    def run_file(event: str, arguments: tuple[Any, ...]) -> None:  # the interpreter is about to open the script
        if event == "cpython.run_file" and (text := texts.get(os.path.realpath(arguments[0]))) is not None:
            main = vars(sys.modules["__main__"])
            main.update(__file__=os.path.abspath(arguments[0]), __cached__=None)
            exec(compile(encoded(text), main["__file__"], "exec", dont_inherit=True), main)
            raise SystemExit

    run_file.__cantrace__ = True  # type: ignore[attr-defined]  # else nothing could trace the script
    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    sys.addaudithook(run_file)
