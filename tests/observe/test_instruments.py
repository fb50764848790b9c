"""What looks into a few steps of a script: rows of its kernels, memory and dtypes, and steps that are left out."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.observe.measuring import measure
from trainstep.observe import instruments
from trainstep.observe.rows import kernel_records
from trainstep.observe.session import Plan
from trainstep.observe.steps import StepFinder
from trainstep.parallel import FullyShardedDataParallel
from trainstep.rows import AllocationRow, DtypeRow, FamilyRow, OwnerRow, PeakRow, ProfileRow, ScriptRow
from trainstep.rows.records import of_kind

WIDTH = 64
PARAMETERS = 16 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH + WIDTH + 1


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["plain.py", "24", str(WIDTH)])
        log, rows = measure("plain.py", folder, Plan(is_deep=True, profile_after=10, folder=str(folder)))
    return log, [*rows, *kernel_records(log, rows, folder)]


def test_steps_that_are_looked_into_are_not_timed(found):
    log, rows = found
    tags = {step.number: step.tags for step in log.steps if step.tags}
    assert tags == {5: {"recorded"}, 6: {"recorded"}} | {number: {"profiled"} for number in range(11, 16)}
    (row,) = of_kind(rows, ScriptRow)
    assert (row.steps_seen, row.left_out, row.instrumented, row.n) == (24, 3, 7, 14)
    assert row.notes is None


def test_kernels_are_placed_in_the_script_s_phases(found):
    (profile,) = of_kind(found[1], ProfileRow)
    assert (profile.profiled_n, profile.on_cpu) == (2, True)
    assert profile.phase_coverage > 0.95
    calls = {(row.phase, row.family): row.calls for row in of_kind(found[1], FamilyRow)}
    # Three products forward; backward one for each weight, and one for each input but the first.
    assert (calls["forward", "matmul"], calls["backward", "matmul"]) == (6, 5)
    assert ("loss", "reduction") in calls


def test_the_device_is_waited_for_before_the_first_recorded_step_and_after_the_last(tmp_path, monkeypatch):
    """A host that is ahead has launched kernels that run when recording begins, and has some left when it ends."""
    order = []
    profiler = SimpleNamespace(start=lambda: None, step=lambda: order.append("step"), stop=lambda: None)
    monkeypatch.setattr(instruments, "profiler_of_steps", lambda *given, **more: profiler)
    monkeypatch.setattr(instruments, "_settle", lambda device: order.append(f"wait for the {device}"))
    finder = StepFinder(lambda: None, lambda step: None)
    profiling = instruments._Profiling([], finder, 2, tmp_path, lambda call: call(), torch.device("cpu"))
    while profiling.next():
        pass
    assert order == ["step", "wait for the cpu", "step", "step", "wait for the cpu", "step"], "two warm up"


def test_memory_has_its_owners_and_phases(found):
    owners = {row.owner: row.mib * 2**20 for row in of_kind(found[1], OwnerRow) if row.is_total}
    assert owners["parameters"] == pytest.approx(4 * PARAMETERS, rel=1e-5)
    assert owners["gradients"] == pytest.approx(4 * PARAMETERS, rel=1e-5)
    assert 8 * PARAMETERS <= owners["optimizer state"] <= 8 * PARAMETERS + 64
    (peak,) = of_kind(found[1], PeakRow)
    assert peak.peak_phase == "optimizer"
    assert peak.at_rest_gib < peak.forward_peak_gib <= peak.peak_gib
    lines = {row.line.rpartition("/")[2].partition(":")[0] for row in of_kind(found[1], AllocationRow)}
    assert lines == {"plain.py"}, "no frame of ours"


def test_dtypes_of_modules(found):
    rows = {row.class_name: row for row in of_kind(found[1], DtypeRow)}
    assert (rows["Linear"].parameters, rows["Linear"].gradients, rows["Linear"].modules) == (("fp32",), ("fp32",), 3)
    assert rows["ReLU"].outputs == ("fp32",)


def test_a_step_with_two_optimizers_has_the_state_of_both_and_its_dtypes(tmp_path, monkeypatch):
    """The second one's update follows the first one's, after which a recording begins: no module was called yet."""
    monkeypatch.setattr("sys.argv", ["two.py", "24"])
    _, rows = measure("two.py", tmp_path, Plan(is_deep=True, profile_after=10, folder=str(tmp_path)))
    owners = {row.owner: row.mib * 2**20 for row in of_kind(rows, OwnerRow) if row.is_total}
    moments = 2 * 4 * (16 * 32 + 32)
    assert moments <= owners["optimizer state"] <= moments + 64
    assert "unknown" not in owners
    dtypes = {row.class_name: row for row in of_kind(rows, DtypeRow)}
    assert (dtypes["Linear"].outputs, dtypes["Linear"].gradients) == (("fp32",), ("fp32",))


def test_all_models_that_are_called_have_their_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPS", "24")
    _, rows = measure("gan.py", tmp_path, Plan(is_deep=True, profiled_steps=0, folder=str(tmp_path)))
    owners = {row.owner: row.mib * 2**20 for row in of_kind(rows, OwnerRow) if row.is_total}
    generator, discriminator = 4 * 32 + 32 + 32 * 32 + 32 + 32 * 16 + 16, 16 * 32 + 32 + 32 * 32 + 32 + 32 + 1
    parameters = 4 * (generator + discriminator)
    assert owners["parameters"] == pytest.approx(parameters, rel=1e-4)
    assert 2 * parameters <= owners["optimizer state"] <= 2 * parameters + 128
    assert owners["unknown"] < parameters / 8, "images that were made before the step that is recorded"
    modules = {row.module for row in of_kind(rows, DtypeRow)}
    assert {"Sequential.*", "Sequential 2.*"} <= modules


def test_gradients_that_ranks_share_are_known_once_they_are_averaged(tmp_path):
    """Until then, reading one of our sharded parameters' gradients is an error."""

    def train():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = FullyShardedDataParallel(nn.Sequential(nn.Linear(WIDTH, 1)))
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for _ in range(8):
                model(torch.randn(1, WIDTH)).square().mean().backward()
                model.finish_gradient_synchronization()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            dist.destroy_process_group()

    _, rows = measure("sharded", tmp_path, Plan(is_deep=True, profiled_steps=0, folder=str(tmp_path)), call=train)
    assert of_kind(rows, ScriptRow)[0].notes is None
    owners = {row.owner: row.mib * 2**20 for row in of_kind(rows, OwnerRow) if row.is_total}
    assert owners["parameters"] == pytest.approx(4 * (WIDTH + 1), rel=1e-5)
    assert owners["gradients"] == pytest.approx(4 * (WIDTH + 2), rel=0.02), "the bias is padded"


def test_too_few_steps_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plain.py", "24"])
    with pytest.raises(SystemExit):
        measure("plain.py", tmp_path, Plan(is_deep=True, steps=4, folder=str(tmp_path)))
    from trainstep.observe.log import log_path, read_log

    notes = read_log(log_path(tmp_path, 0)).notes
    assert [note.partition(" are too few to ")[2].split()[0] for note in notes] == ["record", "profile"]


def test_what_fails_when_a_step_is_looked_into_does_not_end_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["plain.py", "24"])

    def fails(*arguments):
        raise RuntimeError("no such thing")

    monkeypatch.setattr("trainstep.observe.instruments.StepWatch.phase", fails)
    log, rows = measure("plain.py", tmp_path, Plan(is_deep=True, profile_after=10, folder=str(tmp_path)))
    (row,) = of_kind(rows, ScriptRow)
    assert row.steps_seen == 24
    assert row.notes == ("looking into a step failed: RuntimeError: no such thing",)
    assert not of_kind(rows, PeakRow)
    assert not [step for step in log.steps[8:] if step.tags]
