"""A rung of a script's ladder as a row: what its runs took, and what the judge found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.base.stats import Ratio, summarize
from trainstep.ladder.judge import ScriptVerdict
from trainstep.ladder.single import Taken
from trainstep.rows import ScriptRungRow
from trainstep.rows.records import Times


def rung_row(
    case: Mapping[str, Any],
    taken: Taken | None,
    found: ScriptVerdict | None = None,
    *,
    own: Sequence[Taken] = (),
    **more: Any,
) -> ScriptRungRow:
    """The row.

    Args:
        case: its fields that say what was run, and where.
        taken: the run that was judged; None where no time is to be told.
        found: what the judge says of it.
        own: all runs that were timed; by default that one.
        more: further fields.
    """
    runs = list(own) or ([taken] if taken is not None and taken.step_ms else [])
    times: dict[str, Any] = {}
    if runs:
        samples = [each for run in runs for each in run.step_ms]
        by_run = [run.ms_per_step for run in runs]
        times = {
            "times": {"step": Times.of(summarize(by_run))},
            "samples": {"step": samples, "runs": by_run},
            "n": len(samples),
            "first_step_ms": statistics.median([run.first_step_ms or 0.0 for run in runs]),
        }
        if taken is not None and taken.captured is not None:
            times["samples"]["training_loss"] = list(taken.captured.losses)
            times["peak_gib"] = taken.captured.peak_gib
            times |= {"updates": len(taken.captured.losses), "in_first_epoch": taken.is_in_first_epoch}
    return ScriptRungRow(**case, **(_columns(found) if found is not None else {}), **times, **more)


def ratio_fields(name: str, ratio: Ratio) -> dict[str, Any]:
    """A ratio with its interval, as fields of that name."""
    low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (None, None)
    return {name: ratio.value, f"{name}_low": low, f"{name}_high": high}


def _columns(found: ScriptVerdict) -> dict[str, Any]:
    """The fields of a row that say what was found; a budget that says nothing is left out."""
    own, losses, moved = found.gradients, found.losses, found.moved
    return {
        "loss_error": own.loss,
        "gradient_error": own.gradient,
        "error_budget": own.gradient_allowed,
        "worst_gradient_error": own.worst,
        "worst_allowed": own.worst_allowed,
        "worst_parameter": own.worst_name,
        "update_error": found.update.error if found.update else None,
        "update_allowed": found.update.allowed if found.update else None,
        "losses_error": losses.error,
        "losses_allowed": losses.allowed if losses.is_judged else None,
        "moved_error": moved.error,
        "moved_allowed": moved.allowed if moved.is_judged else None,
    }
