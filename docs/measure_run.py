"""Run `trainstep run` on real scripts as they are, and on the same with timers by hand: docs/results/cpu-run.json.

    python docs/measure_run.py                          # all: a quarter of an hour on two cores; on a GPU see below
    python docs/measure_run.py --scripts t5,gan
    python docs/measure_run.py --scripts pretrain --ladder "fused attention,fused optimizer"

A script is run twice: as it stands, which gives its phases and findings, and with the lines that its comments
`# by hand: …` have, where `trainstep run` and these time the same steps at once. With --ladder it is climbed as well.
What was measured again takes the place of what was.

Where there is a GPU, the scripts train there, larger, and docs/results/h200-scripts.json is written. Each is run once
then, with the timers, which are events in the GPU's queue: its phases and findings are of the steps that were timed by
hand. What cannot be run (a library or a second GPU is missing, or the script fails) is said, and the others go on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from measuring import ROOT, keep, origin_of, parser, run
from tables import RESULTS
from tests.observe.by_hand import instrumented
from trainstep.observe.log import log_path, read_log
from trainstep.report.subjects import run as subject
from trainstep.rows import ChangeRow, ScriptRow
from trainstep.rows.records import Row, of_kind


@dataclass(frozen=True)
class Script:
    """One of them."""

    what: str  # in the table
    path: Path
    arguments: Sequence[str] = ()  # FOLDER is a temporary one
    packages: Sequence[str] = ("torch",)  # one of them is needed
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    gathers: bool = False  # whether its ranks wait for each other in forward too
    folder: Path = ROOT  # from which it is run
    large: Mapping[str, str] = field(default_factory=dict)  # of its environment on a GPU: steps of 10 ms and more
    large_arguments: Sequence[str] = ()  # there in the place of its arguments; none for the same

    def on_gpu(self) -> Script:
        """As it is run on a GPU; one process alone sees one, or Trainer would divide batches between all."""
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        seen = {} if self.ranks > 1 else {"CUDA_VISIBLE_DEVICES": first}
        arguments = self.large_arguments or self.arguments
        return replace(self, arguments=arguments, environment={**self.environment, **self.large, **seen})


DECLARED = tomllib.loads(Path(__file__).with_name("scripts.toml").read_text("utf-8"))


def script_of(file: str, **fields: Any) -> Script:
    """A script as `docs/scripts.toml` has it; one that is not in this checkout is found in the folder of its run."""
    return Script(path=ROOT / file if "/" in file else Path(file), **fields)


SCRIPTS = {name: script_of(**fields) for name, fields in DECLARED["run"].items()}


def run_script(
    script: Script,
    out: Path,
    path: Path,
    options: Sequence[str],
    limit_s: float | None = None,
    until_s: float | None = None,
) -> tuple[Sequence[Row], str]:
    """Run it under `trainstep run`: the rows, and the last line that it printed.

    Args:
        limit_s, until_s: as `measuring.run` has them.

    Raises:
        TimeoutError: it took too long.
    """
    arguments = [str(out / "written") if each == "FOLDER" else each for each in script.arguments]
    words = ["run", "--out", str(out), *options, str(path), *arguments]
    own = {"OMP_NUM_THREADS": "1"} | dict(script.environment) | {"BY_HAND": str(out / "by-hand")}
    limits = {"limit_s": limit_s, "until_s": until_s}
    ended = run(words, out, ranks=script.ranks, folder=script.folder, environment=own, **limits)
    if ended.how == "hangs":
        raise TimeoutError(ended.last)
    return ended.rows, ended.last


def of_phases(phases: Mapping[str, float], gathers: bool = False) -> dict[str, float]:
    """What both ways of timing tell apart: by hand, waiting for other ranks is a part of the pass that does it.

    Args:
        phases: of a step, with the whole of it as "step".
        gathers: whether ranks also wait for each other in forward, so that the two passes are one.
    """
    forward, passed = phases.get("forward", 0.0), phases.get("backward", 0.0) + phases.get("communication", 0.0)
    passes = {"both passes": forward + passed} if gathers else {"forward": forward, "backward": passed}
    found = passes | {"optimizer": phases.get("optimizer", 0.0)}
    return found | {"the rest": phases["step"] - sum(found.values())}


def difference(
    steps: Sequence[Mapping[str, float]], by_hand: Sequence[Mapping[str, float]], gathers: bool = False
) -> tuple[str, float]:
    """The phase that differs most from the timers by hand, and by how much of the step: medians over the same steps.

    Args:
        steps: phase → milliseconds of each.
        by_hand: what the timers say of each.
        gathers: as `of_phases` has it.
    """
    whole = [sum(ms for name, ms in each.items() if name != "of") for each in by_hand]
    apart: dict[str, list[float]] = {}
    for own, theirs, ms in zip(steps, by_hand, whole, strict=True):
        found = of_phases({**own, "step": sum(own.values())}, gathers)
        for name, expected in of_phases({**theirs, "step": ms}, gathers).items():
            apart.setdefault(name, []).append(found[name] - expected)
    medians = {name: abs(statistics.median(each)) for name, each in apart.items()}
    most = max(medians, key=lambda name: medians[name])
    return most, medians[most] / statistics.median(whole)


SHORT: Mapping[str, str] = DECLARED["short"]
"""Finding → what the table has of it."""


def told(rows: Sequence[Row]) -> list[str]:
    """What was found, shortly."""
    said: list[str] = []
    waits: list[str] = []
    for finding in (each for rule in subject.RULES for each in rule(rows)):
        figures: Mapping[str, Any] = finding.figures
        if finding.id in SHORT:
            said.append(SHORT[finding.id].format(**figures))
        elif finding.id == "waits.would":
            said.append(f"reads tensors at {_first_of(figures['lines'])}")
        elif finding.id == "waits.line":
            waits.append(f"{figures['line']} ({figures['call']}, {figures['share']:.0%} of the step)")
    if waits:
        said.append(f"waits for the GPU at {_first_of(waits)}")
    return list(dict.fromkeys(said))


def _first_of(lines: Sequence[str]) -> str:
    return lines[0] + (f" and {len(lines) - 1} more lines" if lines[1:] else "")


def measure(script: Script, limit_s: float, *, once: bool = False) -> dict[str, Any]:
    """Both runs of a script; with `once` that with the timers alone, from which everything is taken then."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        edited = folder / script.path.name
        edited.write_text(instrumented(script.path.read_text(encoding="utf-8")), encoding="utf-8")
        timed, last = run_script(script, folder / "by-hand", edited, (), limit_s)
        rows = timed
        if not once:
            rows, last = run_script(script, folder / "as-it-is", script.path, (), limit_s)
        every, same = ([row for row in of_kind(each, ScriptRow) if not row.rank] for each in (rows, timed))
        written = folder / "by-hand" / "by-hand-0"
        failed = [row.reason for row in (*every, *same) if row.status != "ok"]
        if failed or not every or not written.exists():
            return {"failed": f"{failed[0] if failed else 'nothing was measured'}; its last line: {last}"}
        by_hand, log = json.loads(written.read_text()), read_log(log_path(folder / "by-hand", 0))
    parts = []
    for place, (row, again) in enumerate(zip(every, same, strict=True)):
        own = [step for step in log.steps if step.updated == list(again.optimizers or ())]
        theirs = by_hand if len(every) == 1 else [step for step in by_hand if step["of"] == place]
        theirs = theirs[: len(own)]  # after the script's end come steps that find out what hooks cost
        usual = [pair for pair in zip(own, theirs, strict=True) if not pair[0].evaluations][again.left_out :]
        times = [each.ms for each, _ in usual]
        phase, share = difference(times, [each for _, each in usual], script.gathers)
        parts.append(
            {
                "updates": row.updates,
                "seen": row.steps_seen,
                "timed": row.n,
                "step_ms": row.step_ms,
                "shares": {name: subject.share_of(row, name) for name in subject.PHASES if name in row.times},
                "apart": phase,
                "apart_share": share,
            }
        )
    return {"parts": parts, "found": told(rows)}


