"""Columns of rows that earlier versions wrote → those of today. The one place where old names are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Columns = dict[str, Any]


def migrated(kind: str, case: Mapping[str, Any], values: Mapping[str, Any]) -> list[tuple[Columns, Columns]]:
    """The columns as they would be written today; of one row that would be several now, those of each."""
    if kind == "plan scaling" and "strategy" not in case:
        return _by_strategy(dict(case), values)
    columns = dict(case), dict(values)
    if kind in _CHANGES:
        _CHANGES[kind](*columns)
    return [columns]


def _by_strategy(case: Columns, values: Mapping[str, Any]) -> list[tuple[Columns, Columns]]:
    """A row had the values of all strategies: `fsdp_tokens_per_s`."""
    ending = "_tokens_per_s"
    strategies = [name.removesuffix(ending) for name in values if name.endswith(ending)]
    names = ("tokens_per_s", "step_ms", "exposed_ms", "limit", "peak_gib", "fits")
    return [
        ({**case, "strategy": strategy}, {name: values.get(f"{strategy}_{name}") for name in names})
        for strategy in strategies
    ]


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


def _profile(case: Columns, values: Columns) -> None:
    """The phases were joined to one text."""
    if isinstance(values.get("sums_disagree"), str):
        values["sums_disagree"] = values["sums_disagree"].split(", ")


def _dtype(case: Columns, values: Columns) -> None:
    """The class was named `class`, and dtypes were joined to one text."""
    if "class" in values:
        values["class_name"] = values.pop("class")
    for name in ("parameters", "inputs", "outputs", "gradients"):
        if isinstance(values.get(name), str):
            values[name] = values[name].split(", ")


_CHANGES: Mapping[str, Callable[[Columns, Columns], None]] = {
    "ceiling": _ceiling,
    "family": _family,
    "profile": _profile,
    "dtype": _dtype,
}
