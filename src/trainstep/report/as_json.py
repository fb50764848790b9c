"""The summary for machines, summary.json: the answer's verdict, all findings, and a flat mapping of numbers.

docs/summary.md has the schema. A key that goes, or that means something else, is another `SCHEMA`; new keys are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.report.answer import Launch
from trainstep.report.findings import Finding
from trainstep.report.headlines import headlines
from trainstep.report.numbers import as_float
from trainstep.report.subjects import run
from trainstep.report.subjects.climbs import climbs, recommended_flags
from trainstep.report.verdict import Step, judge
from trainstep.rows import ScriptRow
from trainstep.rows.records import Row

SCHEMA = 1


def as_json(
    rows: Sequence[Row], found: Sequence[Finding], launch: Launch, files: Mapping[str, str], *, is_stopped: bool
) -> dict[str, Any]:
    """Make the summary of one launch, of values that JSON has.

    Args:
        rows, found, launch: as the answer takes them.
        files: name → path below the launch's folder.
        is_stopped: whether a signal or a mistake ended the launch.
    """
    judged, step = judge(rows, found)
    words = [{"word": each.word, "says": each.says, "figure": _finite(each.figure)} for each in judged]
    first = next(iter(headlines(rows, found)), None)
    told = None if first is None else {"figure": first.figure.plain, "says": first.says, "detail": first.detail}
    return {
        "schema": SCHEMA,
        "command": launch.title,
        "verdict": words[0] if words else None,
        "beside": words[1:],
        "headline": told,
        "rows": len(rows),
        "failed": sum(row.status in ("failed", "wrong") for row in rows),
        "stopped": is_stopped,
        "flags": recommended_flags(rows),
        "findings": [_finding(each) for each in found],
        "environment": dict(next((row.environment for row in rows if row.environment), {})),
        "files": dict(files),
        "metrics": metrics(rows, found, step),
    }


def _finding(each: Finding) -> dict[str, Any]:
    claim = each.claim
    figures = {name: _finite(value) for name, value in each.figures.items()}
    told = {"id": each.id, "topic": each.topic, "sentence": each.sentence, "figures": figures}
    return told | {"stake_ms": _finite(claim.ms), "stake_gib": _finite(claim.gib),
                   "action": claim.action.code if claim.action else ""}  # fmt: skip


def metrics(rows: Sequence[Row], found: Sequence[Finding], step: Step | None) -> dict[str, float]:
    """Numbers by flat names: of the step, of a ladder's top, and `ID.FIGURE` of every finding."""
    known: dict[str, Any] = {}
    if step is not None:
        known |= {name: value for name, value in step.values.items() if name.endswith(("_ms", "_gib", "_per_step"))}
        known["n"] = step.n
        if isinstance(step, ScriptRow):
            known |= {f"{phase}_share": run.share_of(step, phase) for phase in run.PHASES if phase in step.times}
    for climb in climbs(rows)[:1]:
        top = climb.top if climb.is_script else next(reversed(climb.accepted), None)
        ends = ("speedup", "speedup_low", "speedup_high")
        known |= {} if top is None else {name: top.values.get(name) for name in ends}
    known |= {f"{each.id}.{name}": value for each in found for name, value in each.figures.items()}
    numbers = {name: as_float(value) for name, value in known.items()}
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def _finite(value: Any) -> Any:
    """The value, or None for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
