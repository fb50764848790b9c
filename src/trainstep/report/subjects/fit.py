"""Memory that fits itself: what was chosen for each block, and what was predicted of it against what came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainstep.base.stats import ratio_of_medians
from trainstep.report import columns
from trainstep.report.blocks import Section, section
from trainstep.report.columns import Column
from trainstep.report.findings import Finding, found, listed, literal
from trainstep.report.numbers import number
from trainstep.report.tables import define, page_table
from trainstep.rows import FitRow
from trainstep.rows.records import Row, by_case, of_kind

PEAK_AGREES, TIME_AGREES = 0.03, 0.07
"""Predictions that are off by more are remarked on."""
PROVEN = 0.02
"""So is a choice that may cost more beyond the best one, as a share of the time that it adds."""
_FORM = ("form", "round", "checkpointing")
"""Settings that tell the rows of one fit apart."""


def form_of(row: Row) -> str:
    """`plain`, `every-1`, `fit`; of choices after the first `fit, corrected`."""
    assert isinstance(row, FitRow)
    form = row.form if row.round in (None, 1) else f"{row.form}, corrected {number((row.round or 1) - 1)}×"
    return f"{form}, updated in backward" if row.update_in_backward else form


FITS = define(
    FitRow,
    "Memory that fits itself: a step as it is, with everything computed again, and as chosen; predicted and measured",
    *(each for each in columns.SETTINGS if each.title != "checkpointing"),
    Column("activations", form_of),
    columns.value("budget (GiB)", "budget_gib", 4),
    *columns.values({"predicted (GiB)": "predicted_gib", "peak (GiB)": "peak_gib"}, digits=4),
    columns.value("peak off by (%)", "prediction_error", digits=2),
    columns.value("predicted (ms)", "predicted_ms"),
    columns.median("step (ms) [95 %]", "step"),
    columns.value("time off by (%)", "time_error", digits=2),
    *columns.values(
        {"kept": "blocks_kept", "computed again": "blocks_again", "sending": "blocks_sending", "host (GiB)": "host_gib"}
    ),
    *columns.values({"gradient error": "gradient_error", "allowed": "error_budget"}, digits=2, brief=False),
    columns.OUTCOME,
)


def fit(records: Sequence[Row]) -> Section | None:
    """Section on what was chosen, and what came of it."""
    lead = (
        "For each block it was chosen which activations are kept, computed again or sent to host memory, so that the "
        "step fits its budget at the least added time. All that the choice rests on was measured on this machine."
    )
    return section("fit", "Fit", "Memory that fits itself", lead, page_table(FITS, records))


def fit_findings(records: Sequence[Row]) -> list[Finding]:
    """Findings on what the choice came to, study by study."""
    studies = by_case(of_kind(records, FitRow), *_FORM)
    last = [(study, {row.budget_gib: row for row in study if row.form == "fit"}) for study in studies]
    return [finding for study, by_budget in last for row in by_budget.values() for finding in _found(study, row)]


def _found(study: Sequence[FitRow], row: FitRow) -> Iterator[Finding]:
    if row.peak_gib is None or row.budget_gib is None or "step" not in row.times:
        return
    figures = {
        **{name: getattr(row, name) for name in ("budget_gib", "peak_gib", "predicted_gib", "predicted_ms")},
        **{name: getattr(row, name) for name in ("prediction_error", "time_error", "blocks_kept", "blocks_again")},
        "step_ms": row.times["step"].median,
        "host_gib": row.host_gib,
    }
    sent = " {host_gib:gib} are in host memory." if row.host_gib else ""
    updated = " Updates run in backward, so no gradients are clipped or added up." * bool(row.update_in_backward)
    predicted = "predicted {predicted_gib:gib} and {predicted_ms:ms}"
    # A choice that does not fit is no choice: nothing else is said of it.
    if row.peak_gib > row.budget_gib:
        said = f"The chosen step takes {{peak_gib:gib}} of {{budget_gib:gib}}: it does not fit ({predicted})."
        yield found("fit.too-large", said, **figures)
        return
    said = (
        f"The step fits {{budget_gib:gib}}: it peaks at {{peak_gib:gib}} and takes {{step_ms:ms}} ({predicted}), "
        f"with {{blocks_kept}} blocks kept and {{blocks_again}} recomputed.{sent}{updated} "
    )
    yield found("fit.fits", said + literal(f"--checkpointing @{row.policy} repeats it."), **figures)
    if (row.gap or 0) > PROVEN:
        said = (
            "It was not shown to be the best: by prediction another choice may save up to {gap:.1%} of the added time."
        )
        yield found("fit.unproven", said, gap=row.gap)
    peak_off, time_off = abs(row.prediction_error or 0), abs(row.time_error or 0)
    parts = ["{peak_off:.1%} of the peak"] * (peak_off > PEAK_AGREES)
    parts += ["{time_off:.1%} of the time"] * (time_off > TIME_AGREES)
    if parts:
        said = f"The prediction of the chosen step misses by {listed(parts)}."
        yield found("fit.prediction-off", said, peak_off=peak_off, time_off=time_off)
    yield from _beside_others(study, row)


def _beside_others(study: Sequence[FitRow], row: FitRow) -> Iterator[Finding]:
    """Against the fastest policy that treats all blocks alike and fits the same budget."""
    assert row.budget_gib is not None
    alike = [each for each in study if each.form not in ("fit", "plain", "all again")]
    others = [each for each in alike if each.peak_gib is not None and each.peak_gib <= row.budget_gib]
    if not others or not row.samples.get("step"):
        return
    # Only policies within the same budget are rivals: one that takes more memory may well be faster.
    best = min(others, key=lambda each: each.times["step"].median)
    ratio = ratio_of_medians(best.samples["step"], row.samples["step"])
    figures = {"other_ms": best.times["step"].median, "step_ms": row.times["step"].median, "speedup": ratio.value}
    same = f"The fastest policy that fits and treats all blocks alike is {literal(best.form)} with {{other_ms:ms}}"
    if ratio.interval is None:
        said = f"{same}. The chosen step takes {{step_ms:ms}}. Too few steps were timed to rank them."
        yield found("fit.beside", said, **figures)
        return
    figures |= {"speedup_low": ratio.interval.low, "speedup_high": ratio.interval.high}
    interval = f"({columns.INTERVAL} {{speedup_low:.2f}}–{{speedup_high:.2f}})"
    if 1 in ratio.interval:
        yield found("fit.beside", f"{same}. These samples show no difference to the chosen step {interval}.", **figures)
        return
    said = f"{same}. The chosen step is {{speedup:.2f}} times as fast as that {interval}."
    if ratio.value < 1:
        said += literal(f" Take that one here: --checkpointing {best.form}.")
    yield found("fit.beside", said, **figures)


TABLES = (FITS,)
SECTIONS = (fit,)
RULES = (fit_findings,)
