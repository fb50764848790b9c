"""The table of the campaign of kills: what `python docs/measure_kills.py` found, by command and kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables import WORDS, kept
from trainstep.report.tables import Table, text_table

KINDS = WORDS["kills"]


def kills_table() -> Table:
    """A row for each command: how many runs of each kind left all whole, of how many.

    Raises:
        NotMeasuredError: there was no campaign yet.
    """
    found = kept("kills.json")
    about, rows = found["environment"], found["kills"]

    def cell(command: str, kind: str) -> str:
        these = [each for each in rows if (each["command"], each["kind"]) == (command, kind)]
        return f"{sum(not each['wrong'] for each in these)} of {len(these)}"

    commands = list(dict.fromkeys(each["command"] for each in rows))
    whole = sum(not each["wrong"] for each in rows)
    title = (
        f"{len(rows)} kills, of which {whole} ended as documented and left all whole; two at a time on "
        f"{about['cores']} cores, seed {about['seed']}, torch {about['torch']}, Python {about['python']}, "
        f"{about['date']}, commit {about['commit']}"
    )
    cells = [(command, *(cell(command, kind) for kind in KINDS)) for command in sorted(commands)]
    return text_table("kills", title, ("command", *KINDS.values()), cells)


TABLES: Mapping[str, Callable[[], Table]] = {"kills": kills_table}
