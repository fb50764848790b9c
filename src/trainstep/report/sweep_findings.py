"""What a sweep's rows say: how many have no result, and whether they can be compared with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trainstep.kinds import SweepRow
from trainstep.records import Row, of_kind
from trainstep.report.finding import Finding, listed
from trainstep.report.sweep_axes import in_order

TOPIC = "sweep"
_PLURAL = {"device": "devices", "threads": "numbers of threads", "torch": "versions of torch", "commit": "commits"}
"""What of the environment makes times differ, where it differs."""


def sweep_findings(records: Sequence[Row]) -> list[Finding]:
    """Rows without a result, and rows of different environments."""
    rows = in_order(of_kind(records, SweepRow))
    lacking = Counter(row.status for row in rows if row.status != "ok")
    found = []
    if lacking:
        counts = listed([f"{number} {status}" for status, number in lacking.items()])
        logs = " Their words are in stderr.txt of their folders below cases/." if lacking["failed"] else ""
        found.append(Finding(TOPIC, f"Of {len(rows)} rows, {lacking.total()} have no result: {counts}.{logs}"))
    for name in _PLURAL:
        if name == "threads" and len({row.case.get("processes") for row in rows}) > 1:
            continue  # processes that torchrun starts share the cores: that is what was swept
        values = list(dict.fromkeys(str(row.environment[name]) for row in rows if name in row.environment))
        if len(values) > 1:
            what = f"{_PLURAL[name]} {listed([value[:12] if name == 'commit' else value for value in values])}"
            sentence = f"The rows were measured with different {what}: compare their times with care, or sweep anew."
            found.append(Finding(TOPIC, sentence))
    return found
