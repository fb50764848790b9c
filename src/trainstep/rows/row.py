"""What a row is made of, and the fields that rows of several kinds share.

Every kind of row is a class in `trainstep.rows`. Its fields are the case (what was run, made with
`setting()`: the fields by which rows of two files are matched) and the values (what was measured, with the unit at the
end of the name). Beside them every row has samples, the environment, and a status with a reason, so that a failure is a
row like any other.

On disk a row is one JSON object with a section for each of these (case, values, samples, series, environment). A field
that is None is not written.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cache, cached_property, lru_cache
from types import NoneType
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from trainstep.base.stats import Summary

Scalar = str | int | float | bool | None | tuple[str, ...]
"""What a column of a row holds: a number, a word, or several words."""
Status = Literal["ok", "out of memory", "unsupported", "wrong", "failed"]


def setting(default: Any = MISSING) -> Any:
    """A field that belongs to the case of a row; without a default it must be given."""
    return field(default=default, metadata={"section": "case"})


def further(section: str) -> Any:
    """A field that is a mapping of further columns of "case" or "values", whose names are not known beforehand."""
    return field(default_factory=dict, metadata={"section": section, "open": True})


@dataclass(frozen=True)
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
    """What rows of every kind have; a class derived from it is a frozen dataclass without saying so."""

    kind: ClassVar[str]  # its name in files, `class StepRow(Row, kind="step")`

    # The single measurements behind the values, in the order they were taken.
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict, metadata={"section": "samples"})
    status: Status = field(default="ok", metadata={"section": ""})  # whether the case ran, and if not, why not
    reason: str = field(default="", metadata={"section": ""})  # one line, empty where the status is ok
    # Machine, versions, commit, date.
    environment: Mapping[str, Scalar] = field(default_factory=dict, metadata={"section": "environment"})
    series: Mapping[str, Sequence[Scalar]] = field(default_factory=dict, metadata={"section": "series"})
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
        """What was measured by name, with a column for every part of `Times`; what is None is left out."""
        return self._columns("values")

    def _columns(self, section: str) -> Mapping[str, Scalar]:
        found: dict[str, Scalar] = {}
        for name, form in _fields(type(self))[section]:  # type: ignore[arg-type]  # classes are hashable
            value = getattr(self, name)
            if form == "times":
                columns = itertools.product(value, _TIME_COLUMNS.items())
                found |= {f"{phase}_{end}": getattr(value[phase], part) for phase, (part, end) in columns}
            elif form == "open":
                found |= value
            else:
                found[name] = value
        return {name: value for name, value in found.items() if value is not None}


AnyRow = TypeVar("AnyRow", bound=Row)
_COMMON = frozenset(each.name for each in dataclasses.fields(Row))
"""What rows of every kind have beside case and values."""


@cache
def _fields(kind: type[Row]) -> dict[str, list[tuple[str, str]]]:
    """Of a kind: section → its fields in order, each with its form: "times", "open", or empty for a plain one."""
    found: dict[str, list[tuple[str, str]]] = {"case": [], "values": []}
    for each in dataclasses.fields(kind):
        form = next((form for form in sorted(_SPREAD) if form in each.metadata), "")
        found.setdefault(each.metadata.get("section", "values"), []).append((each.name, form))
    return found


@cache
def _required(kind: type[Row]) -> list[str]:
    """The fields that a row cannot do without."""
    return [each.name for each in dataclasses.fields(kind) if each.default is each.default_factory is MISSING]


@cache
def _factories(kind: type[Row]) -> list[tuple[str, Callable[[], Any]]]:
    """The fields whose default is made anew for each row."""
    made = [(each.name, each.default_factory) for each in dataclasses.fields(kind)]
    return [(name, make) for name, make in made if make is not MISSING]


@cache
def _layout(kind: type[Row]) -> tuple[dict[str, str], str | None, dict[str, str]]:
    """Of a kind: the section of each plain field, the field that holds `Times`, and by section the open one."""
    fields = dataclasses.fields(kind)
    plain = {each.name: each.metadata.get("section", "values") for each in fields if not each.metadata.keys() & _SPREAD}
    times_field = next((each.name for each in fields if "times" in each.metadata), None)
    return plain, times_field, {each.metadata["section"]: each.name for each in fields if "open" in each.metadata}


_SPREAD = {"times", "open"}


def make_row(kind: type[AnyRow], case: Mapping[str, Any], values: Mapping[str, Any], **rest: Any) -> AnyRow:
    """A row of this kind from its columns, as a file has them.

    Args:
        kind: a class of `trainstep.rows`.
        case, values: columns by name; `Times` as `PHASE_ms`, `PHASE_low_ms` …
        rest: samples, series, environment, status, reason.

    Raises:
        ValueError: a column that the kind does not have, or one that is missing.
    """
    found: dict[str, Any] = {name: make() for name, make in _factories(kind)} | rest  # type: ignore[arg-type]
    for section, columns in (("case", case), ("values", values)):
        places = _places(kind, section, tuple(columns))  # type: ignore[arg-type]  # classes are hashable
        for name in places.plain:
            value = columns[name]
            found[name] = tuple(value) if type(value) is list else value
        for field_name, names in places.open.items():
            found[field_name] = {name: columns[name] for name in names}
        for field_name, phases in places.times.items():
            parts = [(phase, map(columns.get, every)) for phase, every in phases if columns[every[0]] is not None]
            found[field_name] = {phase: Times(*each) for phase, each in parts}  # type: ignore[arg-type]
    for name in _required(kind):  # type: ignore[arg-type]
        if name not in found:
            raise ValueError(f"a row of kind {kind.kind!r} lacks {name!r} in its case")
    if unknown := rest.keys() - _COMMON:
        raise TypeError(f"a row has no {min(unknown)!r}; expected some of {', '.join(sorted(_COMMON))}")
    row = object.__new__(kind)  # what is left has its default in the class; `__init__` would take most of the time
    row.__dict__.update(found)
    return row


@dataclass(frozen=True)
class _Places:
    """Where the columns of a section go: rows of one command have the same columns, so it is looked up once."""

    plain: Sequence[str]
    """Columns that are fields."""
    open: Mapping[str, Sequence[str]]
    """Field → the columns it takes in."""
    times: Mapping[str, Sequence[tuple[str, Sequence[str]]]]
    """Field → each phase with its columns in the order of `Times`; only the first, the median, is there for certain."""


@lru_cache(4096)
def _places(kind: type[Row], section: str, names: tuple[str, ...]) -> _Places:
    plain, times_field, open_fields = _layout(kind)  # type: ignore[arg-type]  # classes are hashable
    own, further, phases = list[str](), list[str](), list[tuple[str, Sequence[str]]]()
    for name in names:
        part = _part_of_times(name) if times_field is not None and section == "values" else None
        if plain.get(name) == section:
            own.append(name)
        elif part is not None and f"{part[0]}_ms" in names:
            if part[1] == "median":
                columns = [f"{part[0]}_{_TIME_COLUMNS[each.name]}" for each in dataclasses.fields(Times)]
                phases.append((part[0], columns))
        elif section in open_fields:
            further.append(name)
        else:
            raise ValueError(f"a row of kind {kind.kind!r} has no {name!r} among its {section}")
    opened = {open_fields[section]: further} if section in open_fields else {}
    return _Places(own, opened, {times_field: phases} if times_field is not None and section == "values" else {})


_LARGEST = 2**64  # of a whole number: no size, count or address is larger


def check_columns(
    columns: Mapping[str, Any], samples: Mapping[str, Any], series: Mapping[str, Any], environment: Mapping[str, Any]
) -> None:
    """Raise `ValueError` unless these are values as rows have them: finite numbers, words, and lists of either."""
    if not _are_all(columns.values(), _is_scalar):
        for name, value in columns.items():
            is_list = isinstance(value, (list, tuple)) and all(map(_is_scalar, value))
            if not _is_scalar(value) and not is_list:
                raise ValueError(f"{name} is {_shown(value)}, which is no finite number and no text")
    if not _are_all(environment.values(), _is_scalar):
        name, value = next((name, value) for name, value in environment.items() if not _is_scalar(value))
        raise ValueError(f"in the environment {name} is {_shown(value)}, which is no finite number and no text")
    for name, column in samples.items():
        if not isinstance(column, (list, tuple)) or not _are_all(column, _is_number):
            raise ValueError(f"the samples of {name} are no list of finite numbers")
    for name, column in series.items():
        if not isinstance(column, (list, tuple)) or not _are_all(column, _is_scalar):
            raise ValueError(f"the series {name} is no list of finite numbers and texts")


def _are_all(values: Collection[object], is_one: Callable[[object], bool]) -> bool:
    """Whether `is_one`, `_is_number` or `_is_scalar`, is true of all; looked at by type, as a finite sum has finite
    terms."""
    kinds = set(map(type, values))
    if not kinds <= _SCALARS or (not kinds.isdisjoint(_NO_NUMBERS) and is_one is _is_number):
        return all(map(is_one, values))
    floats: list[Any] = [value for value in values if type(value) is float] if float in kinds else []
    whole: list[Any] = [value for value in values if type(value) is int] if int in kinds else []
    fits = not whole or (min(whole) > -_LARGEST and max(whole) < _LARGEST)
    return fits and (math.isfinite(sum(floats)) or all(map(math.isfinite, floats)))


_SCALARS = frozenset([str, bool, NoneType, float, int])
_NO_NUMBERS = frozenset([str, bool])


def _is_number(value: object) -> bool:
    """A number, which true and false are not; None stands for one that is not finite."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)  # type: ignore[arg-type]
    if kind is int:
        return -_LARGEST < value < _LARGEST  # type: ignore[operator]
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _is_scalar(value: object) -> bool:
    return type(value) is str or _is_number(value) or isinstance(value, (str, bool))


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < _LARGEST else "a whole number of over 64 bits"
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_types(kind: type[Row], case: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise `ValueError` where a column is not of its field's type; `check_columns` has passed."""
    for section, columns in (("case", case), ("values", values)):
        expected = _expected(kind, section, tuple(columns))  # type: ignore[arg-type]  # classes are hashable
        if not all(map(isinstance, columns.values(), expected)):
            (name, value), allowed = next(
                each for each in zip(columns.items(), expected, strict=True) if not isinstance(each[0][1], each[1])
            )
            names = " or ".join(dict.fromkeys(_TYPE_NAMES[each] for each in allowed if each in _TYPE_NAMES))
            raise ValueError(f"{name} is {_shown(value)}, expected {names}")


@lru_cache(4096)
def _expected(kind: type[Row], section: str, names: tuple[str, ...]) -> list[tuple[type, ...]]:
    """The types that each of a section's columns may have; any, of columns that are no field."""
    types = _types(kind)  # type: ignore[arg-type]  # classes are hashable
    has_times = section == "values" and _layout(kind)[1] is not None  # type: ignore[arg-type]
    return [
        (*found, NoneType)
        if (found := types.get(name) or (_NUMBERS if has_times and _part_of_times(name) is not None else ()))
        else (object,)
        for name in names
    ]


_NUMBERS: tuple[type, ...] = (float, int)
_TYPE_NAMES: Mapping[type, str] = {
    **dict.fromkeys((float, int), "a number"),
    **dict.fromkeys((list, tuple), "a list"),
    str: "a text",
    bool: "true or false",
}


@cache
def _types(kind: type[Row]) -> dict[str, tuple[type, ...]]:
    """Of a kind: the types that JSON may give each plain field."""
    hints = get_type_hints(kind)
    found = {}
    for name in _layout(kind)[0]:  # type: ignore[arg-type]
        allowed: list[type] = []
        for each in get_args(hints[name]) or (hints[name],):
            origin = get_origin(each) or each
            if origin is float:
                allowed += _NUMBERS
            elif origin is tuple:
                allowed += (list, tuple)
            elif origin in (int, str, bool):
                allowed.append(origin)
        if allowed:
            found[name] = tuple(allowed)
    return found


@lru_cache(4096)
def _part_of_times(name: str) -> tuple[str, str] | None:
    """The phase and the field of `Times` of a column such as `forward_low_ms`."""
    found = ((name.removesuffix(f"_{end}"), part) for part, end in _TIME_COLUMNS.items() if name.endswith(f"_{end}"))
    return next(found, None)


class Timed(Row):
    """A row that has times, those of the whole step as "step"."""

    times: Mapping[str, Times] = times()
    n: int | None = None  # how many steps, calls or updates were timed

    @property
    def step_ms(self) -> float | None:
        """The median of the whole step."""
        return self.times["step"].median if "step" in self.times else None


class StepSettings(Row):
    """How a training step was taken: fields of `StepConfig`, those that a user's workload fixes left None."""

    workload: str | None = setting(None)
    batch: int | None = setting(None)
    context: int | None = setting(None)
    precision: str | None = setting(None)
    compile: str | None = setting(None)
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


class Rates(Row):
    """What kernels computed and moved, and how fast, where it could be counted."""

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
    """Whether code that the workload compiles by itself ran eagerly for these figures, as on a CPU."""
