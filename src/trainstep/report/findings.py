"""All findings: what the rules of every subject say, the most important topic first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainstep.records import Row
from trainstep.report.finding import Finding
from trainstep.report.subjects import RULES

TOPICS: Mapping[str, str] = {
    "gain": "Gain proven",
    "loss": "Loss",
    "phases": "What dominates",
    "utilisation": "Utilisation",
    "launches": "Launches",
    "formulas": "Formulas",
    "kernels": "Kernels",
    "data parallel": "Data parallel",
    "sweep": "Sweep",
    "memory": "Memory",
    "warm-up": "Warm-up",
    "ladder": "Not used",
    "kept for backward": "Kept for backward",
    "checkpointing": "Checkpointing",
    "precision": "Precision",
    "plan": "Plan",
    "noise": "Noise",
}  # What findings are about, in their order, and in the page's words


def findings(rows: Sequence[Row]) -> list[Finding]:
    """All that the rules find, by topic."""
    order = list(TOPICS)
    return sorted((found for rule in RULES for found in rule(rows)), key=lambda found: order.index(found.topic))
