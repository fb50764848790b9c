"""The kinds of rows: a class each, by subject. Adding a kind is one class in a file here.

`row_of` makes a row from the columns of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainstep.rows import kernels, memory, parallel, plan, run, steps
from trainstep.rows.kernels import *
from trainstep.rows.memory import *
from trainstep.rows.parallel import *
from trainstep.rows.plan import *
from trainstep.rows.row import Row, decode_row
from trainstep.rows.run import *
from trainstep.rows.steps import *

KINDS: Mapping[str, type[Row]] = {
    kind.kind: kind
    for subject in (run, steps, kernels, memory, parallel, plan)
    for kind in vars(subject).values()
    if isinstance(kind, type) and issubclass(kind, Row) and "kind" in vars(kind)
}
"""Name in files → kind, in the order of the page."""


_GONE = {
    **dict.fromkeys(("rung", "control", "script rung"), "before 2026-11-28 wrote of ladders: climb it again"),
    "accumulation": "before 2026-11-29 wrote of a sum: python -m examples.accumulation prints it",
    "parallel gather": "before 2026-11-29 wrote of gathers: bench parallel has their waits",
    "plan feed-forward": "before 2026-11-29 wrote of one layer: python -m examples.feed_forward prints it",
    "checkpointing": "before 2026-11-29 wrote of policies: measure it again with bench step --checkpointing",
}
"""Kinds of earlier versions → what wrote them, and what to do."""


def row_of(kind: str, case: Mapping[str, Any], values: Mapping[str, Any] | None = None, **rest: Any) -> Row:
    """The row of these columns, as a file has them.

    Args:
        kind: name in files.
        case, values: columns by name.
        rest: samples, series, environment, status, reason.

    Raises:
        ValueError: no such kind, columns that it does not have, or values of another type than its fields.
    """
    if kind in _GONE:
        raise ValueError(f"a row of kind {kind!r}, which versions {_GONE[kind]}")
    if kind not in KINDS:
        raise ValueError(f"unknown kind of row {kind!r}")
    return decode_row(KINDS[kind], case, values or {}, **rest)