def cannot_run(script: Script, gpus: int) -> str | None:
    """Why a script is left out here."""
    if not any(map(importlib.util.find_spec, script.packages)):
        return f"there is no {' or '.join(script.packages)} here"
    if gpus and script.ranks > gpus:
        return f"it needs {script.ranks} GPUs, and {gpus} is here"
    return None


def climb(script: Script, changes: str, steps: int, limit_s: float) -> dict[str, Any]:
    """The script's ladder: its changes, each with its speed-up over the script as it is."""
    with tempfile.TemporaryDirectory() as name:
        options = ["--ladder", "--in-place", "--steps", str(steps), "--changes", changes]
        rows, last = run_script(script, Path(name) / "ladder", script.path, options, limit_s)
    every = of_kind(rows, ChangeRow)
    if not every:
        return {"failed": last}
    names = ("change", "verdict", "accepted", "reason", "speedup", "speedup_low", "speedup_high")
    return {"baseline": every[0].verdict, "why": every[0].reason} | {
        "tried": [{name: getattr(row, name) for name in names} for row in every if row.change != "baseline"]
    }


def main() -> int:
    """Measure what was asked for, and keep it beside what is there; 1 where something was tried and has no figures."""
    asked = parser(__doc__)
    asked.add_argument("--scripts", default=",".join(SCRIPTS))
    asked.add_argument("--ladder", default="", help="changes by name, divided by commas: climb instead")
    asked.add_argument("--steps", type=int, default=16, help="of each of a ladder's runs")
    asked.add_argument("--seconds", type=float, default=300, help="of a run, after which it is ended")
    given = asked.parse_args()
    if unknown := set(given.scripts.split(",")) - set(SCRIPTS):
        asked.error(f"--scripts has {', '.join(sorted(unknown))}; expected some of {', '.join(SCRIPTS)}")
    gpus = torch.cuda.device_count()
    file = RESULTS / ("h200-scripts.json" if gpus else "cpu-run.json")
    said = origin_of("cuda", "device") if gpus else origin_of("cpu")
    said["cores"] = os.cpu_count()
    lacking = 0
    for name in given.scripts.split(","):
        script, start = SCRIPTS[name].on_gpu() if gpus else SCRIPTS[name], time.monotonic()
        if (why := cannot_run(script, gpus)) is not None:
            print(f"{name:12} left out: {why}", flush=True)
            continue
        before = json.loads(file.read_text(encoding="utf-8")).get(name, {}) if file.exists() else {}
        try:
            if given.ladder:
                cell = before | {"ladder": climb(script, given.ladder, given.steps, 4 * given.seconds) | said}
            else:
                cell = measure(script, given.seconds, once=gpus > 0) | said
                cell |= {key: before[key] for key in ("ladder",) if key in before}
        except (TimeoutError, ValueError, KeyError) as error:  # of the others: both ways of timing saw other steps
            print(f"{name:12} cannot be compared: {type(error).__name__}: {error}", flush=True)
            lacking += 1
            continue
        keep(file, name, cell | {"what": script.what, "script": script.path.name}, SCRIPTS)
        print(f"{name:12} {time.monotonic() - start:4.0f} s {json.dumps(cell)[:300]}", flush=True)
        lacking += "failed" in cell
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
