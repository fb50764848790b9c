"""Traces and exports that others recorded: several devices, steps of other names, transfers, graphs, odd devices."""

import json
import sqlite3
import tomllib
from pathlib import Path

import pytest

from tests.measure.profile.test_nsys import OTHER, PROCESS, export, global_id
from tests.measure.profile.test_trace import event, launch
from trainstep.base.errors import UsageError
from trainstep.bench.profile import records_from_file
from trainstep.report.page import render
from trainstep.report.subjects import findings, make_tables
from trainstep.rows import FamilyRow, KernelRow, ProfileRow, TimelineRow
from trainstep.rows.records import of_kind

GEMM, NCCL = "nvjet_gemm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
ADD = "vectorized_elementwise_kernel<4, AddFunctor>"


def on_gpu(name, start, duration, *, device=0, stream=7, category="kernel", **more):
    return event(category, name, start, duration, tid=stream, pid=device, device=device, stream=stream, **more)


def rows_of_trace(tmp_path, *events, **more):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": list(events), **more}))
    return list(records_from_file(path))


def profiles(rows):
    return of_kind(rows, ProfileRow)


def profile_of_trace(tmp_path, *events):
    (profile,) = profiles(rows_of_trace(tmp_path, *events))
    return profile


def found(rows):
    return {each.id.removeprefix("kernels."): each for each in findings(rows) if each.id.startswith("kernels.")}


def texts(rows):
    """Everything that a reader sees: tables of files and terminal, findings, the page."""
    tables = [table for place in ("files", "terminal") for table in make_tables(rows, place)]
    cells = [text for table in tables for row in table.texts() for text in (table.caption, *table.columns, *row)]
    return "\n".join([*cells, *(each.sentence for each in findings(rows)), render(rows)])


# Vendors

VENDORS = tomllib.loads(Path(__file__).with_name("vendors.toml").read_text(encoding="utf-8"))


def two_steps(vendor):
    """A step's work runs on from 1,000 µs, when two others begin to be recorded: nothing says who launched it."""
    runtime, step = VENDORS[vendor]["runtime"], VENDORS[vendor]["step"]
    streams = [20 if family == "communication" else 7 for *_, family in step]
    for place, (_, name, _) in enumerate(step):
        yield on_gpu(name, 1005.0 + 100 * place, 100.0, stream=streams[place], correlation=place)
    for start in (1000.0, 2000.0):
        yield event("user_annotation", f"ProfilerStep#{start / 1000:.0f}", start, 1000.0)
        for place, (operator, name, _) in enumerate(step):
            number, host = int(start) + place, start + 100 * place
            yield event("cpu_op", operator, host, 20.0)
            yield launch(f"{runtime}LaunchKernel", host + 5, number, category=f"{runtime}_runtime")
            yield on_gpu(name, host + 450, 100.0, stream=streams[place], correlation=number)


@pytest.mark.parametrize("vendor", VENDORS)
def test_work_queued_before_the_window_counts_into_no_step(tmp_path, vendor):
    profile = profile_of_trace(tmp_path, *two_steps(vendor))
    assert (profile.profiled_n, profile.kernels, profile.kernels_ms, profile.busy_ms) == (2, 4, 0.4, 0.4)
    assert (profile.communication_ms, profile.outside_steps_ms) == (0.1, 0.2)


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_operator_says_what_a_kernel_of_any_name_computes(tmp_path, vendor):
    rows = rows_of_trace(tmp_path, *two_steps(vendor))
    of_step = {row.family: row.ms for row in of_kind(rows, FamilyRow) if row.phase == "step"}
    assert of_step == {family: 0.1 for *_, family in VENDORS[vendor]["step"]}
    assert (profiles(rows)[0].matmul_share_step, profiles(rows)[0].undecided_share) == (0.25, 0)


@pytest.mark.parametrize(
    ("operator", "name", "share"),
    [
        (None, "my_kernel", None),
        ("MyExperts", "expert_forward", None),
        (None, "void at::native::embedding_kernel<float>(int)", 0),
        ("aten::embedding", "lookup", 0),
        ("aten::addmm", "lookup", 1),
        (None, "igemm_bwd_gtcx3_nchw_fp32", 1),
    ],
)
def test_where_neither_operator_nor_name_decides_the_share_of_products_is_unknown(tmp_path, operator, name, share):
    inside = [event("cpu_op", operator, 0.0, 50.0)] if operator else []
    rows = rows_of_trace(
        tmp_path, *inside, launch("hipLaunchKernel", 10.0, 3, category="hip_runtime"),
        on_gpu(name, 20.0, 30.0, correlation=3), on_gpu(ADD, 60.0, 1.0),
    )  # fmt: skip
    (profile,) = profiles(rows)
    assert profile.matmul_share_step == (share and pytest.approx(30 / 31))
    unknown = found(rows).get("matmuls-unknown")
    assert (unknown is None) is (share is not None)
    assert unknown is None or unknown.figures == {"undecided_share": pytest.approx(30 / 31)}


