"""Sentences of docs/tour.md: the tool's own, from the rows of docs/measure_tour.py."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping

from tables.source import figure, one, results
from trainstep.records import Row
from trainstep.report.finding import in_gib, in_ms
from trainstep.report.findings import findings
from trainstep.report.formula_findings import TOPIC as FORMULAS

NAME = "cpu-tour"
KINDS = ("rung", "control", "profile", "kernel", "memory-timeline", "owner", "allocation")
SHOWN = ("gain", FORMULAS, "ladder", "memory", "noise")


def analysis(form: str) -> list[Row]:
    """What is kept of one form's analysis."""
    rows = [row for kind in KINDS for row in results(NAME, kind)]
    return [row for row in rows if row.case.get("workload") == f"examples.tour.{form}:workload"]


def said(form: str) -> str:
    """The findings of one form's analysis, as the terminal shows them."""
    lines = [
        textwrap.fill(f"• {each.sentence}", 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for each in findings(analysis(form))
        if each.topic in SHOWN
    ]
    return "\n".join(["```text", *lines, "```"])


def rewritten() -> str:
    """What the two changes to the code did, before any setting."""
    slow, fast = (
        one(NAME, "rung", rung="baseline", workload=f"examples.tour.{form}:workload") for form in ("slow", "fast")
    )
    return (
        f"Both in fp32 and eager, the step went from {in_ms(figure(slow, 'step_ms'))} to "
        f"{in_ms(figure(fast, 'step_ms'))}, and its peak from {in_gib(figure(slow, 'peak_gib'))} to "
        f"{in_gib(figure(fast, 'peak_gib'))}."
    )


def took() -> str:
    """Where this was measured, and how long the commands took."""
    seconds = one(NAME, "tour").values
    environment = results(NAME)[0].environment  # of the kind step: the last two commands
    total = sum(float(each) for each in seconds.values() if isinstance(each, int | float))
    threads = "one thread" if environment["threads"] == 1 else f"{environment['threads']} threads"
    changed = any(figure(row, "ratio_low") > 1 or figure(row, "ratio_high") < 1 for row in results(NAME, "control"))
    shared = " Other programs ran beside them, as a finding below says; measure your own." if changed else ""
    return (
        f"The figures of this page are from {environment['device']}, {threads}, torch "
        f"{environment['torch']}, {environment['date']}. There the four commands took {total:.0f} seconds in "
        f"all.{shared}"
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "tour-took": took,
    "tour-slow": lambda: said("slow"),
    "tour-rewritten": rewritten,
    "tour-fast": lambda: said("fast"),
}
