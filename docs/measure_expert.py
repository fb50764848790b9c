"""A script as its defaults have it, climbed by `trainstep run --ladder`, beside what an expert writes by hand.

    python docs/measure_expert.py vit_large                       # on a GPU: some forty runs
    python docs/measure_expert.py llama_1b --steps 12 --at-once   # some fifteen
    python docs/measure_expert.py nanogpt --folder ../nanoGPT     # a clone, with train.bin and val.bin of its data
    python docs/measure_expert.py vit_large --runs 1 --changes "bf16 autocast,compiled blocks"        # in less time

--seconds interrupts a ladder that takes longer: what it has kept by then is its top. The expert's script is run before
the ladder and after it, so that what drifts reaches both. Kept in docs/results/experts.json, a cell a script; what is
measured again takes the place of what was.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from measure_run import DECLARED, Script, run_script, script_of
from measuring import keep, origin_of, parser
from tables import RESULTS
from trainstep.base.stats import ratio_of_runs
from trainstep.ladder.ladder import ratio_fields
from trainstep.rows import FINAL, ChangeRow, ScriptRow
from trainstep.rows.records import Row, of_kind

KEPT = RESULTS / "experts.json"
COLUMNS = ("change", "status", "verdict", "accepted", "reason", "step_ms", "runs", "gain", "gain_low", "gain_high")
COLUMNS += ("speedup", "speedup_low", "speedup_high", "gradient_error", "error_budget", "peak_gib")


@dataclass(frozen=True)
class Pair:
    """A script as it is, and as an expert has it."""

    plain: Script
    expert: Sequence[str]
    """Its arguments then."""
    changes: str
    by_hand: str
    """What the expert's has."""


def _pair(expert: Sequence[str], changes: str, by_hand: str, **script: Any) -> Pair:
    return Pair(script_of(**script), expert, changes, by_hand)


PAIRS = {name: _pair(**fields) for name, fields in DECLARED["expert"].items()}


def rows_of(script: Script, out: Path, options: Sequence[str], until_s: float | None = None) -> Sequence[Row]:
    """Run it under `trainstep run`: its rows.

    Raises:
        SystemExit: it left none.
    """
    rows, last = run_script(script, out, script.path, options, until_s=until_s)
    if not rows:
        raise SystemExit(f"nothing was measured, and the last that was said is: {last}")
    return rows


def by_expert(pair: Pair, out: Path, steps: int) -> list[float]:
    """Milliseconds of a step of one run of the expert's, alone in a list: by its total, as a ladder's run has it."""
    options = ["--steps", str(steps)]
    (row,) = of_kind(rows_of(replace(pair.plain, arguments=pair.expert), out, options), ScriptRow)
    if row.status != "ok":
        raise SystemExit(f"the expert's script: {row.reason}")
    return [statistics.fmean(row.samples["step"])]


def top_of(changes: Sequence[ChangeRow]) -> ChangeRow:
    """The row whose runs are those of the ladder's top.

    Raises:
        SystemExit: nothing was climbed.
    """
    accepted = [row for row in changes if row.accepted]
    if not accepted:
        raise SystemExit(f"the script as it is: {changes[0].reason}")
    return next((row for row in accepted if row.change == FINAL), accepted[-1])


def measure(
    pair: Pair, out: Path, steps: int, runs: int, *, at_once: bool = False, seconds: float | None = None
) -> dict[str, Any]:
    """The expert's `runs` times, the ladder for at most so many seconds, the expert's as often again."""
    experts = [by_expert(pair, out / f"expert-{number}", steps) for number in range(runs)]
    options = ["--ladder", "--in-place", "--steps", str(steps), "--changes", pair.changes]
    options += ["--at-once"] if at_once else []
    start = time.monotonic()
    changes = of_kind(rows_of(pair.plain, out / "ladder", options, seconds), ChangeRow)
    climbed_s = time.monotonic() - start
    experts += [by_expert(pair, out / f"expert-{number}", steps) for number in range(runs, 2 * runs)]
    top = top_of(changes)
    # the ladder's speed over the expert's: above 1 the ladder is faster
    speed = ratio_of_runs(experts, [[ms] for ms in top.samples["runs"]])
    return {
        "what": pair.plain.what,
        "by_hand": pair.by_hand,
        "steps": steps,
        "at_once": at_once,
        "climbed_s": climbed_s,
        "is_whole": seconds is None or climbed_s < seconds,
        "changes": [{name: getattr(row, name) for name in COLUMNS} for row in changes],
        "top_ms": top.samples["runs"],
        "expert_ms": experts,
    } | ratio_fields("of_expert", speed)


def main() -> None:
    """Measure what was asked for, and keep it beside what is there."""
    asked = parser(__doc__)
    asked.add_argument("script", choices=PAIRS)
    asked.add_argument("--steps", type=int, default=16, help="of each run")
    asked.add_argument("--runs", type=int, default=2, help="of the expert's, before the ladder and again after it")
    asked.add_argument("--changes", help="of the ladder, divided by commas; by default all that may help this script")
    asked.add_argument("--at-once", action="store_true", help="try all changes together first")
    asked.add_argument("--seconds", type=float, help="for the ladder, which is then interrupted; by default it ends")
    asked.add_argument("--folder", type=Path, default=Path.cwd(), help="from which it is run")
    asked.add_argument("--out", type=Path, help="what the runs leave; by default a temporary folder")
    given = asked.parse_args()
    if given.runs < 1:
        asked.error(f"--runs is {given.runs}; expected 1 or more, or there is nothing to hold the ladder against")
    origin = origin_of("cuda" if torch.cuda.is_available() else "cpu", "device")
    with tempfile.TemporaryDirectory() as name:
        out = (given.out or Path(name)).resolve()
        pair = PAIRS[given.script]
        pair = replace(pair, plain=replace(pair.plain, folder=given.folder), changes=given.changes or pair.changes)
        cell = measure(pair, out, given.steps, given.runs, at_once=given.at_once, seconds=given.seconds)
    keep(KEPT, given.script, cell | origin, PAIRS)
    print(json.dumps({name: value for name, value in cell.items() if name != "changes"}))


if __name__ == "__main__":
    main()
