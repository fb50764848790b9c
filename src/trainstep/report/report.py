"""A report: records, what they say, and the files made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainstep.errors import UsageError
from trainstep.records import Row
from trainstep.report.finding import Finding
from trainstep.report.findings import findings, recommended_flags


@dataclass(frozen=True)
class Report:
    """The records of one analysis and everything derived from them."""

    records: Sequence[Row]

    @property
    def findings(self) -> list[Finding]:
        """What the figures say, the most important first."""
        return findings(self.records)

    @property
    def recommended_flags(self) -> str:
        """The settings the ladder ended with, as flags to paste; empty where the baseline was best."""
        return recommended_flags(self.records)

    def write(self, folder: Path) -> list[Path]:
        """Write `report.html` and `tables/*.{md,tex,typ,csv}` into `folder`; returns the files.

        Raises:
            UsageError: the folder cannot be written.
        """
        from trainstep.report.formats import write_tables
        from trainstep.report.html import write_html

        page = folder / "report.html"
        try:
            tables = write_tables(self.records, folder / "tables")
        except OSError as error:
            raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from error
        write_html(self.records, page)
        return [page, *tables]
