"""Parts of a row, and the fields that rows of several kinds share.

Every kind of row is a class in `trainstep.rows`. Its fields are the case (what was run, made with
`setting()`: the fields by which rows of two files are matched) and the values (what was measured, with the unit at the
end of the name). Beside them every row has samples, the environment, and a status with a reason, so that a failure is a
row like any other.

On disk a row is one JSON object with a section for each of these (case, values, samples, series, environment). A field
that is None is not written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, dataclass_transform

from trainstep.base.stats import Summary

Entry = str | int | float | bool | None
Scalar = Entry | tuple[str | int | float, ...]
"""Value of a row's column: a number, a word, or several of them."""
if TYPE_CHECKING:
    Sample = float
else:
    Sample = float | None  # as msgspec reads it: a file has null for a number that is not finite
Status = Literal["ok", "out of memory", "unsupported", "wrong", "failed"]


def setting(default: Any = MISSING) -> Any:
    """A field that belongs to the case of a row; without a default it must be given."""
    return field(default=default, metadata={"section": "case"})


def further(section: str) -> Any:
    """A field that is a mapping of further columns of "case" or "values", whose names are not known beforehand."""
    return field(default_factory=dict, metadata={"section": section, "open": True})


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of one phase: the median with its 95 % interval (None below 6 samples), and how they spread."""

    median: float
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    outliers: int | None = None

    @staticmethod
    def of(summary: Summary, *, spread: bool = True) -> Times:
        """The summary of milliseconds; without `spread` the median and its interval alone."""
        low, high = (summary.interval.low, summary.interval.high) if summary.interval else (None, None)
        if not spread:
            return Times(summary.median, low, high)
        std = None if math.isnan(summary.std) else summary.std
        return Times(summary.median, low, high, summary.mean, std, summary.min, summary.max, summary.outliers)


_TIME_COLUMNS = {part: f"{part}_ms" for part in ("low", "high", "mean", "std", "min", "max")}
_TIME_COLUMNS |= {"outliers": "outliers", "median": "ms"}
"""Field of `Times` → the ending of its column; the shortest ending last."""


def times() -> Any:
    """A field that maps phases to `Times`; each is a set of columns `PHASE_ms`, `PHASE_low_ms` … of the row."""
    return field(default_factory=dict, metadata={"section": "values", "times": True})


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Row:
    """Fields of rows of every kind; a class derived from it is a frozen dataclass without saying so."""

    kind: ClassVar[str]  # its name in files, `class StepRow(Row, kind="step")`

    # The single measurements behind the values, in the order they were taken.
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict, metadata={"section": "samples"})
    status: Status = field(default="ok", metadata={"section": ""})  # whether the case ran, and if not, why not
    reason: str = field(default="", metadata={"section": ""})  # one line, empty where the status is ok
    # Machine, versions, commit, date.
    environment: Mapping[str, Scalar] = field(default_factory=dict, metadata={"section": "environment"})
    series: Mapping[str, Sequence[Entry]] = field(default_factory=dict, metadata={"section": "series"})
    """Columns too long for values of their own, such as a timeline's events; which belong together, the kind says."""

    def __init_subclass__(cls, kind: str | None = None) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        if kind is not None:
            cls.kind = kind

    @cached_property
    def case(self) -> Mapping[str, Scalar]:
        """The settings by name, those that are None left out."""
        return self._columns("case")

    @cached_property
    def values(self) -> Mapping[str, Scalar]:
        """Measured values by name, with a column for every part of `Times`; None is left out."""
        return self._columns("values")

    def _columns(self, section: str) -> Mapping[str, Scalar]:
        found: dict[str, Scalar] = {}
        for name, form in _fields(type(self))[section]:  # type: ignore[arg-type]  # classes are hashable
            value = getattr(self, name)
            if form == "times":
                value = {
                    f"{phase}_{end}": getattr(parts, part)
                    for phase, parts in value.items()
                    for part, end in _TIME_COLUMNS.items()
                }
            if form:
                found |= {column: each for column, each in value.items() if each is not None}
            elif value is not None:
                found[name] = value
        return found


AnyRow = TypeVar("AnyRow", bound=Row)


@cache
def _fields(kind: type[Row]) -> dict[str, list[tuple[str, str]]]:
    """Map each section of a kind to its fields in order, each with its form: "times", "open", or empty."""
    found: dict[str, list[tuple[str, str]]] = {"case": [], "values": []}
    for each in dataclasses.fields(kind):
        form = next((form for form in ("open", "times") if form in each.metadata), "")
        found.setdefault(each.metadata.get("section", "values"), []).append((each.name, form))
    return found


def make_row(kind: type[AnyRow], case: Mapping[str, Any], values: Mapping[str, Any], **rest: Any) -> AnyRow:
    """Make a row of this kind from its columns, whose types the caller answers for.

    Args:
        kind: a class of `trainstep.rows`.
        case, values: columns by name; `Times` as `PHASE_ms`, `PHASE_low_ms` …
        rest: samples, series, environment, status, reason.

    Raises:
        ValueError: a column that the kind does not have.
    """
    return kind(**_by_field(kind, case, values, lambda parts: Times(**parts)), **rest)


