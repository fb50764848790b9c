"""Faults planted in scripts that train on a GPU: each is named with its line, and a change that mends it gains what the
script gains that is mended by hand. Runs take turns until the gain is clear, as they do for users: two runs of a script
that compiles in each step may be a quarter apart. A minute or two in all."""

import json
import statistics

import pytest
import torch

from tests.ladder.forked import forked_runs  # noqa: F401
from tests.ladder.given import ladder_of
from tests.observe.measuring import SCRIPTS, alone, line_of
from trainstep.ladder.change import all_changes
from trainstep.ladder.single import Script
from trainstep.observe.log import log_path, read_log
from trainstep.observe.rows import script_records
from trainstep.report.subjects import run as subject
from trainstep.rows import ScriptRow, WaitRow
from trainstep.rows.records import of_kind

STEPS = 30
FILE = SCRIPTS / "faults.py"
FAULTS = {
    "reads": (
        None,
        ("waits.line", "READ"),
        {"total += loss.item()": "total += loss.detach()", "print(step, loss.item())": "pass"},
    ),
    "starves": ("loader workers", ("data.bound", "LOADER"), {"num_workers=1": "num_workers=4"}),
    "recompiles": ("compiled for any size", ("compiled.again", "AGAIN"), {"dynamic=False": "dynamic=True"}),
}


def mended(changes):
    text = FILE.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return {str(FILE): text}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch finds none")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_its_fix_gains_what_it_claims(fault, tmp_path, forked_runs):  # noqa: F811
    check(fault, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["starves", "recompiles"])
def test_those_that_a_cpu_has_too(fault, tmp_path, forked_runs):  # noqa: F811
    check(fault, tmp_path)


def check(fault, folder):
    rung, (finding, marker), changes = FAULTS[fault]
    rungs = [
        each for each in all_changes("script") if each.name == rung
    ]  # none where the script is mended by hand alone
    ladder = ladder_of(Script(alone([str(FILE), fault, str(STEPS + 1)]), folder, STEPS), rungs)
    baseline, *further = ladder.climb()
    assert baseline.verdict == "baseline", baseline.reason

    rows = script_records([read_log(log_path(ladder.runner.first.folder, 0))], FILE.name, 0)
    said = {found.id: found.sentence for rule in subject.RULES for found in rule(rows)}
    assert line_of(FILE.name, marker) in said[finding], json.dumps(said)
    (step,) = of_kind(rows, ScriptRow)
    if fault == "starves":
        assert "1 worker, memory not pinned" in step.loader
    if fault == "reads":
        waits = {row.line for row in of_kind(rows, WaitRow) if row.calls_per_step >= 0.9}
        assert {line_of(FILE.name, "READ"), line_of(FILE.name, "PRINT")} <= waits

    patched = ladder.runner.check_sources(mended(changes), [])
    assert patched.accepted, f"{patched.verdict} {patched.speedup} {patched.reason}"
    if rung is None:
        return
    (fixed,) = further
    assert fixed.accepted, f"{fixed.verdict} {fixed.gain} {fixed.reason}"
    assert fixed.speedup_low <= patched.speedup_high, "intervals that hold between runs"
    assert patched.speedup_low <= fixed.speedup_high
    # they took turns with the script, not with each other: what else the machine did then is less in a median step
    by_hand, from_outside = (statistics.median(row.samples["step"]) for row in (patched, fixed))
    assert 0.8 < by_hand / from_outside < 1.25, "as fast as by hand: what it was before differs between runs"