# Several devices


def two_devices(step="step:0"):
    return [
        event("user_annotation", step, 0.0, 1000.0),
        on_gpu(GEMM, 100.0, 400.0),
        on_gpu(NCCL, 100.0, 400.0, device=1, stream=20),
        on_gpu(GEMM, 600.0, 100.0, device=1),
    ]


def test_communication_of_one_device_is_not_hidden_by_another_s_kernels(tmp_path):
    rows = rows_of_trace(tmp_path, *two_devices())
    first, second = profiles(rows)
    assert (first.device, second.device) == ("GPU 0", "GPU 1")
    assert first.devices == second.devices == 2
    assert first.communication_ms is None
    assert (second.communication_ms, second.communication_overlapped_ms) == (0.4, 0.0)
    assert (first.kernels_ms, second.kernels_ms) == pytest.approx((0.4, 0.5))
    for kind in (FamilyRow, KernelRow, TimelineRow):
        assert {row.device for row in of_kind(rows, kind)} == {"GPU 0", "GPU 1"}
    devices = found(rows)["devices"]
    assert devices.figures["devices"] == 2
    assert devices.figures["hidden_shares"] == ("GPU 1: 0%",)
    assert "GPU 1" in texts(rows)


def test_a_trace_of_one_device_names_none(tmp_path):
    (profile,) = profiles(rows_of_trace(tmp_path, event("user_annotation", "step:0", 0, 9), on_gpu(GEMM, 1, 2)))
    assert (profile.device, profile.devices) == (None, None)
    assert "devices" not in found([profile])


def test_gaps_and_steps_are_each_device_s_own(tmp_path):
    first, second = profiles(rows_of_trace(tmp_path, *two_devices()))
    assert first.gaps is None
    assert (second.gaps, second.gaps_ms) == (1, 0.1)
    assert first.profiled_n == second.profiled_n == 1


@pytest.mark.parametrize("apart", [0, 1])
def test_kernels_of_processes_in_one_file_are_placed_where_their_launches_have_ids_of_their_own(tmp_path, apart):
    """Two ranks' traces put into one file: correlation ids are unique within a process alone."""
    ranks = []
    for rank in (0, 1):
        ranks += [
            event("user_annotation", "step:0", 0.0, 1000.0, pid=100 + rank),
            event("user_annotation", f"phase:{('forward', 'backward')[rank]}", 0.0, 900.0, pid=100 + rank),
            {**launch("cudaLaunchKernel", 10.0, 7 + apart * rank), "pid": 100 + rank},
            on_gpu(GEMM, 100.0, 50.0, device=rank, correlation=7 + apart * rank),
        ]
    for profile in profiles(rows_of_trace(tmp_path, *ranks)):
        assert profile.phase_coverage == apart, "else it is not known which process launched the kernel"
        assert any("several processes" in note for note in profile.notes or ()) is not bool(apart)
        assert profile.profiled_n == 1


def test_processes_of_an_nsys_export_are_devices_of_their_own(tmp_path):
    """Under CUDA_VISIBLE_DEVICES every process calls its device 0."""
    kernels = [(PROCESS, 100_000, 130_000, 77, 1), (OTHER, 100_000, 120_000, 77, 2)]
    rows = list(records_from_file(export(tmp_path / "two.sqlite", kernels=kernels, leave_out=["NVTX_EVENTS"])))
    assert [row.device for row in profiles(rows)] == [f"GPU 0 of process {PROCESS}", f"GPU 0 of process {OTHER}"]
    assert [row.kernels for row in profiles(rows)] == [1, 1]


# Steps


