"""Tables of campaigns against what is trusted: faults in runs on hosts, kills of commands, mutants of the checks.

`python -m tools.trust.faults`, `python docs/measure_kills.py` and `make mutants` keep what they found.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tables import WORDS, kept
from trainstep.report.tables import Table, text_table

FAULTS, KILLS = WORDS["faults"], WORDS["kills"]
FAULT_TITLES = (
    *("fault", "came", "schemes", "what was said, once", "made again, at most", "lost", "said after (s)"),
    "going on after (s)",
)
MUTANTS = ("file", "mutants", "judged", "killed", "of those judged", "equivalent", "on a GPU only", "commit", "date")


def faults_table() -> Table:
    """A row for each kind of fault; times from the fault on, the least and the most.

    Raises:
        NotMeasuredError: there was no campaign yet.
    """
    found = kept("faults.json")
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for each in found["faults"]:
        by_kind.setdefault(each["kind"], []).append(each)
    rows = [_row(FAULTS[kind], by_kind[kind]) for kind in FAULTS if kind in by_kind]
    about = found["about"]
    beside = f", and {len(found['failed'])} that came to something else than was expected" if found["failed"] else ""
    title = (
        f"{len(found['faults'])} faults{beside}, in runs of 60 updates on two hosts, timeout 3 s, "
        f"seed {about['seed']}; "
        f"{about['hardware']}, torch {about['torch']}, Python {about['python']}, {about['date']}, "
        f"commit {about['commit']}"
    )
    return text_table("faults", title, FAULT_TITLES, rows)


def _row(what: str, found: list[dict[str, Any]]) -> tuple[str, ...]:
    on = [each["on_s"] for each in found if each["on_s"]]
    return (
        what,
        str(len(found)),
        ", ".join(sorted({each["scheme"] for each in found})),
        re.sub(r"/tmp/[^/ ]+/", "", found[0]["said"]).split(";")[0],  # to its first end, without the machine's folders
        str(max(each["again"] for each in found)),
        str(sum(each["lost"] for each in found)),
        _range([each["said_s"] for each in found]),
        _range(on) if on else "not disturbed",
    )


def _range(seconds: list[float]) -> str:
    least, most = f"{min(seconds):.1f}", f"{max(seconds):.1f}"
    return least if least == most else f"{least}–{most}"


def kills_table() -> Table:
    """A row for each command: how many runs of each kind left all whole, of how many.

    Raises:
        NotMeasuredError: there was no campaign yet.
    """
    found = kept("kills.json")
    about, rows = found["environment"], found["kills"]
    every = Counter((each["command"], each["kind"]) for each in rows)
    whole = Counter((each["command"], each["kind"]) for each in rows if not each["wrong"])
    title = (
        f"{len(rows)} kills, of which {whole.total()} ended as documented and left all whole; two at a time on "
        f"{about['cores']} cores, seed {about['seed']}, torch {about['torch']}, Python {about['python']}, "
        f"{about['date']}, commit {about['commit']}"
    )
    cells = [
        (command, *(f"{whole[command, kind]} of {every[command, kind]}" for kind in KILLS))
        for command in sorted({command for command, _ in every})
    ]
    return text_table("kills", title, ("command", *KILLS.values()), cells)


def mutants_table() -> Table:
    """Every file that was judged; `judged` is less than there are, beside those that are listed, where it is a sample.

    Raises:
        NotMeasuredError: nothing was judged yet.
    """
    rows = []
    for file, found in kept("mutants.json").items():
        counts = [str(found[name]) for name in ("mutants", "judged", "killed", "equivalent", "gpu")]
        share = f"{found['killed'] / found['judged']:.1%}"
        rows.append((file, *counts[:3], share, *counts[3:], found["commit"], found["date"]))
    return text_table("mutants", "Mutants of the judges, and how many a test noticed", MUTANTS, rows)


TABLES = {"faults": faults_table, "kills": kills_table, "mutants": mutants_table}
