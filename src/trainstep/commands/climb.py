"""`trainstep run --ladder`: which changes make a script faster, proven on the script itself, and written into it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainstep.base.cores import busy, cores, load
from trainstep.base.errors import UsageError
from trainstep.base.files import aside, is_replaceable
from trainstep.base.guards import StopSignals, code_of
from trainstep.commands.output import CASE_FAILED, console_for_output, show_report

if TYPE_CHECKING:
    from trainstep.ladder.change import Change
    from trainstep.ladder.ranks import Leader
    from trainstep.ladder.scripts import ScriptRunner
    from trainstep.rows.records import Row

SEEN = (
    "The script is started anew for every run, with equal seeds, and ended after {steps} updates. {place} Its output "
    "is in {folder}/*/output.txt."
)
HERE = "It runs in this folder: what it writes there, such as checkpoints and logs, each run writes again."
LEFT = (
    "{least} to {most} runs are left, {first:.0f} to {last:.0f} minutes at the {own_s:.1f} s of the first; --changes "
    "names fewer changes, and Ctrl-C keeps what was measured."
)
COPIED = "Each run has a copy of this folder, which is removed; what it writes elsewhere, each run writes again."


def climb_script(
    leader: Leader, out: Path, *, steps: int, names: str | None, at_once: bool, patch: Path | None, is_in_place: bool
) -> int:
    """Climb, and report; the exit code.

    Args:
        leader: runs the script.
        out: the report's folder.
        steps: updates of each run.
        names: of changes, divided by commas; None for all.
        at_once: whether all of them are tried together first.
        patch: the file that a diff is written to.
        is_in_place: whether it runs in the working folder itself, and not in copies of it.

    Raises:
        UsageError: no such change, a folder that cannot be written, or a file that is no diff in the patch's place,
            or a working folder that cannot be copied.
    """
    from trainstep.ladder.change import all_changes, chosen
    from trainstep.ladder.ladder import Ladder
    from trainstep.ladder.ranks import Interrupted
    from trainstep.ladder.scripts import ScriptRunner
    from trainstep.ladder.single import Script
    from trainstep.observe.copying import Copies
    from trainstep.observe.rows import script_records
    from trainstep.report.answer import Launch
    from trainstep.rows import BASELINE, ChangeRow
    from trainstep.rows.records import RecordWriter

    changes, command = chosen(all_changes("script"), names), leader.command
    if patch is not None:
        _check_place(patch)
    console = console_for_output(to_stderr=True)
    console.print(f"trainstep run --ladder {command.name} → {out}{busy(load(), cores())}")
    folder = out / "runs"
    copies = None if is_in_place else Copies(without=folder, stock=folder / "large")
    place = HERE if copies is None else f"{COPIED} {copies.linked}".strip()
    console.print(SEEN.format(steps=steps, place=place, folder=folder))
    script = Script(leader, folder, steps, copies, lambda text: console.print(text))
    runner = ScriptRunner(script, are_named=names is not None)
    ladder = Ladder(changes, runner, at_once=at_once)
    writer = RecordWriter(out / "results.jsonl")
    is_interrupted, stop = False, None
    said: list[str] = []
    try:
        with StopSignals(raises=True):
            for row in ladder.climb():
                writer.write(row)
                console.print(f"  {row.change}: {row.verdict}{f' ({row.reason})' if row.reason else ''}")
                if row.verdict == BASELINE:
                    for line in _left(runner.runs_left(changes, at_once=at_once), script.own_s or 0.0):
                        console.print(line)
            if patch is not None:
                patched, said = _patched(ladder.accepted, runner, patch)
                if patched is not None:
                    writer.write(patched)
    except (Interrupted, KeyboardInterrupt) as error:
        is_interrupted, stop = True, next(iter(error.args), None)
    finally:
        if copies is not None:
            copies.close()
    if runner.first is not None:
        for found in script_records([runner.first.log], command.name, runner.first.code):
            writer.write(found)
    writer.close()
    launch = Launch(f"trainstep run --ladder · {command.name}")
    show_report(writer.rows, out, console, launch, is_interrupted=is_interrupted, kinds=(ChangeRow,))
    for line in said:
        console.print(line)
    if is_interrupted:
        return code_of(stop)
    if runner.judge is not None:
        return 0
    return runner.code if runner.code > 0 else CASE_FAILED


def _left(runs: tuple[int, int], own_s: float) -> list[str]:
    """Say how long the ladder may take, where a run of the script takes `own_s`; empty where nothing is left."""
    (least, most), minutes = runs, own_s / 60
    return [LEFT.format(least=least, most=most, first=least * minutes, last=most * minutes, own_s=own_s)] * bool(most)


def _check_place(path: Path) -> None:
    """Before anything runs: whether a diff can be written there, over none but an earlier one.

    Raises:
        UsageError: another file is there, such as the script itself, or nothing can be.
    """
    is_folder_open = path.parent.is_dir() and os.access(path.parent, os.W_OK)
    if not is_folder_open or path.is_dir() or not is_replaceable(path):
        raise UsageError(f"--patch is {path}, where no file can be written; expected one in a folder that is there")
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(4) != b"--- ":
                raise UsageError(f"--patch is {path}, a file that is there and no diff; give the diff another name")


def _patched(accepted: Sequence[Change], runner: ScriptRunner, path: Path) -> tuple[Row | None, list[str]]:
    """Write what was accepted into the script's text, run that, and offer it if it holds: a row, and what to say."""
    from trainstep.ladder.patch import patch_of

    if not accepted:
        return None, ["No patch: nothing was accepted."]
    command = runner.script.command
    file = Path(command.target)
    if command.is_module:
        file = Path.cwd().joinpath(*command.target.split(".")).with_suffix(".py")
    found = patch_of(file, accepted, runner.settings)
    if not found.written:
        return None, ["No patch: no accepted change is a line that is certain to be the right one in your files."]
    row = runner.check_sources(found.texts, found.written)
    if not row.accepted:
        return row, [f"No patch: with it, the script is {row.verdict}{f' ({row.reason})' if row.reason else ''}."]
    diff, names = found.diff(Path.cwd()), ", ".join(each.name for each in found.written)
    try:
        with aside(path, f"the diff of {names}:") as draft:
            draft.write_bytes(diff)
    except UsageError as error:
        return row, [str(error), diff.decode(errors="replace")]
    left = [f"Not in it: {each.name} ({each.line.text})." for each in found.left]
    if any(each.precision == "bf16" for each in found.written) and any(
        model["floats"] is None for model in runner.settings["models"]
    ):
        left.append(
            "Tensors inside of what the model returns stay bf16: .float() where NumPy or a loss of yours takes one."
        )
    return replace(row, code=str(path)), [f"Written to {path}: {names}.", *left]
