"""`trainstep plan` as its users meet it, calibration by records."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainstep.base.config import SIZES, StepConfig
from trainstep.base.errors import UsageError
from trainstep.base.hardware import require_device
from trainstep.bench import tracing
from trainstep.commands.cli import main
from trainstep.plan.communication import Link
from trainstep.plan.machine import GIB, NETWORK_HOP_S, Cluster, machine_of
from trainstep.plan.measured import calibrated
from trainstep.plan.roofline import OPTIMIZER_BYTES
from trainstep.plan.rows import PlanRequest, plan_records
from trainstep.report.subjects import TABLES, findings
from trainstep.report.tables import make_table
from trainstep.rows import (
    CeilingRow,
    PlanLimitRow,
    PlanMachineRow,
    PlanMemoryRow,
    PlanRow,
    PlanScalingRow,
    WorkloadRow,
    row_of,
)
from trainstep.rows.records import of_kind, read_records, write_whole

RESULTS = Path(__file__).parents[2] / "docs" / "results"
CALIBRATION = [RESULTS / "h200-calibration.jsonl"]
H200 = {"device": "NVIDIA H200", "device_memory_gib": 139.8}


def ceiling(operation, precision=None, **values):
    return CeilingRow(operation=operation, precision=precision, environment=H200, **values)


def test_a_calibration_replaces_the_datasheet():
    small = SIZES["small"]
    case = {"workload": "small", "precision": "bf16", "compile": "off", "attention": "sdpa", "optimizer": "adamw-fused"}
    bound = {"forward_ms": 12.0, "forward_issue_ms": 11.9, "backward_ms": 24.0, "optimizer_ms": 2.0}
    ahead = bound | {"forward_issue_ms": 3.0, "forward_ms": 120.0}
    fit = {"overhead_us": 25.0, "bus_gb_s": 300.0}
    records = [
        ceiling("matmul", "bf16", tflops=700.0),
        ceiling("copy", gb_s=4000.0),
        row_of(
            "collective fit",
            {"backend": "nccl", "collective": "broadcast", "world_size": 8, "dtype": "fp32"},
            {**fit, "bus_gb_s": 1.0},
        ),
        row_of(
            "collective fit", {"backend": "nccl", "collective": "all-reduce", "world_size": 2, "dtype": "fp32"}, fit
        ),
        row_of(
            "collective fit",
            {"backend": "gloo", "collective": "all-reduce", "world_size": 8, "dtype": "fp32"},
            {**fit, "bus_gb_s": 1.0},
        ),
        row_of("change", {"change": "one", **case}, bound),
        row_of("change", {"change": "two", **case}, ahead),
    ]
    machine = calibrated(records)
    assert machine.matmul_flops["bf16"] == machine.matmul_flops["bf16-pure"] == 7e14
    assert machine.matmul_flops["fp32"] == machine_of(require_device("H200")).matmul_flops["fp32"]
    assert machine.copy_bytes_per_s == 4e12
    assert machine.memory_bytes == int(139.8 * 2**30)
    assert machine.link == Link(25e-6, 300e9)
    assert machine.launch_s == {("off", "sdpa"): (1e-3, 2e-3)}
    moved = OPTIMIZER_BYTES["adamw-fused"] * small.num_parameters
    assert machine.optimizer_fraction["adamw-fused"] == pytest.approx(moved / 2e-3 / 4e12)
    assert machine.basis == ("measured on NVIDIA H200: rates, connections, launches, the optimizer's bandwidth")
    assert "connections" in calibrated(records[:2]).basis.partition("; by the ")[2]


def between(collective, ranks, hosts, bus_gb_s, backend="nccl"):
    case = {"backend": backend, "collective": collective, "world_size": ranks, "dtype": "fp32", "hosts": hosts}
    return row_of("collective fit", case, {"overhead_us": 80.0, "bus_gb_s": bus_gb_s}, environment=H200)


@pytest.mark.parametrize("order", [1, -1])
def test_groups_that_were_timed_at_once_come_before_one_alone(order):
    alone, together = between("all-reduce", 2, 2, 20.0), between("all-reduce", 2, 2, 10.0)
    together = dataclasses.replace(together, groups="columns")
    rows = [alone, together][::order]
    assert calibrated(rows).network["all-reduce"] == Link(80e-6, 10e9), "which is how the plan has them"
    within = [dataclasses.replace(row, hosts=None) for row in rows]
    assert calibrated(within).link == Link(80e-6, 10e9)


def test_collectives_between_hosts_calibrate_the_network_alone():
    """What eight ranks on two hosts send goes through four connections of each."""
    rows = [
        between("all-reduce", 8, 2, 100.0),
        between("all-gather", 2, 2, 20.0),
        between("broadcast", 2, 2, 1, "gloo"),
    ]
    machine = calibrated(rows)
    datasheet = machine_of(require_device("H200"))
    assert machine.link == datasheet.link
    assert machine.network == {"all-reduce": Link(80e-6, 25e9), "all-gather": Link(80e-6, 20e9)}
    assert machine.basis.startswith("measured on NVIDIA H200: the network; by the ")
    cluster, hop = Cluster(machine, 4, 2, 4e10), NETWORK_HOP_S
    assert cluster.group_link("all-reduce", 2, 4) == Link(80e-6 + 2 * hop, 25e9)
    assert cluster.group_link("all-gather", 2, 4).bus_bytes_per_s == 20e9
    assert cluster.group_link("reduce-scatter", 2, 4).bus_bytes_per_s == 4e10, "was not measured"
    assert cluster.group_link("all-reduce", 4) == Cluster(datasheet, 4, 2, 4e10).group_link("all-reduce", 4)


@pytest.mark.parametrize(("words", "expected"), [([], 25.0), (["--network-gb-s", "30"], 30.0)])
def test_what_is_said_of_the_network_comes_before_what_was_measured(tmp_path, words, expected):
    write_whole(tmp_path / "measured.jsonl", [between("all-reduce", 2, 2, 25.0)])
    given = [*QUICK, "--calibration", str(tmp_path / "measured.jsonl"), "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        main([*given, *words])
    assert stop.value.code == 0
    (row,) = of_kind(read_records(tmp_path / "results.jsonl"), PlanMachineRow)
    assert row.network_gb_s == expected


def test_calibrations_that_say_nothing():
    with pytest.raises(UsageError, match="names no device; say which with --device"):
        calibrated([CeilingRow(operation="copy", gb_s=1.0)])
    with pytest.raises(UsageError, match="several devices: NVIDIA H200, NVIDIA L4"):
        calibrated([ceiling("copy", gb_s=1.0), WorkloadRow(environment={"device": "NVIDIA L4"})])
    with pytest.raises(UsageError, match="neither ceilings, nor fits"):
        calibrated([WorkloadRow(environment=H200)])
    with pytest.raises(UsageError, match="is of NVIDIA H200, not of Tesla T4"):
        calibrated([ceiling("copy", gb_s=1.0)], require_device("T4"))
    with pytest.raises(UsageError, match="gb_s = None"):
        calibrated([ceiling("copy", gb_s=None)])


QUICK = ["plan", "--size", "small", "--gpus-per-node", "4", "--nodes", "2"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    out = tmp_path_factory.mktemp("plan")
    code = (
        "import sys\nfrom trainstep.commands.cli import main\n"
        f"try: main({[*QUICK, '--out', str(out)]!r})\n"
        "except SystemExit as stop: print('code', stop.code, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return found, out


def test_the_command_prints_and_writes_without_torch(planned):
    found, out = planned
    assert found.stdout.splitlines()[-1] == "code 0 False", found.stderr
    records = read_records(out / "results.jsonl")
    plans = of_kind(records, PlanRow)
    assert [row.case["strategy"] for row in plans] == [
        "single", "ddp", "sharded optimizer", "zero-2", "fsdp", "hsdp", "fsdp + tp"
    ]  # fmt: skip
    assert [row.replicas for row in plans] == [None] * 5 + [2, None], "one on each node"
    for row in plans:
        kinds = ("weights", "gradients", "optimizer_state", "activations", "buffers")
        total = sum(float(row.values[f"{kind}_gib"]) for kind in kinds)
        assert total == pytest.approx(row.values["peak_gib"], rel=1e-4)
        whole = float(row.values["compute_ms"]) + float(row.values["exposed_ms"])
        assert whole == pytest.approx(row.values["step_ms"], rel=1e-4)
        assert row.values["tokens_per_s"] == pytest.approx(
            row.case["gpus"] * 4 * 512 / float(row.values["step_ms"]) * 1e3, rel=1e-4
        )
    policies = {row.case["checkpointing"] for row in of_kind(records, PlanMemoryRow)}
    assert {"none", "every-1"} <= policies
    limits = of_kind(records, PlanLimitRow)
    assert {row.case["connection"] for row in limits} == {"within a node", "across nodes"}
    assert "tensor" in {row.case["axis"] for row in limits}
    most = {row.case["axis"]: row.values["most_gpus"] for row in limits if row.case["connection"] == "within a node"}
    assert all(isinstance(gpus, int) and gpus >= 1 for gpus in most.values()), most
    assert max(row.case["gpus"] for row in of_kind(records, PlanScalingRow)) == 16_384


def test_replicas_are_one_a_node_or_two_or_as_many_as_are_asked_for():
    def planned_replicas(gpus, nodes, asked=None):
        machine, step = machine_of(require_device("H200")), StepConfig(precision="bf16", attention="sdpa")
        request = PlanRequest("small", SIZES["small"], step, Cluster(machine, gpus, nodes, 4e10), replicas=asked)
        records = list(plan_records(request))
        scaled = {row.gpus for row in of_kind(records, PlanScalingRow) if row.strategy == "hsdp"}
        return [row.replicas for row in of_kind(records, PlanRow) if row.strategy == "hsdp"], scaled

    assert planned_replicas(2, 1) == ([], set()), "two GPUs of a node make one replica"
    assert planned_replicas(8, 1)[0] == [2]
    assert planned_replicas(8, 4)[0] == [4]
    found, scaled = planned_replicas(8, 4, asked=16)
    assert found == [16]
    assert scaled == {1 << power for power in range(4, 15)}


def test_blocks_are_gathered_together_as_asked():
    machine, step = machine_of(require_device("H200")), StepConfig(precision="bf16", attention="sdpa")
    machine = dataclasses.replace(
        machine, scheme_launch_s={("fsdp", "off", "bf16", each): 1.0 / each for each in (1, 2)}
    )
    request = PlanRequest("small", SIZES["small"], step, Cluster(machine, 4, 1, 4e10))

    def planned(**changes):
        rows = of_kind(plan_records(dataclasses.replace(request, **changes)), PlanRow)
        return {row.strategy: row for row in rows}

    one, two = planned(), planned(blocks_per_group=2)
    assert {name: row.blocks_per_group for name, row in two.items() if row.blocks_per_group} == {"fsdp": 2, "hsdp": 2}
    assert not any(row.blocks_per_group for row in one.values())
    assert all(two[name].peak_gib == row.peak_gib for name, row in one.items() if name not in ("fsdp", "hsdp"))
    assert all(two[name].buffers_gib > one[name].buffers_gib for name in ("fsdp", "hsdp"))
    assert [each["fsdp"].step_ms for each in (one, two)] == [12_000, 6_000], "launches of as many"
    with pytest.raises(UsageError, match="--blocks-per-group is 0; expected 1 or more"):
        planned(blocks_per_group=0)
    with pytest.raises(UsageError, match="--blocks-per-group is 13; the model has 12 blocks"):
        planned(blocks_per_group=13)


def test_the_page_marks_predictions_as_such(planned):
    page = (planned[1] / "report.html").read_text()
    assert "predicted, not measured" in page
    assert "launches by the host are not counted" in page
    assert "138.8 of a GPU’s 139.8 GiB are for tensors" in page.replace("'", "’").replace("&#39;", "’")


def planned_here(size, device="NVIDIA H200", **layout):
    step = StepConfig(batch=4, context=512, precision="bf16", attention="sdpa", optimizer="adamw-fused")
    machine = machine_of(require_device(device))
    cluster = Cluster(machine, layout.get("gpus_per_node", 8), layout.get("nodes", 1), 4e10)
    return list(plan_records(PlanRequest(size, SIZES[size], step, cluster)))


def test_gradients_are_staged_within_a_node_and_launches_shown_where_they_are_known():
    launches = {("ddp", "off", "bf16", 1): 1.0}
    machine = dataclasses.replace(machine_of(require_device("H200")), scheme_launch_s=launches)
    size, step = SIZES["small"], StepConfig(batch=1, context=128, precision="bf16", attention="sdpa")

    def planned(nodes):
        records = list(plan_records(PlanRequest("small", size, step, Cluster(machine, 4, nodes, 4e10))))
        (row,) = [row for row in of_kind(records, PlanRow) if row.strategy == "ddp"]
        scaled = {row.gpus: row.peak_gib for row in of_kind(records, PlanScalingRow) if row.strategy == "ddp"}
        return {row.strategy: row.launch_ms for row in of_kind(records, PlanRow)}, row, scaled

    launched, one, scaled = planned(1)
    assert launched["ddp"] == one.step_ms == pytest.approx(1e3 * size.num_layers)
    assert (one.limit, launched["fsdp"]) == ("launches", None)
    assert one.buffers_gib > 0 == planned(2)[1].buffers_gib
    assert scaled[2] > scaled[4] > scaled[8], "a share of the means of 2, of 4, and nothing"


def test_what_does_not_fit_by_less_than_the_reserve_says_so():
    """10B on 16 V100s: the peak is below the GPU's memory, and not below what is left of it for tensors."""
    records = planned_here("10B", "V100", nodes=2)
    (tight,) = [row for row in of_kind(records, PlanRow) if row.case["strategy"] == "fsdp + tp"]
    rows = [*of_kind(records, PlanRow), *of_kind(records, PlanMemoryRow)]
    (machine,) = of_kind(records, PlanMachineRow)
    room = machine.values["tensors_gib"]
    assert machine.values["memory_gib"] - room == pytest.approx(1.0)
    for row in rows:
        assert row.values["tensors_gib"] == room
        assert row.values["fits"] is (row.values["peak_gib"] <= room)
    assert tight.values["peak_gib"] == pytest.approx(29.62, abs=0.01)
    assert tight.values["fits"] is True, "30.73 of 31.73 GiB are for tensors"
    less = dataclasses.replace(machine_of(require_device("V100")), memory_bytes=int(29.7 * GIB))
    step = StepConfig(batch=4, context=512, precision="bf16", attention="sdpa", optimizer="adamw-fused")
    records = list(plan_records(PlanRequest("10B", SIZES["10B"], step, Cluster(less, 8, 2, 4e10))))
    (tight,) = [row for row in of_kind(records, PlanRow) if row.case["strategy"] == "fsdp + tp"]
    assert tight.values["peak_gib"] < 29.7
    assert tight.values["fits"] is False
    for kind in (PlanRow, PlanMemoryRow):
        assert "room for tensors (GiB) 28.7" in make_table(TABLES[kind], of_kind(records, kind)).caption
    (basis,) = [found.figures["basis"] for found in findings(records) if found.id == "plan.basis"]
    assert "28.7 of a GPU's 29.7 GiB are for tensors" in basis


