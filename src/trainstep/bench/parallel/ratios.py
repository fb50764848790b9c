"""Ours over torch's, from the rows of one run of `bench parallel`: what the same training takes on the same GPUs.

A peer is held against every scheme of ours that keeps the same parts of the training state on a rank, in as many
replicas. Of a peer with several settings the fastest is taken, so ours tuned is the least of the ratios of one peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainstep.base.config import FORM, settings_with
from trainstep.base.schemes import SCHEMES
from trainstep.base.stats import Ratio, in_rounds, ratio_of_rounds
from trainstep.rows import ParallelRatioRow, ParallelRow
from trainstep.rows.records import make_row


def ratio_rows(rows: Sequence[ParallelRow]) -> Iterator[ParallelRatioRow]:
    """A row for each scheme of ours and each peer of it; those that were not timed have none."""
    timed = [row for row in rows if row.step_ms is not None]
    peers: dict[tuple[str, int | None], ParallelRow] = {}
    for row in timed:
        peer, key = SCHEMES[row.scheme].peer, (SCHEMES[row.scheme].peer or "", row.replicas)
        if peer is not None and (key not in peers or _ms(row) < _ms(peers[key])):
            peers[key] = row
    for (peer, replicas), theirs in peers.items():
        for ours in timed:
            own = SCHEMES[ours.scheme]
            alike = (own.planned_as, ours.replicas) == (SCHEMES[peer].planned_as, replicas)
            if own.peer is None and alike:
                yield _ratio_row(peer, theirs, ours)


def ratios_alike(rows: Iterable[ParallelRow]) -> Iterator[ParallelRatioRow]:
    """The same, each beside the peer that is compiled as it is, not beside the fastest of all."""
    alike: dict[str | None, list[ParallelRow]] = {}
    for row in rows:
        alike.setdefault(row.compile, []).append(row)
    for group in alike.values():
        yield from ratio_rows(group)


def with_speedups(rows: Sequence[ParallelRow]) -> Iterator[ParallelRow]:
    """The rows; those of schemes that communicate with their speed-up over one process, where that was timed.

    Every process takes as many samples a step, so the speed-up is the ratio of the steps' times, times the processes.
    """
    singles = {row.compile: row for row in rows if not SCHEMES[row.scheme].communicates and row.step_ms is not None}
    for row in rows:
        single = singles.get(row.compile)
        if single is not None and row.step_ms is not None and SCHEMES[row.scheme].communicates:
            ratio, n = time_ratio(single, row), row.world_size
            row = replace(row, speedup=n * ratio.value)
            if ratio.interval is not None:
                row = replace(row, speedup_low=n * ratio.interval.low, speedup_high=n * ratio.interval.high)
        yield row


def time_ratio(ours: ParallelRow, theirs: ParallelRow) -> Ratio:
    """Ratio of the steps' times, by rounds where there were several."""
    over, under = (in_rounds(row.samples["step"], row.rounds or 1) for row in (ours, theirs))
    return ratio_of_rounds(over, under)


def _ratio_row(peer: str, theirs: ParallelRow, ours: ParallelRow) -> ParallelRatioRow:
    ratio = time_ratio(ours, theirs)
    values: dict[str, Any] = {
        "peer_setting": ", ".join([theirs.scheme, *_apart(ours, theirs)]),
        "rounds": ours.rounds,
        "ratio": ratio.value,
        "ratio_low": ratio.interval.low if ratio.interval else None,
        "ratio_high": ratio.interval.high if ratio.interval else None,
        "peak_ratio": ours.peak_gib / theirs.peak_gib if ours.peak_gib and theirs.peak_gib else None,
    }
    return make_row(ParallelRatioRow, {**ours.case, "peer": peer}, values, environment=ours.environment)


def _apart(ours: ParallelRow, theirs: ParallelRow) -> list[str]:
    """The settings of the peer's step that ours does not share, where arms differ in more than their scheme, and its
    blocks a group where one of them has several."""
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in settings_with(FORM))
    said = [f"{name} {other}" for name, own, other in pairs if own != other]
    if ours.blocks_per_group is not None or theirs.blocks_per_group is not None:
        said.append(f"blocks a group {theirs.blocks_per_group or 1}")
    if theirs.checkpointing != ours.checkpointing:
        said.append(f"checkpointing {Path(str(theirs.checkpointing).lstrip('@')).stem}")
    return said


def _ms(row: ParallelRow) -> float:
    assert row.step_ms is not None, "it was timed"
    return row.step_ms
