"""Scripts on a GPU: phases by the device's events, and lines that wait."""

import itertools
import statistics

import pytest
import torch
from torch import nn

from tests.observe.measuring import line_of, measure
from trainstep.measure.profile.rows import UNKNOWN
from trainstep.observe.rows import kernel_records
from trainstep.observe.session import Plan
from trainstep.rows import KernelRow, PeakRow, ProfileRow, ScriptRow, WaitRow
from trainstep.rows.records import of_kind

pytestmark = pytest.mark.gpu


class Layers(nn.Sequential):
    """A class of the script's own, whose calls the observer sees."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["gpu.py", "4096"])
        log, rows = measure("gpu.py", folder, Plan(is_deep=True, profile_after=40, folder=str(folder)))
    return log, [*rows, *kernel_records(log, rows, folder)]


def test_steps_are_timed_by_the_device(found):
    log, rows = found
    (row,) = of_kind(rows, ScriptRow)
    assert row.on_gpu
    assert {"copies", "forward", "backward", "optimizer", "issue", "wait"} <= set(row.times)
    assert 1.2 * row.times["forward"].median < row.times["backward"].median < 4 * row.times["forward"].median
    assert row.n < 40, "steps after the profiler are not timed"
    timed = [step for step in log.steps[3:] if step.device and not step.tags]
    host = sum(sum(step.host) for step in timed)
    assert sum(sum(step.device) for step in timed) == pytest.approx(host, rel=0.02)


def test_lines_that_wait_are_told(found):
    waits = {(row.call, row.line): row for row in of_kind(found[1], WaitRow)}
    assert waits["item", line_of("gpu.py", "READ")].ms_per_step > 0.1
    lines = {line for call, line in waits if call == "a synchronising operation"}
    assert lines == {line_of("gpu.py", "COPY"), line_of("gpu.py", "MASK")}, "pageable memory is copied at once"
    (row,) = of_kind(found[1], ScriptRow)
    assert row.times["wait"].median > 0.1


def test_kernels_and_memory(found):
    (profile,) = of_kind(found[1], ProfileRow)
    assert not profile.on_cpu
    without = [(row.kernel, row.operator, row.ms) for row in of_kind(found[1], KernelRow) if row.phase == UNKNOWN]
    assert profile.phase_coverage > 0.95, without
    assert profile.sums_disagree is None
    (peak,) = of_kind(found[1], PeakRow)
    assert peak.peak_gib > peak.at_rest_gib > 0.3


def test_phases_are_those_of_events_by_hand(tmp_path):
    """Events recorded by the loop itself, at the same places."""
    marks = []

    def event():
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def loop():
        model = Layers(*(nn.Linear(4096, 4096) for _ in range(6)), nn.Linear(4096, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(512, 4096, device="cuda")
        for _ in range(40):
            at = [event()]
            outputs = model(x)
            at.append(event())
            loss = outputs.square().mean()
            at.append(event())
            loss.backward()
            at.append(event())
            optimizer.step()
            at.append(event())
            optimizer.zero_grad()
            marks.append(at)
        torch.cuda.synchronize()

    (row,) = of_kind(measure("loop", tmp_path, call=loop)[1], ScriptRow)
    for place, phase in enumerate(("forward", "loss", "backward", "optimizer")):
        by_hand = statistics.median(each[place].elapsed_time(each[place + 1]) for each in marks[3:])
        assert row.times[phase].median == pytest.approx(by_hand, rel=0.03, abs=0.05), phase
    step = statistics.median(first[0].elapsed_time(second[0]) for first, second in itertools.pairwise(marks[3:]))
    assert row.step_ms == pytest.approx(step, rel=0.03)