def decode_row(kind: type[AnyRow], case: Mapping[str, Any], values: Mapping[str, Any], **rest: Any) -> AnyRow:
    """Make a row of columns that a file has, where msgspec checks every value against its field's type.

    Raises:
        ValueError: a column that the kind does not have, one that is missing, or a value of another type.
    """
    import msgspec

    found = _by_field(kind, case, values, lambda parts: parts) | rest
    try:
        row = msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        expected, _, path = str(error).partition(" - at `$.")
        name = path.partition("[")[0].rstrip("`")
        if not name:
            raise ValueError(f"a row of kind {kind.kind!r}: {expected}") from error
        value, where = found[name], name
        if isinstance(value, Mapping):  # msgspec's path has no key of a mapping
            for key, item in value.items():
                try:
                    msgspec.convert({**found, name: {key: item}}, kind)
                except msgspec.ValidationError:
                    value, where = item, f"{key} among its {name}"
                    break
        raise ValueError(f"{where} is {_shown(value)}: {expected}") from error
    for name, value in found.items():
        if type(value) is int:  # msgspec makes a float of it for a float's field, and tables show 4 as 4.00
            object.__setattr__(row, name, value)
    if not {list, type(None)}.isdisjoint(map(type, case.values())):
        known = ((name, each) for name, each in case.items() if each is not None)
        case = {name: tuple(each) if type(each) is list else each for name, each in known}
    object.__setattr__(row, "case", case)  # as it is, rather than made of the fields again
    return row


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _by_field(
    kind: type[Row], case: Mapping[str, Any], values: Mapping[str, Any], make: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """Sort columns to the kind's fields; `make` takes the parts of one phase's `Times`."""
    found: dict[str, Any] = {}
    for section, columns in (("case", case), ("values", values)):
        places = _places(kind, section, tuple(columns))  # type: ignore[arg-type]  # classes are hashable
        found |= columns if len(places.plain) == len(columns) else {name: columns[name] for name in places.plain}
        if places.further:
            found[places.open] = {name: columns[name] for name in places.further}
        if places.phases:
            found[places.times] = {
                phase: make({part: columns[name] for part, name in parts.items()})
                for phase, parts in places.phases.items()
                if columns[parts["median"]] is not None
            }
    return found


@dataclass(frozen=True)
class _Places:
    """Places of a section's columns: rows of one command have the same columns, so they are looked up once."""

    times: str  # the field of `Times`, empty where there is none
    open: str  # the field of further columns
    plain: list[str] = field(default_factory=list)  # columns that are fields
    further: list[str] = field(default_factory=list)  # columns that the open field takes in
    phases: dict[str, dict[str, str]] = field(default_factory=dict)  # phase → field of `Times` → its column


@lru_cache(4096)
def _places(kind: type[Row], section: str, names: tuple[str, ...]) -> _Places:
    fields = _fields(kind)[section]  # type: ignore[arg-type]  # classes are hashable
    forms = {form: name for name, form in fields}
    found = _Places(forms.get("times", ""), forms.get("open", ""))
    plain = {name for name, form in fields if not form}
    for name in names:
        phase, part = _part_of_times(name)
        if name in plain:
            found.plain.append(name)
        elif found.times and f"{phase}_ms" in names and f"{phase}_ms" not in plain:
            found.phases.setdefault(phase, {})[part] = name
        elif found.open:
            found.further.append(name)
        else:
            raise ValueError(f"a row of kind {kind.kind!r} has no {name!r} among its {section}")
    return found


def _part_of_times(name: str) -> tuple[str, str]:
    """Split a column such as `forward_low_ms` into its phase and the field of `Times`; both empty for others."""
    for part, end in _TIME_COLUMNS.items():
        if name.endswith(f"_{end}"):
            return name.removesuffix(f"_{end}"), part
    return "", ""


class Timed(Row):
    """A row that has times, those of the whole step as "step"."""

    times: Mapping[str, Times] = times()
    n: int | None = None  # how many steps, calls or updates were timed

    @property
    def step_ms(self) -> float | None:
        """The median of the whole step."""
        return self.times["step"].median if "step" in self.times else None


class StepSettings(Row):
    """Settings of a training step: fields of `StepConfig`, those that a user's workload fixes left None."""

    workload: str | None = setting(None)
    batch: int | None = setting(None)
    context: int | None = setting(None)
    precision: str | None = setting(None)
    compile: str | None = setting(None)
    graph: str | None = setting(None)  # None where there is none
    attention: str | None = setting(None)
    loss: str | None = setting(None)
    fused: str | None = setting(None)  # None where nothing is
    checkpointing: str | None = setting(None)
    optimizer: str | None = setting(None)
    seed: int | None = setting(None)


class GpuState(Row):
    """The GPU right after the last timed step; None on a CPU."""

    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled_by: str | None = None


class Speedup(Row):
    """Speed of one over that of another, with the 95 % interval."""

    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None


class GradientErrors(Row):
    """Errors of a step's gradients, relative to those of the step that it is checked against."""

    gradient_error: float | None = None  # over all parameters, in the step's precision
    worst_gradient_error: float | None = None  # where most of what is allowed is used: a parameter, or a row of one
    worst_allowed: float | None = None
    worst_parameter: str | None = None
    float32_error: float | None = None  # over all parameters, the same step in float32
    float32_allowed: float | None = None


class PredictedPeak(Row):
    """The most memory of a step, predicted and measured."""

    peak_gib: float | None = None
    predicted_gib: float | None = None
    prediction_error: float | None = None  # predicted / measured − 1


class Rates(Row):
    """Work of kernels and its rates, where it could be counted."""

    tflop: float | None = None
    gb: float | None = None
    tflops: float | None = None
    gb_s: float | None = None
    flop_per_byte: float | None = None


class Peaks(Row):
    """The most memory of a step, of each phase, and what is there before it."""

    at_rest_gib: float | None = None
    peak_gib: float | None = None
    forward_peak_gib: float | None = None
    loss_peak_gib: float | None = None
    backward_peak_gib: float | None = None
    optimizer_peak_gib: float | None = None
    cache_gib: float | None = None  # of a key-value cache that forward returned, which training does not use
    uncompiled: bool | None = None
    """True if code that the workload compiles by itself ran eagerly for these figures, as on a CPU."""
