"""The table of mutation testing: what `make mutants` found of every judge, file by file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables import kept
from trainstep.report.tables import Table, text_table

COLUMNS = ("file", "mutants", "judged", "killed", "of those judged", "equivalent", "on a GPU only", "commit", "date")


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
    return text_table("mutants", "Mutants of the judges, and how many a test noticed", COLUMNS, rows)


TABLES: Mapping[str, Callable[[], Table]] = {"mutants": mutants_table}
