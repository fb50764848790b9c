"""The logs of all ranks of one start, once they have ended or time is up."""

from __future__ import annotations

import time
from pathlib import Path

from trainstep.run.log import RankLog, log_path, read_log
from trainstep.run.supervise import Rank

PATIENCE_S = 10.0
"""How long the first rank waits for what the others write last; ranks of other hosts may write elsewhere."""


def gather(folder: Path, rank: Rank, patience_s: float = PATIENCE_S) -> list[RankLog]:
    """The logs in a folder that are of this start, in the order of ranks; the first rank's always."""
    deadline = time.monotonic() + patience_s
    while True:
        logs = [read_log(log_path(folder, number)) for number in range(rank.world_size)]
        ours = [each for each in logs if each.header.get("launch") == rank.launch]
        is_complete = len(ours) == rank.world_size and all(each.ended is not None for each in ours)
        if rank.world_size == 1 or is_complete or time.monotonic() > deadline:
            return ours or logs[:1]
        time.sleep(0.1)
