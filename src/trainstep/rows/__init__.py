"""The kinds of rows: a class each, by subject. Adding a kind is one class in a file here.

`rows_of` makes rows from what a file has, those of earlier versions included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from trainstep.rows import kernels, memory, parallel, plan, run, steps
from trainstep.rows.kernels import *
from trainstep.rows.memory import *
from trainstep.rows.parallel import *
from trainstep.rows.plan import *
from trainstep.rows.row import Row, check_columns, check_types, make_row
from trainstep.rows.run import *
from trainstep.rows.steps import *

KINDS: Mapping[str, type[Row]] = {
    kind.kind: kind
    for subject in (run, steps, kernels, memory, parallel, plan)
    for kind in vars(subject).values()
    if isinstance(kind, type) and issubclass(kind, Row) and "kind" in vars(kind)
}
"""Name in files → kind, in the order of the page."""


_GONE = ("rung", "control", "script rung")  # which became "change"


def rows_of(kind: str, case: Mapping[str, Any], values: Mapping[str, Any] | None = None, **rest: Any) -> list[Row]:
    """The row of these columns; columns of earlier versions are renamed first, which may make several rows of one.

    Args:
        kind: name in files.
        case, values: columns by name.
        rest: samples, series, environment, status, reason.

    Raises:
        ValueError: no such kind, columns that it does not have, or values of another type than its fields.
    """
    if kind in _GONE:
        raise ValueError(f"a row of kind {kind!r}, which versions before 2026-11-28 wrote of ladders: climb it again")
    if kind not in KINDS:
        raise ValueError(f"unknown kind of row {kind!r}")
    check_columns(
        {**case, **(values or {})}, **{name: rest.get(name, {}) for name in ("samples", "series", "environment")}
    )
    rows = []
    for columns in migrated(kind, case, values or {}):
        check_types(KINDS[kind], *columns)
        rows.append(make_row(KINDS[kind], *columns, **rest))
    return rows


def row_of(*columns: Any, **more: Any) -> Row:
    """`rows_of` where there is one."""
    (row,) = rows_of(*columns, **more)
    return row


# Columns of rows that earlier versions wrote → those of today. Old names are known here alone.
Columns = dict[str, Any]


def migrated(kind: str, case: Mapping[str, Any], values: Mapping[str, Any]) -> list[tuple[Columns, Columns]]:
    """The columns as they would be written today; of one row that would be several now, those of each."""
    if kind == "plan scaling" and "strategy" not in case:
        return _by_strategy(dict(case), values)
    columns = dict(case), dict(values)
    for own, (name, expected) in itertools.product(columns, _ONCE_TEXTS.items()):
        if kind in _CHANGES and not isinstance(own.get(name, ""), expected):
            raise ValueError(f"{name} is {own[name]!r}, expected a text")
    for name in _JOINED.get(kind, ()):
        if isinstance(texts := values.get(name), str):
            columns[1][name] = texts.split(", ")
    if kind in _CHANGES:
        _CHANGES[kind](*columns)
    return [columns]


def _by_strategy(case: Columns, values: Mapping[str, Any]) -> list[tuple[Columns, Columns]]:
    """A row had the values of all strategies: `fsdp_tokens_per_s`."""
    ending, names = "_tokens_per_s", ("tokens_per_s", "step_ms", "exposed_ms", "limit", "peak_gib", "fits")
    strategies = [name.removesuffix(ending) for name in values if name.endswith(ending)]
    of_each = [{name: values.get(f"{strategy}_{name}") for name in names} for strategy in strategies]
    return [({**case, "strategy": strategy}, own) for strategy, own in zip(strategies, of_each, strict=True)]


def _ceiling(case: Columns, values: Columns) -> None:
    """The operation and its precision were one: `matmul bf16`."""
    if "what" in case:
        case["operation"], _, precision = case.pop("what").partition(" ")
        case["precision"] = precision or None


def _family(case: Columns, values: Columns) -> None:
    """As in ceilings."""
    if "ceiling" in values:
        named = values.pop("ceiling")
        values["ceiling_precision"] = named.removeprefix("matmul ") if named else None


def _dtype(case: Columns, values: Columns) -> None:
    """The class was named `class`."""
    if "class" in values:
        values["class_name"] = values.pop("class")


def _residual(case: Columns, values: Columns) -> None:
    """Rank and module were one: `1. blocks.*.attention`; other groups had their name in their place."""
    if "what" in case:
        what = case.pop("what")
        rank, dot, module = what.partition(". ")
        is_ranked = dot and rank.isdecimal()
        case |= {"group": "largest", "rank": int(rank), "module": module} if is_ranked else {"group": what}


def _owner(case: Columns, values: Columns) -> None:
    """A part of an owner was one text: a module, `MODULE, OPERATION of PHASE`, or a line of code."""
    part = case.pop("part", "all")
    if part == "all":
        return
    if case.get("owner") not in ("activations", "temporaries") or "device" in case:  # of an imported snapshot
        case["line"] = part
    elif case.get("owner") == "activations":
        outside = {"the loss": "loss", "the model itself": "forward"}
        case |= {"phase": outside[part]} if part in outside else {"module": part}
    else:
        module, comma, made = part.rpartition(", ")
        operation, of, phase = made.rpartition(" of ")
        case |= ({"module": module} if comma else {}) | ({"operation": operation} if of else {}) | {"phase": phase}


def _allocation(case: Columns, values: Columns) -> None:
    """Phase and operation were one: `backward: Softmax`."""
    if "made_in" in values:
        phase, colon, operation = (values.pop("made_in") or "").partition(": ")
        values |= {"phase": phase or None, "operation": operation if colon else None}


def _fused(case: Columns, values: Columns) -> None:
    """A shape had the width of the feed-forward, which only the operators that were dropped were made from."""
    case.pop("d_ff", None)


_CHANGES: Mapping[str, Callable[[Columns, Columns], None]] = {
    each.__name__[1:]: each for each in (_ceiling, _family, _dtype, _residual, _owner, _allocation)
} | dict.fromkeys(("fused operator", "fused ratio"), _fused)
_ONCE_TEXTS: Mapping[str, Any] = {"what": str, "part": str, "made_in": str | None, "ceiling": str | None}
"""Columns of earlier versions that are taken apart, and what they must be."""
_JOINED = {"profile": ("sums_disagree",), "dtype": ("parameters", "inputs", "outputs", "gradients")}
"""Columns whose words were joined to one text."""
