"""A change that ladders try: one object has everything that is known of it.

A file of `ladder/changes/` has one change or a tight family, and whoever needs changes finds them there: both ladders,
the patch, the report's lines and the list of names. These files import no torch: `--changes` and a script's process
read them before torch is there.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trainstep.base.advice import Line
from trainstep.base.config import StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.precision import PrecisionName

if TYPE_CHECKING:
    from trainstep.ladder.patch import Writer
    from trainstep.ladder.trial.trial import Trial
    from trainstep.step.workload import WorkloadSource

Settings = Mapping[str, Any]
"""Settings as `settings.Settings.found` has them."""
Place = Literal["script", "cuda", "cpu"]
"""The ladder of a script, of a workload's step on a GPU, or of one on a CPU."""
NEEDS_GPU = "it needs a GPU"
LEAST_SHARE, MOST_SHARE = 0.01, 0.99
"""Share of a step that a change's phase takes at least for a try, and that counts at most."""


@dataclass(frozen=True)
class Change:
    """A change of a training step or of a script.

    Args:
        name: unique among all changes.
        line: for the reader's own script.
        expected: a rough gain, as a factor, before anything is measured. Ladders try the largest first; one that is not
            named here does not try the change.
        answers: ids of the report's findings, or of the advice in one, whose action it is.
        step: fields of `StepConfig` and their new values.
        step_if: whether a workload's step can have it, given its first configuration.
        script: makes the change from outside, before the script's code runs. A module's function: the script's process
            imports it.
        why_not: why it does not apply to a script, in words; empty where it may.
        nothing: of a change that notes where it was made, in `Trial.places`: why there is no such place, if there is
            none.
        where: devices that it works on, in a script.
        precision: that it changes to.
        instead_of: changes that it takes the place of, in a script.
        phase: of a script's step, or "launches", beyond whose share it gains nothing; any where it is empty.
        write: how it is written into the user's file; None where no line is certain.
    """

    name: str
    line: Line
    expected: Mapping[Place, float] = field(default_factory=dict)
    answers: tuple[str, ...] = ()
    step: Mapping[str, Any] = field(default_factory=dict)
    step_if: Callable[[WorkloadSource, StepConfig], bool] = lambda source, base: True
    script: Callable[[Trial], object] | None = None
    why_not: Callable[[Settings], str] = lambda settings: ""
    nothing: str = ""
    where: tuple[Literal["cuda", "cpu"], ...] = ("cuda", "cpu")
    precision: PrecisionName | None = None
    instead_of: tuple[str, ...] = ()
    phase: str = ""
    write: Writer | None = None

    @property
    def reference(self) -> str:
        """Name of its function, as a task for the script's process has it."""
        assert self.script is not None, f"{self.name} is no change of a script"
        return f"{self.script.__module__}:{self.script.__qualname__}"

    @property
    def needs_nothing(self) -> bool:
        """True if it may help any script that has not made it: it needs no finding, place or other precision."""
        return bool(self.step) and not (self.nothing or self.precision or "attention" in self.step)

    def gain(self, place: Place, shares: Mapping[str, float]) -> float:
        """The factor to expect: of a change of one phase the most that it can bring, once the phases' shares of a step
        are known. One without a figure comes first. Another precision shortens no wait for launches."""
        share, expected = self._share(shares), self.expected.get(place, math.inf)
        if share is not None:
            return 1 / (1 - min(share, MOST_SHARE))
        idle = min(shares.get("launches", 0.0), MOST_SHARE) if self.precision else 0.0
        return 1 / (idle + (1 - idle) / expected) if idle else expected

    def skipped(self, settings: Settings, *, is_named: bool = False) -> str:
        """Reason why a script's ladder does not try it; empty where it does. One that is named is tried even where its
        phase takes next to nothing."""
        if not settings["on_gpu"] and "cpu" not in self.where:
            return NEEDS_GPU
        return self.why_not(settings) or ("" if is_named else self.why_too_little(settings["shares"]))

    def why_too_little(self, shares: Mapping[str, float]) -> str:
        """Reason why it cannot bring enough to try, by the phases' shares of a step; empty where it may."""
        share = self._share(shares)
        return "" if share is None or share >= LEAST_SHARE else f"its steps spend {share:.1%} on {self.phase}"

    def _share(self, shares: Mapping[str, float]) -> float | None:
        """Share of its phase; None of a change of no phase, and where nothing was measured."""
        return shares.get(self.phase, 0.0) if self.phase and shares else None


def all_changes(place: Place) -> list[Change]:
    """The changes that a ladder tries there, in its order: those that trade something last."""
    from trainstep.ladder import changes

    modules = [
        importlib.import_module(f"{changes.__name__}.{each.name}") for each in pkgutil.iter_modules(changes.__path__)
    ]
    found = {each.name: each for module in modules for each in vars(module).values() if isinstance(each, Change)}
    own = [each for each in found.values() if place in each.expected]
    return sorted(own, key=lambda each: (-each.expected[place], each.name))


def changes_of_step(source: WorkloadSource, device: str, base: StepConfig) -> list[Change]:
    """Changes worth trying on a workload's step.

    They change how the step is computed, not what is: SGD has no fused form here, and AdamW is not one. Weights in bf16
    stay so: other precisions would train a float32 copy.
    """
    place: Place = "cuda" if device == "cuda" else "cpu"
    return [each for each in all_changes(place) if each.step_if(source, base)]


def chosen(changes: Sequence[Change], names: str | None) -> list[Change]:
    """Changes whose names are given, divided by commas, in their own order; all for None.

    Raises:
        UsageError: there is no such change here.
    """
    if names is None:
        return list(changes)
    wanted, known = [name.strip() for name in names.split(",")], [each.name for each in changes]
    if unknown := [name for name in wanted if name not in known]:
        close = difflib.get_close_matches(unknown[0], known, 1)
        meant = f"did you mean {close[0]!r}? Expected" if close else "expected"
        raise UsageError(f"unknown change {unknown[0]!r}; {meant} some of {', '.join(known)}")
    return [each for each in changes if each.name in wanted]


# What several changes ask of a script's settings.
UNCALLED = "no call of a model was seen outside of compiled code"


def operators(settings: Settings, name: str) -> list[str] | None:
    """Operators of the first forward pass that have this in their names; None where some are not known from outside, as
    those of compiled code and of checkpointed blocks."""
    known = settings["operators"]
    return None if known is None else [each for each in known if name in each]


def compiles_all(settings: Settings) -> bool:
    """True if every model is compiled as a whole."""
    return bool(settings["models"]) and all(model["is_whole_compiled"] for model in settings["models"])


def without_blocks(settings: Settings) -> str:
    """Reason why there are no repeated blocks; empty where there are."""
    if not settings["models"]:
        return UNCALLED
    has_blocks = any(model["blocks"] for model in settings["models"])
    return "" if has_blocks else "its models have no repeated blocks in an nn.ModuleList"


def give(kind: Any, more: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Have a constructor take further arguments, in place of those of the same name.

    Args:
        kind: the class.
        more: its arguments by name → those that it is given beside.
    """
    from trainstep.ladder.trial.settings import arguments_of

    original = kind.__init__
    names = list(inspect.signature(kind).parameters)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        changed = more(arguments_of(kind, args, kwargs))
        given = list(args)
        for name, value in changed.items():
            place = names.index(name)
            if place < len(given):
                given[place] = value
            else:
                kwargs[name] = value
        original(self, *given, **kwargs)

    kind.__init__ = __init__