@pytest.mark.parametrize("name", ["ProfilerStep#{}", "step {}", "step_{}", "Iteration {}", "iter{}", "train_step:{}"])
def test_steps_by_other_names_are_steps(tmp_path, name):
    steps = []
    for number in (3, 4, 5):
        steps.append(event("user_annotation", name.format(number), 1000.0 * number, 900.0))
        steps.append(launch("cudaLaunchKernel", 1000.0 * number + 10, number))
        steps.append(on_gpu(GEMM, 1000.0 * number + 20, 100.0, correlation=number))
    profile = profile_of_trace(tmp_path, *steps)
    assert (profile.has_steps, profile.profiled_n, profile.kernels) == (True, 3, 1)
    assert profile.kernels_ms == pytest.approx(0.1)


def test_ranges_of_one_name_are_a_step_each(tmp_path):
    steps = [event("user_annotation", "train_step", 1000.0 * number, 900.0) for number in range(4)]
    profile = profile_of_trace(tmp_path, *steps, *(on_gpu(GEMM, 1000.0 * number + 20, 100.0) for number in range(4)))
    assert (profile.profiled_n, profile.kernels) == (4, 1)


def test_our_own_steps_go_before_the_profiler_s(tmp_path):
    profile = profile_of_trace(
        tmp_path,
        event("user_annotation", "ProfilerStep#2", 0.0, 1000.0),
        event("user_annotation", "step:0", 0.0, 400.0),
        launch("cudaLaunchKernel", 10.0, 1),
        launch("cudaMemcpyAsync", 500.0, 2),
        on_gpu(GEMM, 20.0, 100.0, correlation=1),
        on_gpu(ADD, 520.0, 100.0, correlation=2),
    )
    assert (profile.profiled_n, profile.kernels) == (1, 1)
    assert profile.outside_steps_ms == pytest.approx(0.1), "the profiler's step holds the batch's preparation too"


def test_micro_steps_are_parts_of_the_step_around_them(tmp_path):
    micro = (event("user_annotation", f"micro_step {each}", 100.0 + 200 * each, 150.0) for each in range(3))
    step = event("user_annotation", "step 1", 0.0, 1000.0)
    assert profile_of_trace(tmp_path, step, *micro, on_gpu(GEMM, 120.0, 100.0)).profiled_n == 1


@pytest.mark.parametrize("name", ["Optimizer.step#AdamW.step", "epoch 3", "layer 1", "step", "footstep 3", "batches"])
def test_other_ranges_are_no_numbered_steps(tmp_path, name):
    (profile,) = profiles(rows_of_trace(tmp_path, event("user_annotation", name, 0.0, 90.0), on_gpu(GEMM, 20.0, 10.0)))
    assert profile.has_steps is (name == "step")


def test_nvtx_steps_of_an_export(tmp_path):
    path = export(tmp_path / "steps.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE NVTX_EVENTS SET text = 'iteration 12' WHERE text = 'step:0'")
    database.close()
    (profile, other) = profiles(records_from_file(path))
    assert (profile.has_steps, profile.profiled_n, profile.kernels) == (True, 1, 2)
    assert (other.has_steps, other.kernels) == (False, 1), "the other process takes no step"


def test_without_steps_every_figure_is_said_to_be_of_the_trace(tmp_path):
    events = [on_gpu(f"{GEMM}_{each}", 100.0 * each, 50.0) for each in range(30)]
    rows = rows_of_trace(tmp_path, *events, on_gpu(NCCL, 0.0, 500.0, stream=20))
    assert profiles(rows)[0].has_steps is False
    told = texts(rows)
    assert "in the trace" in told
    for claim in ("per step", "the whole step", "One step"):
        assert claim not in told, claim


def test_with_steps_nothing_is_said_of_the_trace(tmp_path):
    rows = rows_of_trace(tmp_path, *two_devices("ProfilerStep#3"))
    assert "in the trace" not in texts(rows)
    assert "per step" in texts(rows)


# Transfers


def transfers(kind="Memcpy HtoD (Pageable -> Device)", *, ms=1842.0, beside=0.0, **more):
    return [
        event("user_annotation", "step:0", 0.0, 3e6),
        on_gpu(kind, 1000.0, ms * 1e3, stream=8, category="gpu_memcpy", bytes=int(ms * 1e7), **more),
        on_gpu(ADD, 1000.0 + ms * 1e3 * (1 - beside), 20e3 + ms * 1e3 * beside),
    ]


