"""The table of the campaign of faults: what `python -m tools.trust.faults` found, by kind of fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tables import WORDS, kept
from trainstep.report.tables import Table, text_table

KINDS = WORDS["faults"]
COLUMNS = (
    *("fault", "came", "schemes", "what was said, once", "made again, at most", "lost", "said after (s)"),
    "going on after (s)",
)


def faults_table() -> Table:
    """A row for each kind of fault; times from the fault on, the least and the most.

    Raises:
        NotMeasuredError: there was no campaign yet.
    """
    found = kept("faults.json")
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for each in found["faults"]:
        by_kind.setdefault(each["kind"], []).append(each)
    rows = [_row(KINDS[kind], by_kind[kind]) for kind in KINDS if kind in by_kind]
    about = found["about"]
    beside = f", and {len(found['failed'])} that came to something else than was expected" if found["failed"] else ""
    title = (
        f"{len(found['faults'])} faults{beside}, in runs of 60 updates on two hosts, timeout 3 s, "
        f"seed {about['seed']}; "
        f"{about['hardware']}, torch {about['torch']}, Python {about['python']}, {about['date']}, "
        f"commit {about['commit']}"
    )
    return text_table("faults", title, COLUMNS, rows)


def _row(what: str, found: list[dict[str, Any]]) -> tuple[str, ...]:
    on = [each["on_s"] for each in found if each["on_s"]]
    return (
        what,
        str(len(found)),
        ", ".join(sorted({each["scheme"] for each in found})),
        _without_places(found[0]["said"]),
        str(max(each["again"] for each in found)),
        str(sum(each["lost"] for each in found)),
        _range([each["said_s"] for each in found]),
        _range(on) if on else "not disturbed",
    )


def _range(seconds: list[float]) -> str:
    least, most = f"{min(seconds):.1f}", f"{max(seconds):.1f}"
    return least if least == most else f"{least}–{most}"


def _without_places(said: str) -> str:
    """The sentence up to its first end, without the folders of the machine."""
    return re.sub(r"/tmp/[^/ ]+/", "", said).split(";")[0]


TABLES: Mapping[str, Callable[[], Table]] = {"faults": faults_table}