def test_a_limit_is_a_whole_number_of_gpus_and_says_of_what():
    records = planned_here("10B")
    limits = {row.case["axis"]: row.values for row in of_kind(records, PlanLimitRow)}
    for values in limits.values():
        if (least := values.get("least_tokens_per_gpu")) is not None:
            assert values["most_gpus"] == 8 * values["tokens_per_gpu"] // least
    assert (limits["data (gradients as kept)"]["most_gpus"], limits["fsdp"]["most_gpus"]) == (3, 6)
    (fsdp,) = [row.values for row in of_kind(records, PlanRow) if row.case["strategy"] == "fsdp"]
    assert fsdp["communication_ms"] < fsdp["compute_ms"], "though 8 GPUs are beyond the limit of 6: other things count"
    assert "the matrix products alone" in make_table(TABLES[PlanLimitRow], of_kind(records, PlanLimitRow)).caption
    assert "memory traffic" in make_table(TABLES[PlanRow], of_kind(records, PlanRow)).caption


def test_no_limit_of_tensor_parallelism_where_the_model_cannot_be_divided():
    """25 heads on 8 GPUs."""
    records = planned_here("2025/xl")
    assert not [row for row in of_kind(records, PlanRow) if row.case["strategy"] == "fsdp + tp"]
    assert {row.case["axis"] for row in of_kind(records, PlanLimitRow)} == {"data (gradients as kept)", "fsdp"}