def test_a_transfer_is_no_kernel_and_leads_to_no_advice_to_compile(tmp_path):
    rows = rows_of_trace(tmp_path, *transfers(), on_gpu(GEMM, 2e6, 300e3))
    (profile,) = profiles(rows)
    assert (profile.kernels, profile.copies) == (2, 1)
    assert profile.kernels_ms == pytest.approx(320), "the kernels' own time"
    assert profile.top_step_kernel == GEMM
    assert (profile.transfers_ms, profile.transfers_overlapped_ms) == pytest.approx((1842, 0))
    every = found(rows)
    assert "unfused" not in every
    said = every["transfers"]
    assert said.figures == pytest.approx(
        {"ms": 1842, "gb": 18.42, "gb_s": 10, "overlapped_share": 0, "pinned_share": 0, "to_host_share": 0}
    )
    assert "pin_memory=True" in said.sentence
    assert "compile" not in " ".join(each.sentence for each in every.values())
    families = {row.family: row for row in of_kind(rows, FamilyRow) if row.phase == "step"}
    assert families["transfer"].share is None
    assert sum(row.share for row in families.values() if row.share) == pytest.approx(1)
    assert "transfer" in texts(rows)


@pytest.mark.parametrize(
    ("kind", "beside", "pinned", "said", "not_said"),
    [
        ("Memcpy HtoD (Pageable -> Device)", 0.0, 0, "pin_memory=True", "pinned already"),
        ("Memcpy HtoD (Pinned -> Device)", 0.0, 1, "pinned already", "pin_memory=True"),
        ("Memcpy HtoD", 0.0, None, "does not say whether", "pinned already"),
        ("Memcpy DtoH (Device -> Pageable)", 0.0, 0, ".item()", "pinned already"),
    ],
)
def test_transfers_say_whether_they_are_pinned_and_overlapped(tmp_path, kind, beside, pinned, said, not_said):
    finding = found(rows_of_trace(tmp_path, *transfers(kind, beside=beside)))["transfers"]
    assert finding.figures["pinned_share"] == pinned
    assert said in finding.sentence
    assert not_said not in finding.sentence


def test_transfers_beside_compute_and_small_ones_are_not_remarked_on(tmp_path):
    beside = rows_of_trace(tmp_path, *transfers("Memcpy HtoD (Pinned -> Device)", beside=1.0))
    (profile,) = profiles(beside)
    assert profile.transfers_overlapped_ms == pytest.approx(profile.transfers_ms)
    assert "transfers" not in found(beside)
    small = rows_of_trace(tmp_path, *transfers(ms=1.0))
    assert profiles(small)[0].transfers_ms == pytest.approx(1)
    assert "transfers" not in found(small)


def test_a_transfer_hides_no_communication(tmp_path):
    profile = profile_of_trace(tmp_path, *transfers(ms=500.0), on_gpu(NCCL, 1000.0, 500e3, stream=20))
    assert profile.communication_overlapped_ms == 0


def test_transfers_of_an_export_say_their_memory(tmp_path):
    columns = {
        "CUPTI_ACTIVITY_KIND_MEMCPY": "start INT, end INT, deviceId INT, contextId INT, streamId INT, "
        "correlationId INT, globalPid INT, bytes INT, copyKind INT, srcKind INT, dstKind INT",
        "ENUM_CUDA_MEM_KIND": "id INT, name TEXT, label TEXT",
    }
    path = export(tmp_path / "copies.sqlite", columns=columns, leave_out=["NVTX_EVENTS"])
    with sqlite3.connect(path) as database:
        database.execute(
            "INSERT INTO ENUM_CUDA_MEM_KIND VALUES (0, 'x', 'Pageable'), (1, 'y', 'Pinned'), (2, 'z', 'Device')"
        )
        insert = "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, streamId, correlationId, globalPid, "
        insert += "bytes, copyKind, srcKind, dstKind) VALUES (?, ?, 0, 7, 1, ?, 1000000, 1, ?, 2)"
        database.execute(insert, (300_000, 340_000, global_id(PROCESS), 0))
        database.execute(insert, (340_000, 350_000, global_id(PROCESS), 1))
    database.close()
    (profile, _) = profiles(records_from_file(path))
    assert profile.transfers_ms == pytest.approx(0.05)
    assert profile.transfers_gb == pytest.approx(0.002)
    assert profile.transfers_pinned_share == pytest.approx(0.2)


# Graphs, other devices, odd files

GRAPHS = {
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start INT, end INT, deviceId INT, contextId INT, streamId INT, "
    "correlationId INT, globalPid INT, graphId INT, graphExecId INT"
}


def graphs_added(path):
    with sqlite3.connect(path) as database:
        database.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (300000, 900000, 0, 1, 7, 77, ?, 5, 6)",
            (global_id(PROCESS),),
        )
    database.close()
    return path


