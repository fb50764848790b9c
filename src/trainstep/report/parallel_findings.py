"""What the traced steps of data parallel schemes say, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import ParallelTraceRow
from trainstep.records import Row, of_kind
from trainstep.report.finding import Finding
from trainstep.report.numbers import number, numeric

TOPIC = "data parallel"


def parallel_findings(records: Sequence[Row]) -> list[Finding]:
    """The scheme that hides most of its communication, and the one that hides least."""
    traced = [row for row in of_kind(records, ParallelTraceRow) if row.values.get("hidden_share") is not None]
    if not traced:
        return []
    traced.sort(key=lambda row: -numeric(row.values["hidden_share"]))
    most, least = traced[0], traced[-1]
    sentence = f"Of communication in the traced step, computation hides {_part(most, ' are exposed')}"
    if least is not most:
        sentence += f", and {_part(least, '')}"
    return [Finding(TOPIC, f"{sentence}.")]


def _part(row: Row, exposed: str) -> str:
    values = row.values
    return (
        f"{numeric(values['hidden_share']):.0%} with {row.case['scheme']} "
        f"({number(values['exposed_communication_ms'])} of {number(values['communication_ms'])} ms{exposed})"
    )