def test_one_gpu_a_file_and_a_calibration(tmp_path, capsys):
    config = tmp_path / "mine.toml"
    config.write_text('[model]\nsize = "tiny"\nnum_layers = 2\n[step]\nbatch = 3\ncontext = 64\nprecision = "fp32"\n')
    words = ["plan", "--config", str(config), "--gpus-per-node", "1", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--calibration", ",".join(map(str, CALIBRATION)), "--policies", "none,every-1"])
    assert stop.value.code == 0
    assert "mine" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    plan, *others = [row for row in rows if row["kind"] == "plan"]
    assert plan["case"]["strategy"] == "single"
    assert {row["case"]["gpus"] for row in others} == {1}
    assert {row["values"]["communication_ms"] for row in others} == {0.0}
    assert max(others, key=lambda row: row["values"]["tokens_per_s"])["values"]["step_ms"] >= plan["values"]["step_ms"]
    assert (plan["case"]["batch"], plan["case"]["context"], plan["case"]["precision"]) == (3, 64, "fp32")
    (machine,) = [row for row in rows if row["kind"] == "plan machine"]
    assert machine["values"]["basis"].startswith("measured on NVIDIA H200: rates, launches")


def test_what_does_not_fit_says_how_many_gpus_it_takes(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--size", "10B", "--gpus-per-node", "1", "--memory-gib", "80", "--out", str(tmp_path / "out")])
    assert stop.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Predicted: nothing fits. fsdp needs least" in said
    (fsdp,) = [
        row
        for row in of_kind(read_records(tmp_path / "out" / "results.jsonl"), PlanRow)
        if row.case["strategy"] == "fsdp"
    ]
    assert fsdp.values["fits"] is False
    assert f"With fsdp it takes {fsdp.values['smallest_gpus']} GPUs." in said


def own_plan(folder, *words):
    """The rows of `trainstep plan` on a user's model."""
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--workload", "examples.own_model:workload", *words, "--out", str(folder)])
    assert stop.value.code == 0
    return read_records(folder / "results.jsonl")


def test_a_users_model_is_planned_from_a_traced_step(tmp_path, capsys):
    records = own_plan(tmp_path, "--gpus-per-node", "4", "--policies", "none,every-1")
    plans = of_kind(records, PlanRow)
    assert [row.strategy for row in plans] == ["single", "ddp", "sharded optimizer", "zero-2", "fsdp", "hsdp"]
    single, *others, hybrid = plans
    assert (hybrid.gpus, hybrid.replicas) == (4, 2), "on one node two of two"
    assert plans[-2].peak_gib < hybrid.peak_gib < plans[1].peak_gib
    assert (single.batch, single.context, single.attention, single.optimizer) == (None,) * 4
    assert single.precision == "bf16"
    assert all(row.fits and row.tokens_per_s > 0 and row.limit for row in plans)
    assert {row.gpus for row in others} == {4}
    assert plans[-2].peak_gib < plans[1].peak_gib, "fsdp divides weights and state"
    memory = of_kind(records, PlanMemoryRow)
    assert len(memory) == 2 * len(plans)
    assert all(row.weights_gib > 0 and row.activations_gib > 0 for row in memory)
    assert {row.strategy for row in of_kind(records, PlanScalingRow)} == {row.strategy for row in plans}
    assert {row.axis for row in of_kind(records, PlanLimitRow)} == {"data (gradients as kept)", "fsdp"}
    (machine,) = of_kind(records, PlanMachineRow)
    assert machine.parameters == 478_720
    assert "one step was traced on tensors without data" in machine.basis
    said = " ".join(capsys.readouterr().out.split())
    assert "Predicted (precision bf16, checkpointing none): of what fits," in said
    tables = list((tmp_path / "tables").glob("*plan*.md"))
    assert tables


@pytest.mark.parametrize("flag", ["--tensor-parallel", "--blocks-per-group"])
def test_what_takes_the_shapes_of_a_model_is_refused_before_a_step_is_traced(flag, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tracing, "traced_cases", lambda *_, **__: pytest.fail("it takes a while"))
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--workload", "examples.own_model:workload", flag, "2", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert f"{flag} is planned for the built-in sizes alone" in " ".join(capsys.readouterr().err.split())