def test_the_time_of_cuda_graphs_counts_and_is_said(tmp_path):
    rows = list(records_from_file(graphs_added(export(tmp_path / "graphs.sqlite", columns=GRAPHS))))
    first = profiles(rows)[0]
    assert first.kernels_ms == pytest.approx(0.03 + 0.06 + 0.001 + 0.6)
    families = {row.family: row.ms for row in of_kind(rows, FamilyRow) if row.phase == "step"}
    assert families["CUDA graph"] == pytest.approx(0.6)
    graphs = found(rows)["graphs"]
    assert graphs.figures["share"] == pytest.approx(0.6 / 0.691)
    assert "--cuda-graph-trace=node" in graphs.sentence


def test_an_export_of_graphs_alone_is_read(tmp_path):
    path = graphs_added(export(tmp_path / "graphs.sqlite", columns=GRAPHS, kernels=[]))
    assert profiles(records_from_file(path))[0].kernels_ms == pytest.approx(0.601)


@pytest.mark.parametrize("category", ["mtia_ccp_events", "Kernel"])
def test_kernels_of_other_devices_and_of_earlier_profilers(tmp_path, category):
    rows = rows_of_trace(
        tmp_path,
        event("Operator" if category == "Kernel" else "cpu_op", "aten::mm", 0.0, 50.0),
        launch("launch", 10.0, 3, category="Runtime" if category == "Kernel" else "mtia_runtime"),
        on_gpu("mm_kernel", 20.0, 30.0, category=category, correlation=3),
    )
    (profile,) = profiles(rows)
    assert profile.on_cpu is False
    assert (profile.kernels, profile.kernels_ms) == (1, 0.03)
    assert of_kind(rows, KernelRow)[0].operator == "aten::mm"


def test_launches_without_kernels_are_no_cpu_trace(tmp_path):
    events = [event("cpu_op", "aten::mm", 0.0, 50.0), launch("cudaLaunchKernel", 10.0, 3)]
    with pytest.raises(UsageError, match=r"1 launch.* no kernels.*ProfilerActivity\.CUDA"):
        rows_of_trace(tmp_path, *events)


def test_what_the_reader_does_not_know_is_said(tmp_path):
    step, odd = event("user_annotation", "step:0", 0.0, 1000.0), on_gpu("tpu_thing", 20.0, 30.0, category="tpu_op")
    assert any("tpu_op" in note for note in profile_of_trace(tmp_path, step, on_gpu(GEMM, 20.0, 30.0), odd).notes)


@pytest.mark.parametrize(
    "bad", [{"dur": -5.0}, {"dur": 1.8e16}, {"ts": 1e18}, {"ts": -1e17}, {"dur": float("nan")}, {"ts": float("inf")}]
)
def test_impossible_times_are_left_out_and_said(tmp_path, bad):
    rows = rows_of_trace(
        tmp_path,
        event("user_annotation", "step:0", 0.0, 1000.0),
        *(on_gpu(GEMM, 100.0 * each, 30.0) for each in range(5)),
        on_gpu(ADD, 700.0, 10.0) | bad,
    )
    (profile,) = profiles(rows)
    assert (profile.kernels, profile.kernels_ms) == (5, pytest.approx(0.15))
    assert profile.gaps_ms == pytest.approx(0.28)
    assert any("1 event" in note and "left out" in note for note in profile.notes)
    assert "left out" in found(rows)["reading"].sentence


@pytest.mark.parametrize("end", [0, 50_000, 10**18])
def test_impossible_times_of_an_export(tmp_path, end):
    kernels = [(PROCESS, 100_000, 130_000, 77, 1), (PROCESS, 200_000, end, 78, 1)]
    profile = profiles(records_from_file(export(tmp_path / "odd.sqlite", kernels=kernels)))[0]
    assert profile.kernels == 1
    assert any("left out" in note for note in profile.notes)


@pytest.mark.parametrize("name", ["run.nsys-rep", "run.qdrep"])
def test_nsys_s_own_report_is_told_how_to_export_it(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x00NVIDIA Nsight\x00" * 100)
    with pytest.raises(UsageError, match=rf"nsys export --type sqlite .*{name}"):
        list(records_from_file(tmp_path / name))


def test_a_memory_snapshot_is_told_where_it_belongs(tmp_path):
    (tmp_path / "snapshot.pickle").write_bytes(b"\x80\x04}\x94.")
    with pytest.raises(UsageError, match="trainstep memory --from"):
        list(records_from_file(tmp_path / "snapshot.pickle"))
