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

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tables import RESULTS
from tests.observe.by_hand import instrumented
from trainstep.measure.environment import describe
from trainstep.observe.log import log_path, read_log
from trainstep.report.subjects import run as subject
from trainstep.rows import ChangeRow, ScriptRow
from trainstep.rows.records import Row, of_kind, read_records

ROOT = Path(__file__).parents[1]
OWN, LIBRARIES = ROOT / "tests/observe/scripts", ROOT / "tests/realworld/scripts"
SAID_OF = ("torch", "date", "commit")


@dataclass(frozen=True)
class Script:
    """One of them."""

    what: str  # in the table
    path: Path
    arguments: tuple[str, ...] = ()  # FOLDER is a temporary one
    packages: tuple[str, ...] = ("torch",)  # one of them is needed
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    gathers: bool = False  # whether its ranks wait for each other in forward too
    folder: Path = ROOT  # from which it is run
    large: Mapping[str, str] = field(default_factory=dict)  # of its environment on a GPU: steps of 10 ms and more
    large_arguments: tuple[str, ...] = ()  # there in the place of its arguments; none for the same

    def on_gpu(self) -> Script:
        """As it is run on a GPU; one process alone sees one, or Trainer would divide batches between all."""
        seen = (
            {}
            if self.ranks > 1
            else {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        )
        arguments = self.large_arguments or self.arguments
        return replace(self, arguments=arguments, environment={**self.environment, **self.large, **seen})


TOKENS = {"WIDTH": "1024", "LAYERS": "8", "SEQ": "512", "BATCH": "8"}
PIXELS = {"WIDTH": "1024", "LAYERS": "8", "IMAGE": "128", "BATCH": "16"}
WIDE = {"WIDTH": "16384", "BATCH": "512"}


def _trainer(name: str, words: str, package: str = "transformers", large: Mapping[str, str] = TOKENS) -> Script:
    return Script(f"Trainer, {words}", LIBRARIES / "trainer.py", ("FOLDER", name, "24"), (package,), large=large)


def _loop(name: str, words: str, package: str = "torch", large: Mapping[str, str] = PIXELS) -> Script:
    return Script(f"plain loop, {words}", LIBRARIES / "loop.py", (name, "24"), (package,), large=large)


def _wide(
    words: str, path: Path, arguments: tuple[str, ...], *packages: str, large: Mapping[str, str] = WIDE
) -> Script:
    return Script(words, path, arguments, packages, environment={"WIDTH": "768", "STEPS": "30"}, large=large)


def _ranks(words: str, name: str, **options: Any) -> Script:
    large = {"WIDTH": "4096", "BATCH": "128"}
    return Script(words, OWN / name, ranks=2, environment={"WIDTH": "256"}, large=large, **options)


SCRIPTS = {
    "pretrain": Script(
        "nanoGPT's shape", OWN / "pretrain.py", ("40", "64", "128"), large_arguments=("40", "768", "1024")
    ),
    "llama": _trainer("llama", "Llama"),
    "gpt2": _trainer("gpt2", "GPT-2"),
    "bert": _trainer("bert", "BERT"),
    "t5": _trainer("t5", "T5"),
    "qwen3": _trainer("qwen3", "Qwen3"),
    "mixtral": _trainer("mixtral", "Mixtral"),
    "vit": _trainer("vit", "ViT", large=PIXELS),
    "whisper": _trainer("whisper", "Whisper"),
    "lora": _trainer("lora", "LoRA of PEFT", "peft"),
    "accelerate": _wide("Accelerate", LIBRARIES / "accelerated.py", (), "accelerate"),
    "lightning": _wide("Lightning", LIBRARIES / "lightning_fit.py", ("FOLDER",), "lightning", "pytorch_lightning"),
    "unet": _loop("unet", "UNet of diffusers", "diffusers"),
    "resnet": _loop("resnet", "ResNet", "transformers", PIXELS | {"BATCH": "64"}),
    "timm_vit": _loop("timm_vit", "ViT of timm", "timm"),
    "timm_resnet": _loop("timm_resnet", "ResNet of timm", "timm", PIXELS | {"BATCH": "64"}),
    "lstm": _loop("lstm", "LSTM", large=TOKENS),
    "gan": _wide("GAN, two optimizers", OWN / "gan.py", (), "torch", large={"WIDTH": "8192", "BATCH": "1024"}),
    "ddp": _ranks("DDP, two ranks", "ddp.py"),
    "fsdp": _ranks("FSDP2, two ranks", "fsdp.py", gathers=True),
}


def run(
    script: Script,
    out: Path,
    path: Path,
    options: Sequence[str],
    limit_s: float | None = None,
    until_s: float | None = None,
) -> tuple[list[Row], str]:
    """Run it under `trainstep run`: the rows, and the last line of what was said.

    Args:
        limit_s: after which it is ended.
        until_s: after which it is interrupted, as by Ctrl-C, and keeps what it has.

    Raises:
        subprocess.TimeoutExpired: it took too long.
    """
    launch = [sys.executable, "-m"]
    if script.ranks > 1:
        launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={script.ranks}", "-m"]
    arguments = [str(out / "written") if each == "FOLDER" else each for each in script.arguments]
    words = [*launch, "trainstep", "run", "--out", str(out), *options, str(path), *arguments]
    environment = os.environ | script.environment | {"BY_HAND": str(out / "by-hand")}
    out.mkdir(parents=True)
    with (out / "said").open("w") as said:
        process = subprocess.Popen(words, cwd=script.folder, env=environment, stdout=said, stderr=said)
        try:
            if until_s is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(until_s)
                process.send_signal(signal.SIGINT)
            process.wait(limit_s)
        finally:
            process.kill()
    rows = read_records(out / "results.jsonl") if (out / "results.jsonl").exists() else []
    lines = [line for line in (out / "said").read_text(errors="replace").splitlines() if line.strip()]
    return rows, lines[-1] if lines else "it said nothing"


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


def told(rows: Sequence[Row]) -> list[str]:
    """What was found, shortly."""
    said: list[str] = []
    waits: list[str] = []
    for finding in (each for rule in subject.RULES for each in rule(rows)):
        figures: Mapping[str, Any] = finding.figures
        if finding.id == "script.accumulates":
            said.append(f"{figures['backwards']:g} backward passes a step")
        elif finding.id == "script.evaluated":
            said.append(f"{figures['evaluated']} steps with an evaluation")
        elif finding.id == "data.bound":
            said.append(f"waits for data at {figures['loader']}")
        elif finding.id == "waits.would":
            first, *others = figures["lines"]
            said.append(f"reads tensors at {first}" + (f" and {len(others)} more lines" if others else ""))
        elif finding.id == "waits.line":
            waits.append(f"{figures['line']} ({figures['call']}, {figures['share']:.0%} of the step)")
        elif finding.id == "launches.script":
            said.append("launches set its pace")
        elif finding.id == "compiled.again":
            said.append(f"compiled {figures['compilations']} times at {figures['line']}")
        elif finding.id in ("ranks.late", "ranks.even"):
            said.append(f"rank {figures['rank']} is late" if finding.id == "ranks.late" else "no rank is late")
    if waits:
        said.append(f"waits for the GPU at {waits[0]}" + (f" and {len(waits) - 1} more lines" if waits[1:] else ""))
    return list(dict.fromkeys(said))


def measure(script: Script, limit_s: float, *, once: bool = False) -> dict[str, Any]:
    """Both runs of a script; with `once` that with the timers alone, from which everything is taken then."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--profiled-steps", "0", "--no-memory"]
        edited = folder / script.path.name
        edited.write_text(instrumented(script.path.read_text(encoding="utf-8")), encoding="utf-8")
        timed, last = run(script, folder / "by-hand", edited, options, limit_s)
        rows = timed
        if not once:
            rows, last = run(script, folder / "as-it-is", script.path, options, limit_s)
        every, same = ([row for row in of_kind(each, ScriptRow) if not row.rank] for each in (rows, timed))
        written = folder / "by-hand" / "by-hand-0"
        failed = [row.reason for row in (*every, *same) if row.status != "ok"]
        if failed or not every or not written.exists():
            return {"failed": f"{failed[0] if failed else 'nothing was measured'}; its last line: {last}"}
        by_hand, log = json.loads(written.read_text()), read_log(log_path(folder / "by-hand", 0))
    parts = []
    for place, (row, again) in enumerate(zip(every, same, strict=True)):
        own = [step for step in log.steps if step["updated"] == list(again.optimizers or ())]
        theirs = by_hand if len(every) == 1 else [step for step in by_hand if step["of"] == place]
        theirs = theirs[: len(own)]  # after the script's end come steps that find out what hooks cost
        usual = [pair for pair in zip(own, theirs, strict=True) if "evaluations" not in pair[0]][again.left_out :]
        times = [each.get("device", each["host"]) for each, _ in usual]
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
        options = ["--ladder", "--steps", str(steps), "--changes", changes]
        rows, last = run(script, Path(name) / "ladder", script.path, options, limit_s)
    every = of_kind(rows, ChangeRow)
    if not every:
        return {"failed": last}
    names = ("change", "verdict", "accepted", "reason", "speedup", "speedup_low", "speedup_high")
    return {"baseline": every[0].verdict, "why": every[0].reason} | {
        "tried": [{name: getattr(row, name) for name in names} for row in every if row.change != "baseline"]
    }


def main() -> int:
    """Measure what was asked for, and keep it beside what is there; 1 where something was tried and has no figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", default=",".join(SCRIPTS))
    parser.add_argument("--ladder", default="", help="changes by name, divided by commas: climb instead")
    parser.add_argument("--steps", type=int, default=16, help="of each of a ladder's runs")
    parser.add_argument("--seconds", type=float, default=300, help="of a run, after which it is ended")
    given = parser.parse_args()
    if unknown := set(given.scripts.split(",")) - set(SCRIPTS):
        parser.error(f"--scripts has {', '.join(sorted(unknown))}; expected some of {', '.join(SCRIPTS)}")
    gpus = torch.cuda.device_count()
    file = RESULTS / ("h200-scripts.json" if gpus else "cpu-run.json")
    environment = describe(torch.device("cuda" if gpus else "cpu"))
    said = {each: environment[each] for each in SAID_OF} | {"cores": os.cpu_count()}
    if gpus:
        said["device"] = environment["device"]
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    lacking = 0
    for name in given.scripts.split(","):
        script, start = SCRIPTS[name].on_gpu() if gpus else SCRIPTS[name], time.monotonic()
        if (why := cannot_run(script, gpus)) is not None:
            print(f"{name:12} left out: {why}", flush=True)
            continue
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        before = kept.get(name, {})
        try:
            if given.ladder:
                cell = before | {"ladder": climb(script, given.ladder, given.steps, 4 * given.seconds) | said}
            else:
                cell = measure(script, given.seconds, once=gpus > 0) | said
        except subprocess.TimeoutExpired as error:
            print(f"{name:12} was ended after {error.timeout:.0f} s", flush=True)
            lacking += 1
            continue
        except (ValueError, KeyError) as error:  # both ways of timing saw other steps
            print(f"{name:12} cannot be compared: {type(error).__name__}: {error}", flush=True)
            lacking += 1
            continue
        cell |= {"what": script.what, "script": script.path.name}
        cell |= {"ladder": before["ladder"]} if "ladder" in before and not given.ladder else {}
        kept[name] = cell
        kept = {each: kept[each] for each in SCRIPTS if each in kept}
        file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(f"{name:12} {time.monotonic() - start:4.0f} s {json.dumps(cell)[:300]}", flush=True)
        lacking += "failed" in cell
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
