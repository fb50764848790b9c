"""`trainstep run --ladder`: which changes make a script faster, proven on the script itself, and written into it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainstep.base.cores import busy, cores, load
from trainstep.base.errors import UsageError
from trainstep.base.files import aside, is_replaceable
from trainstep.base.guards import StopSignals, code_of
from trainstep.commands.output import CASE_FAILED, STOPPED, console_for_output, show_report
from trainstep.rows import BASELINE, PATCHED, ChangeRow

if TYPE_CHECKING:
    from trainstep.ladder.ladder import Ladder
    from trainstep.ladder.ranks import Leader
    from trainstep.ladder.scripts import ScriptRunner

BUDGET = "5m"
"""Time for a ladder of a script, with its patch, where none is given."""
SEEN = (
    "The script is started anew for every run, with equal seeds, and ended after {steps} updates. {place} Its output "
    "is in {folder}/*/output.txt."
)
HERE = "It runs in this folder: what it writes there, such as checkpoints and logs, each run writes again."
COPIED = "Each run has a copy of this folder, which is removed; what it writes elsewhere, each run writes again."
NOT_VERIFIED = "{path} was not written ({why})"


def climb_script(
    leader: Leader,
    out: Path,
    *,
    steps: int,
    names: str | None,
    at_once: bool,
    patch: Path | None,
    is_in_place: bool,
    is_alone: bool,
    budget: str,
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
        is_alone: whether no runs go beside one another.
        budget: the time for all runs, such as 3m.

    Raises:
        UsageError: no such change, a folder that cannot be written, or a file that is no diff in the patch's place,
            a working folder that cannot be copied, or no such time.
    """
    from rich.live import Live

    from trainstep.ladder.budget import Budget
    from trainstep.ladder.change import all_changes, chosen
    from trainstep.ladder.ladder import Ladder
    from trainstep.ladder.ranks import Interrupted
    from trainstep.ladder.scripts import ScriptRunner
    from trainstep.ladder.single import Script
    from trainstep.observe.copying import Copies
    from trainstep.observe.rows import script_records
    from trainstep.report.answer import Launch, change_line
    from trainstep.rows.records import RecordWriter

    changes, command, time_left = chosen(all_changes("script"), names), leader.command, Budget.of(budget)
    if patch is not None:
        _check_place(patch)
    console = console_for_output(to_stderr=True)
    console.print(f"trainstep run --ladder {command.name} → {out}, within {time_left}{busy(load(), cores())}")
    folder = out / "runs"
    copies = None if is_in_place else Copies(without=folder, stock=folder / "large")
    place = HERE if copies is None else f"{COPIED} {copies.linked}".strip()
    console.print(SEEN.format(steps=steps, place=place, folder=folder))
    # Without a thread of its own, which would take the signals that are for the script.
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
    script = Script(leader, folder, steps, copies, partial(live.update, refresh=True), time_left, is_alone)
    runner = ScriptRunner(script, are_named=names is not None, is_patched=patch is not None)
    under_way = [BASELINE]
    ladder = Ladder(changes, runner, at_once=at_once, budget=time_left, on_part=lambda name, _: under_way.append(name))
    writer = RecordWriter(out / "results.jsonl")
    is_interrupted, stop, said = False, None, list[str]()
    try:
        with StopSignals(raises=True), live:
            for row in ladder.climb():
                writer.write(row)
                console.print(change_line(row, row.reason or row.verdict))
            if patch is not None:
                under_way.append(PATCHED)
                patched, said = _patched(ladder, runner, patch)
                if patched is not None:
                    writer.write(patched)
                    console.print(change_line(patched, patched.reason or patched.verdict))
    except (Interrupted, KeyboardInterrupt) as error:
        is_interrupted, stop = True, next(iter(error.args), None)
        writer.write(runner.row(under_way[-1], {"status": "unsupported", "reason": "stopped", "verdict": "not tried"}))
        if patch is not None:
            said = [NOT_VERIFIED.format(path=patch, why="stopped before the patched script was verified")]
    finally:
        if copies is not None:
            copies.close()
    if runner.first is not None:
        for found in script_records([runner.first.log], command.name, runner.first.code):
            writer.write(found)
    writer.close()
    launch = Launch(f"trainstep run --ladder · {command.name}")
    show_report(writer.rows, out, console, launch, early=STOPPED * is_interrupted, kinds=(ChangeRow,))
    for line in said:
        console.print(line)
    if is_interrupted:
        return code_of(stop)
    if runner.judge is not None:
        return 0
    return runner.code if runner.code > 0 else CASE_FAILED


def _check_place(path: Path) -> None:
    """Before anything runs: whether a diff can be written there, over none but an earlier one.

    Raises:
        UsageError: another file is there, such as the script itself, or nothing can be.
    """
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)) or path.is_dir() or not is_replaceable(path):
        raise UsageError(f"--patch is {path}, where no file can be written; expected one in a folder that is there")
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(4) != b"--- ":
                raise UsageError(f"--patch is {path}, a file that is there and no diff; give the diff another name")


def _patched(ladder: Ladder, runner: ScriptRunner, path: Path) -> tuple[ChangeRow | None, list[str]]:
    """Write what was accepted into the script's text, run that, and offer it if it holds: a row, and what to say."""
    from trainstep.ladder.budget import OutOfTime
    from trainstep.ladder.patch import patch_of

    def none(why: str) -> list[str]:
        return [NOT_VERIFIED.format(path=path, why=why)]

    if not ladder.accepted:
        return None, none("no change was accepted")
    command = runner.script.command
    file = Path(command.target)
    if command.is_module:
        file = Path.cwd().joinpath(*command.target.split(".")).with_suffix(".py")
    found = patch_of(file, ladder.accepted, runner.settings)
    if not found.written:
        return None, none("no accepted change is a line that is certain to be the right one in your files")
    try:
        row = runner.check_sources(found.texts, found.written, ladder.top)
    except OutOfTime:
        return None, none(f"the budget of {runner.script.budget} ended before the patched script was verified")
    if not row.accepted:
        return row, none(f"the patched script is {row.verdict}{f': {row.reason}' if row.reason else ''}")
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
    return replace(row, code=str(path)), [f"{path} is verified: {names}. Apply it by: git apply {path}", *left]
