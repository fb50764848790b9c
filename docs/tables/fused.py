"""Tables of fused operators: those that are kept and those that were dropped beside the others, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tables import WORDS, results, where
from trainstep.base.stats import WITHIN_RUN
from trainstep.report.columns import ratio_cell
from trainstep.report.numbers import NONE, number
from trainstep.report.tables import Table, text_table
from trainstep.rows import FusedRatioRow, FusedRow
from trainstep.rows.records import by_case

NAME, OURS = "h200-fused", "ours"
KEPT = ("rope", "rope-in-place", "linear-cross-entropy")
DROPPED = ("rms-norm", "add-rms-norm", "swiglu", "adamw")
NAMES = WORDS["fused"]
"""What the page calls the implementations, in its order."""


def times(operators: Sequence[str]) -> Table:
    """Forward and backward by each implementation, and how many times that of it ours took."""
    rows = _rows(operators)
    ratios = {(each.operator, each.shape, each.peer): each for each in results(NAME, FusedRatioRow)}
    impls = [impl for impl in NAMES if any(row.impl == impl for row in rows)]
    lines = []
    for found in _by_shape(rows):
        operator, shape = found[OURS].operator, found[OURS].shape
        took = {impl: number(row.values["both_ms"]) for impl, row in found.items()}
        beside = (
            f"{took[impl]} ({ratio_cell(ratios[operator, shape, impl], 'both').plain})" if impl in took else NONE
            for impl in impls
        )
        lines.append((operator, shape, took[OURS], *beside))
    wanted = ("operator", "shape", "ours (ms)", *(f"{NAMES[impl]} (ms, ours over it [95 %])" for impl in impls))
    packages = sorted({row.package for row in rows if row.package})
    (dtype,) = {row.dtype for row in rows}
    updates = ", of adamw an update of four blocks' parameters" if "adamw" in operators else ""
    caption = f"{dtype}, forward and backward{updates}; intervals {WITHIN_RUN}"
    return text_table("fused", "; ".join([caption, *packages, where(rows)]), wanted, lines)


def memory() -> Table:
    """What each implementation allocates at most, beside its inputs."""
    rows = _rows(KEPT)
    impls = [*(impl for impl in NAMES if any(row.impl == impl for row in rows)), OURS]
    lines = []
    for found in _by_shape(rows):
        peaks = (number(found[impl].peak_gib) if impl in found else NONE for impl in impls)
        lines.append((found[OURS].operator, found[OURS].shape, *peaks))
    wanted = ("operator", "shape", *(f"{NAMES.get(impl, impl)} (GiB)" for impl in impls))
    return text_table("fused-memory", f"peak of forward and backward, beside the inputs; {where(rows)}", wanted, lines)


def _rows(operators: Sequence[str]) -> list[FusedRow]:
    return [row for row in results(NAME, FusedRow) if row.operator in operators]


def _by_shape(rows: Sequence[FusedRow]) -> list[dict[str, FusedRow]]:
    """Operator by operator and shape by shape: implementation → its row."""
    return [{row.impl: row for row in group} for group in by_case(rows, "impl")]


TABLES = {
    "fused": partial(times, KEPT),
    "fused-dropped": partial(times, DROPPED),
    "fused-memory": memory,
}
