"""Tables of steps: sizes, warm-up, repeated passes, ladders, the tour's two forms, and training runs."""

from __future__ import annotations

from functools import partial

from tables import as_times, in_times, results, where
from trainstep.report.compare import compare, comparison_table, repeatability
from trainstep.report.numbers import NONE, number, numeric
from trainstep.report.subjects.climbs import Climb, after, climbs
from trainstep.report.tables import Table, text_table, with_shapes
from trainstep.rows import ChangeRow, StepRow, TrainRow


def repeat() -> Table:
    """Passes over the same cases, which must not be told apart."""
    rows = results("h200-repeat", StepRow)
    return comparison_table(repeatability(rows), f"Three passes over the same cases in one run; {where(rows)}")


def climb_of(name: str) -> Climb:
    """The one ladder of a file."""
    return climbs(results(name, ChangeRow))[0]


ACROSS = ("workload", "precision", "compile", "attention", "optimizer")


def compared(name: str) -> Table:
    """slow.py as it is against fast.py with the recommended settings."""
    rows = results(f"{name}-tour", StepRow)
    before, after = (
        [row for row in rows if row.workload == f"examples.tour.{form}:workload"] for form in ("slow", "fast")
    )
    return comparison_table(compare(before, after, across=ACROSS), f"slow.py → fast.py; {where(rows)}")


SHOWN = 12  # Updates whose losses are shown


def curves() -> Table:
    """The loss of the same updates under each scheme, and how far the schemes are apart."""
    rows = results("h200-train", TrainRow)
    steps = [step for step in rows[0].series["step"] if isinstance(step, int)]
    assert all(list(row.series["step"]) == steps for row in rows), "runs of other lengths"
    shown = sorted({round(index * (len(steps) - 1) / (SHOWN - 1)) for index in range(SHOWN)})
    lines = []
    for index in shown:
        losses = [numeric(row.series["loss"][index]) for row in rows]
        apart = (max(losses) - min(losses)) / min(losses)
        lines.append((str(steps[index]), *(number(loss, 5) for loss in losses), number(apart, 2)))
    wanted = ("update", *(f"loss, {row.scheme}" for row in rows), "apart, relative")
    caption = f"{rows[0].workload}, context {rows[0].context}, {rows[0].precision}; {where(rows)}"
    return text_table("train-curves", caption, wanted, lines)


def headline() -> Table:
    """Where the ladder of each size begins and where it ends."""
    cells, first_rows = [], list[ChangeRow]()
    for size in ("small", "large", "2.7B"):
        climb = climb_of(f"h200-analyze-{size}")
        accepted, again = climb.accepted, climb.final
        first, last = accepted[0], accepted[-1]
        assert again is not None, f"no final configuration of {size}"
        times, peaks = ([number(row.values[name]) for row in (first, last)] for name in ("step_ms", "peak_gib"))
        half = next((row for row in accepted[:3] if row.change == "bf16 autocast"), None)
        since = NONE if half is None else as_times(after(half, accepted))
        tf32 = next(row for row in accepted if row.change == "TF32 matmuls")
        first_rows.append(first)
        speedups = (in_times(each.speedup, each.speedup_low, each.speedup_high) for each in (last, again))
        error = f"{last.gradient_error:.2g} of {last.error_budget:.2g}"
        cells.append((size, *times, *speedups, as_times(after(tf32, accepted)), since, *peaks, error))
    wanted = (
        *("size", "fp32 without TF32, eager (ms)", "final configuration (ms)"),
        *("speed-up [95 %]", "drift check: both interleaved at the end [95 %]"),
        *("from TF32 [95 %]", "from bf16 autocast [95 %]"),
        *("peak before (GiB)", "after (GiB)", "relative gradient error, of its tolerance"),
    )
    caption = with_shapes("One step, batch 4, context 512", (size for size, *_ in cells))
    return text_table("headline-ladder", f"{caption}; {where(first_rows)}", wanted, cells)


TABLES = {
    "repeat": repeat,
    **{f"tour-compare-{name}": partial(compared, name) for name in ("cpu", "h200")},
    "train-curves": curves,
    "headline-ladder": headline,
}
