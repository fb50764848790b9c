"""A larger batch: where memory has room for it, and what it brings, in samples per second.

It is another step. Its gradients are those of other samples, so nothing of it can be compared with the script as it is
but that its losses are finite. It is no speed-up of the step, and no part of the final configuration or of the patch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.base.stats import Ratio
from trainstep.ladder.changes.loaders import TIMES
from trainstep.ladder.ladder import ratio_fields
from trainstep.ladder.single import Taken
from trainstep.ladder.trial.capture import Captured
from trainstep.observe.lines import shown_line

LIMITS = 0.6
"""Memory limits a script whose peak is above this share of what it could have."""
FULL = 0.95
"""Share of that which may be planned with: what is freed in pieces is not all of use."""
BY_NAME = "name the change in --changes to try it"


def share_of_memory(captured: Captured | None) -> float | None:
    """The peak, of what the process could have; None where no limit is known."""
    if captured is None or captured.peak_gib is None or not captured.limit_gib:
        return None
    return captured.peak_gib / captured.limit_gib


def why_memory_limits_not(captured: Captured | None) -> str:
    """Reason why memory is not what limits a run; empty where it is."""
    share = share_of_memory(captured)
    if share is None:
        return f"on a CPU no limit of memory is known: {BY_NAME}"
    if share > LIMITS:
        return ""
    return f"memory does not limit the script, whose peak is {share:.0%} of what it could have: {BY_NAME}"


def needed_gib(captured: Captured) -> float:
    """Memory that a larger batch would need at most: everything that is not there between steps grows with it."""
    peak, fixed = captured.peak_gib or 0.0, captured.fixed_gib or 0.0
    return fixed + TIMES * max(0.0, peak - fixed)


def why_no_room(captured: Captured | None) -> str:
    """Reason why a larger batch would not fit; empty where it would."""
    if captured is None or share_of_memory(captured) is None:
        return why_memory_limits_not(captured)
    needed, limit = needed_gib(captured), captured.limit_gib or 0.0
    if needed <= FULL * limit:
        return ""
    return f"it may need {needed:.3g} GiB, more than {FULL:.0%} of the {limit:.3g} GiB that there are: {BY_NAME}"


def why_not_told(before: Taken, own: Taken) -> str:
    """Reason why nothing can be said of a run with a larger batch, beside one without; empty where something can."""
    if before.samples_per_step is None or own.samples_per_step is None:
        return "how many samples a step takes is not known: not every step takes a batch, or most have an evaluation"
    if own.samples_per_step <= before.samples_per_step:
        return (
            f"its steps take {own.samples_per_step:g} samples all the same: they are of other loaders, or all there are"
        )
    return ""


def ms_per_sample(runs: Sequence[Taken]) -> list[Sequence[float]]:
    """Milliseconds per sample of each run, to be held against those of another batch."""
    return [(run.ms_per_step / (run.samples_per_step or math.nan),) for run in runs]


def throughput_fields(before: Sequence[Taken], own: Sequence[Taken], ratio: Ratio) -> dict[str, Any]:
    """The fields of a row that say what came of it: samples per second, and per step, of both."""
    found: dict[str, Any] = ratio_fields("throughput", ratio)
    for end, runs in (("_before", before), ("", own)):
        found[f"samples_per_s{end}"] = 1e3 / statistics.median(each for run in ms_per_sample(runs) for each in run)
        found[f"samples_per_step{end}"] = runs[0].samples_per_step
    return found


def lines_of(text: str, settings: Mapping[str, Any]) -> str:
    """Code to write for it, with the lines that make the loaders, and their batches."""
    own = {(each["file"], each["line"]): each["batch_size"] for each in settings["loaders"] if each["batch_size"]}
    told = [f"{shown_line(*place)}: {TIMES * size} in place of {size}" for place, size in own.items()]
    return f"{text} ({', '.join(told)})" if told else text
