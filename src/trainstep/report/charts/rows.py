"""A chart of named rows: the ladder's waterfall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainstep.report.charts import Plot, Scale
from trainstep.report.numbers import typeset

ROW_HEIGHT = 34
LONGEST_LABEL = 24
BROKEN, BEYOND = 2.0, 1.25
"""Times the longest accepted time from which a bar breaks the axis, which then ends at `BEYOND` times that."""


Outcome = Literal["baseline", "kept", "left", "slower", "failed"]


@dataclass(frozen=True)
class Fall:
    """A row of the waterfall: from the time accepted so far to this change's own."""

    name: str
    start: float  # The time kept before; 0 where there is none
    end: float | None  # This change's time; None where it has none
    outcome: Outcome
    label: str
    tip: str
    low: float | None = None
    high: float | None = None


_ROLES = {"baseline": "neutral", "kept": "accent", "left": "neutral outline", "slower": "warn hatched"}


def end_of(rows: Sequence[Fall]) -> float:
    """End of the axis: the longest bar's, unless one slow change would flatten all others and goes beyond."""
    accepted = max((row.end for row in rows if row.outcome in ("baseline", "kept") and row.end), default=0.0)
    reach = max((x for row in rows for x in (row.start, row.end, row.high) if x), default=1.0)
    return BEYOND * accepted if 0 < BROKEN * accepted < reach else 1.03 * reach


def waterfall(rows: Sequence[Fall], axis: str) -> str:
    """The ladder: bars from the accepted time to each change's, a cross where it has no time."""
    count, end = len(rows), end_of(rows)
    plot = Plot(Scale(0, end), Scale(-count + 0.5, 0.5), count * ROW_HEIGHT)
    plot.x_axis(axis, plot.x.ticks(), has_grid=True)
    for side, texts in (("left", [row.name for row in rows]), ("right", [typeset(row.label) for row in rows])):
        cut = (text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…" for text in texts)
        plot.y_axis("", {-index: text for index, text in enumerate(cut)}, "ink", side)
    kept = 0.0
    for y, row in ((-index, row) for index, row in enumerate(rows)):
        if row.end is not None and row.outcome in _ROLES:
            plot.bar((row.start if row.outcome != "baseline" else 0.0, min(row.end, end)), (y - 0.26, y + 0.26),
                     _ROLES[row.outcome])  # fmt: skip
        if row.end is not None and row.end > end:
            plot.text(0.96 * end, y, "⫽", "paper break", dy=".4em")
        elif row.outcome == "failed":
            plot.text(row.start, y, "×", "warn cross")
        elif row.low is not None and row.high is not None:
            plot.line((row.low, row.high), (y, y), "ink")
            for x in (row.low, row.high):
                plot.line((x, x), (y - 0.1, y + 0.1), "ink")
        kept = row.end if row.outcome in ("baseline", "kept") and row.end is not None else kept
        if kept and y > 1 - count:
            plot.line((kept, kept), (y, y - 1), "muted", 1)
    for index, row in enumerate(rows):  # The whole row reacts to the pointer, not only its bar
        plot.bar((0, end), (-index - 0.5, -index + 0.5), "cover", f"{row.name}\n{row.tip}")
    return plot.svg()
