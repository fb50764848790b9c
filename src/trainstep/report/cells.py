"""Values of records as cells of the page: typeset, with units and intervals, the raw value beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from trainstep.records import Row, Scalar
from trainstep.report import numbers
from trainstep.report.columns import Cell
from trainstep.report.numbers import NONE, as_float

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_UNITS = {"ms": "ms", "gib": "GiB", "tflops": "TFLOP/s", "tflop": "TFLOP", "mhz": "MHz", "w": "W", "c": "°C"}


def number(value: Scalar, digits: int = 3) -> str:
    """As `numbers.number`, typeset: a true minus sign, powers of ten."""
    return _typeset(value, numbers.number(value, digits))


def count(value: Scalar) -> str:
    """As `numbers.count`, typeset."""
    return _typeset(value, numbers.count(value))


def _typeset(value: Scalar, text: str) -> str:
    if as_float(value) is None:
        return text
    mantissa, _, exponent = text.replace("-", "−", 1 if text.startswith("-") else 0).partition("e")
    return f"{mantissa}×10{str(int(exponent)).translate(SUPERSCRIPT)}" if exponent else mantissa


def gib(value: Scalar) -> str:
    """A size with its unit; MiB where that reads better."""
    size = as_float(value)
    if size is None:
        return NONE
    return f"{number(size)} GiB" if size >= 1 else f"{number(size * 1024)} MiB"


def get(row: Row, name: str) -> float | None:
    """A record's value if it is a number."""
    return as_float(row.values.get(name))


def times(value: float | None) -> str:
    """A ratio: `1.34×`."""
    return NONE if value is None else f"{value:.2f}×"


def cell_of(row: Row, name: str, text: Callable[[Scalar], str] = number, note: str = "") -> Cell:
    """A record's value."""
    value = row.values.get(name)
    return Cell(text(value), value, name, note=note)


def _with_interval(row: Row, name: str, low: str, high: str, text: Callable[[Scalar], str] = number) -> Cell:
    cell = cell_of(row, name, text)
    if row.values.get(low) is None or row.values.get(high) is None:
        return cell
    return dataclasses.replace(cell, low=cell_of(row, low, text), high=cell_of(row, high, text))


def median_of(row: Row, name: str) -> Cell:
    """The median of a phase, with its interval."""
    return _with_interval(row, f"{name}_ms", f"{name}_low_ms", f"{name}_high_ms")


def ratio_of(row: Row, name: str) -> Cell:
    """A ratio, with its interval."""
    cell = _with_interval(row, name, f"{name}_low", f"{name}_high", lambda value: f"{as_float(value) or 0:.2f}")
    return dataclasses.replace(cell, text=times(get(row, name)))


def span(row: Row, name: str) -> str:
    """`146 ms [138–152]`, for hovering."""
    cell = median_of(row, name)
    return f"{cell.text} ms [{cell.low.text}–{cell.high.text}]" if cell.low and cell.high else f"{cell.text} ms"


def told_apart(row: Row, rows: Sequence[Row]) -> str:
    """The settings that tell a row from the others; of a row alone, its workload."""
    different = [name for name in row.case if len({each.case.get(name) for each in rows}) > 1]
    told = ", ".join(f"{name} {number(row.case[name])}" for name in different)
    return told or str(row.case.get("workload", "the step"))


_WORDS = {
    "parameters_gib": "Weights",
    "optimizer_state_gib": "Optimizer state",
    "peak_gib": "Peak",
    "tokens": "Tokens per step",
    "tokens_per_s": "Throughput",
    "forward_tflop": "Forward pass",
    "model_tflop": "Arithmetic per step",
    "achieved_tflops": "Achieved",
    "utilisation": "Of the device’s peak",
    "wait_ms": "Host waits",
    "torch": "PyTorch",
    "trainstep": "trainstep",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "capability": "Compute capability",
    "threads": "Host threads",
    "max_sm_clock_mhz": "Highest SM clock",
    "sm_clock_mhz": "SM clock",
}


def label(name: str) -> tuple[str, str]:
    """A record's name for a value, as words and unit: `device_memory_gib` → ("Device memory", "GiB")."""
    stem, _, suffix = name.rpartition("_")
    unit = _UNITS.get(suffix, "") if stem else ""
    words = (stem if unit else name).replace("_", " ")
    return _WORDS.get(name, words[:1].upper() + words[1:]), unit


def fact(name: str, value: Scalar) -> tuple[str, Cell]:
    """A record's value with its name, in words and units."""
    words, unit = label(name)
    if name == "utilisation":
        text = f"{(as_float(value) or 0) * 100:.3g}%"
    elif name == "tokens_per_s":
        text = f"{number(value)} tokens/s"
    else:
        text = gib(value) if unit == "GiB" else f"{number(value)} {unit}".rstrip()
    return words, Cell(text, value, name)
