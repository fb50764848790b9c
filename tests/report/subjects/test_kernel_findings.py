"""What a profile is said to show: each finding by its id and figures, and the advice at the end of its sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.report.changes import carried
from tests.report.subjects.test_kernels import gpu_profile, records
from trainstep.report.findings import Finding
from trainstep.report.subjects import findings
from trainstep.report.subjects.kernel_findings import brief_name
from trainstep.rows import CeilingRow, ChangeRow, ProfileRow
from trainstep.rows.records import Row, of_kind


def found(rows: list[Row]) -> dict[str, Finding]:
    """Id → finding about kernels, each at most once."""
    own = [each for each in findings(rows) if each.id.startswith("kernels.")]
    assert {each.topic for each in own} <= {"kernels"}
    assert len({each.id for each in own}) == len(own)
    return {each.id.removeprefix("kernels."): each for each in own}


def rung(name: str, **values: Any) -> Row:
    return ChangeRow(change=name, **carried(name), **{"verdict": "faster", "accepted": False, "gain": 1.27, **values})


def with_settings(rows: list[Row], **settings: Any) -> list[Row]:
    return [row if isinstance(row, CeilingRow) else dataclasses.replace(row, **settings) for row in rows]


LADDER = [rung("compiled blocks"), rung("fused optimizer")]


def test_what_dominates_does_so_by_time_and_not_by_count() -> None:
    every = found(records(gpu_profile()))
    assert list(every) == ["profiler-cost", "top-of-forward", "top-of-step", "matmuls", "softmax", "unfused", "idle",
                           "communication"]  # fmt: skip
    top = every["top-of-step"]
    assert (top.figures["kernel"], top.figures["calls"], top.figures["ms"]) == ("nvjet_backward", 2, 0.3)
    assert top.figures["share"] == pytest.approx(300 / 970)
    assert str(top.figures["most_called"]).startswith("elementwise <script>")
    assert top.figures["most_calls"] == 6
    assert "Called most often, 6 times, is elementwise <script>." in top.sentence
    assert every["profiler-cost"].figures == {"profiler_cost": 0.2, "step_ms": 2.0, "profiled_step_ms": 2.4}
    matmuls = every["matmuls"].figures
    assert matmuls["forward_share"] == pytest.approx(160 / 440)
    assert matmuls["step_share"] == pytest.approx(460 / 970)
    assert every["idle"].figures == {"idle_share": 0.15, "idle_ms": 0.3, "step_ms": 2.0}
    assert every["communication"].figures == {"ms": 0.1, "overlapped_share": 1}


@pytest.mark.parametrize(
    ("kernel", "brief"),
    [
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT"),
        ("vectorized_elementwise_kernel<8, bfloat16_copy_kernel_cuda, array<char*, 2ul> >",
         "vectorized_elementwise_kernel<bfloat16_copy_kernel_cuda>"),
        ("multi_tensor_apply_kernel<TensorListMetadata<1>, BinaryOpScalarFunctor<float, 1, 1, 0>, m…",
         "multi_tensor_apply_kernel<BinaryOpScalarFunctor>"),
        ("softmax_warp_forward<float, float, float, 9, false, false>", "softmax_warp_forward"),
    ],
)  # fmt: skip
def test_sentences_name_a_kernel_by_what_tells_it_apart(kernel: str, brief: str) -> None:
    assert brief_name(kernel) == brief
    (row,) = of_kind(records(gpu_profile()), ProfileRow)
    named = dataclasses.replace(row, top_forward_kernel=kernel)
    assert f"the kernel that takes most time is {brief} (" in found([named])["top-of-forward"].sentence


def test_a_rung_that_proves_nothing_has_no_gain() -> None:
    ladder = [rung("fused attention", verdict="inconclusive"), rung("our FlashAttention", status="unsupported")]
    softmax = found([*records(gpu_profile()), *ladder])["softmax"]
    assert not [name for name in softmax.figures if name.startswith("gain")]
    assert "fused attention made no difference" in softmax.sentence
    assert softmax.sentence.endswith("our FlashAttention could not be used (unsupported).")


def test_float32_products_are_not_taken_for_tensor_cores() -> None:
    profile = gpu_profile()
    simt = [
        dataclasses.replace(each, family="FP32 SIMT matmul") if each.family == "tensor-core matmul" else each
        for each in profile.kernels
    ]
    rows = [*records(dataclasses.replace(profile, kernels=tuple(simt))), rung("TF32 matmuls")]
    products = found(with_settings(rows, precision="fp32"))["float32-products"]
    assert products.figures == pytest.approx({"share": 460 / 970, "gain of TF32 matmuls": 1.27})
    assert "TF32 or bf16" not in products.sentence, "what was tried is told by its result"
    untried = found(with_settings(rows[:-1], precision="fp32"))["float32-products"]
    assert "TF32 or bf16 moves them there." in untried.sentence
    newer = found(with_settings(rows, precision="fp8"))["float32-products"]  # of a file that another version wrote
    assert newer.figures == {"share": products.figures["share"]}
    assert "though the step runs in fp8" in newer.sentence


@pytest.mark.parametrize(
    ("compile_mode", "id", "said"),
    [
        (None, "unfused", ". On the ladder, compiled blocks made the step 1.27× faster."),
        ("off", "unfused", ". On the ladder, compiled blocks made the step 1.27× faster."),
        ("blocks", "unfused-though-compiled", ", though the blocks are compiled; 100% of it in forward."),
        ("model", "unfused-though-compiled", ", though the model is compiled; 100% of it in forward."),
    ],
)  # fmt: skip
def test_only_what_is_not_compiled_is_told_to_compile(compile_mode: str | None, id: str, said: str) -> None:
    every = found([*with_settings(records(gpu_profile()), compile=compile_mode), *LADDER])
    assert [each for each in every if each.startswith("unfused")] == [id]
    assert every[id].figures["families"] == ("elementwise",)
    assert every[id].figures["share"] == pytest.approx(180 / 970)
    assert every[id].sentence.endswith("each reads and writes whole tensors" + said)
    is_proven = compile_mode in (None, "off")
    assert ("gain of compiled blocks" in every[id].figures) is is_proven
    assert ("gain of compiled blocks" in every["idle"].figures) is is_proven
    assert ("On the ladder" in every["idle"].sentence) is is_proven


@pytest.mark.parametrize(
    ("optimizer", "id", "said"),
    [
        (None, "optimizer-unfused", ". On the ladder, fused optimizer made the step 1.27× faster."),
        ("adamw-foreach", "optimizer-unfused", ". On the ladder, fused optimizer made the step 1.27× faster."),
        ("adamw-fused", "optimizer", ", fused already: that grows"),
        ("sgd", "optimizer", ": that grows"),
    ],
)
def test_only_what_is_not_fused_is_told_to_fuse(optimizer: str | None, id: str, said: str) -> None:
    profile = gpu_profile()
    longer = [
        dataclasses.replace(each, duration_us=300.0) if each.family == "optimizer" else each for each in profile.kernels
    ]
    rows = with_settings(records(dataclasses.replace(profile, kernels=tuple(longer))), optimizer=optimizer)
    every = found([*rows, *LADDER])
    assert [each for each in every if each.startswith("optimizer")] == [id]
    figures = every[id].figures
    assert (figures["share"], figures["gb"]) == pytest.approx((300 / 1150, 0.4))
    assert ("gain of fused optimizer" in figures) is (id == "optimizer-unfused")
    assert "of the kernel time and moves 0.400 GB" + said in every[id].sentence


def test_a_profile_that_did_not_run_has_no_findings() -> None:
    assert found([ProfileRow(workload="large", status="out of memory", reason="no room for it")]) == {}


def on_profile(**values: Any) -> dict[str, Finding]:
    """What is found where the profile says this too."""
    rows = records(gpu_profile())
    return found([dataclasses.replace(row, **values) if isinstance(row, ProfileRow) else row for row in rows])


@pytest.mark.parametrize(
    ("to_host", "pinned", "said"),
    [
        (0.51, None, "; most of it goes to the host:"),
        (0.5, None, "; the trace does not say whether the host's memory is pinned,"),
        (None, 0.49, "; 51% of it is of pageable memory,"),
        (0.0, 0.5, ", though the memory is pinned already:"),
    ],
)
def test_transfers_are_mended_by_where_they_go_and_what_they_come_from(to_host, pinned, said) -> None:
    values = {"transfers_to_host_share": to_host, "transfers_pinned_share": pinned}
    every = on_profile(busy_ms=1.0, transfers_ms=0.4, transfers_overlapped_ms=0.1, transfers_gb=0.002, **values)
    finding = every["transfers"]
    assert f"(0.00200 GB at 5.00 GB/s), 25% of it beside kernels{said}" in finding.sentence
    figures = {"ms": 0.4, "gb": 0.002, "gb_s": pytest.approx(5.0), "overlapped_share": 0.25, "pinned_share": pinned}
    assert finding.figures == figures | {"to_host_share": to_host or 0}


@pytest.mark.parametrize(("has_steps", "what"), [(None, "step"), (True, "step"), (False, "trace")])
def test_figures_of_a_trace_that_announces_no_steps_are_of_the_whole_trace(has_steps, what) -> None:
    every = on_profile(has_steps=has_steps, busy_ms=1.0, transfers_ms=0.4)
    assert every["top-of-step"].sentence.startswith(f"In the whole {what}, the kernel that takes most time is")
    assert every["top-of-forward"].sentence.startswith("In the forward pass, the kernel that takes most time is")
    assert f"in the whole {what}, fused attention not counted." in every["matmuls"].sentence
    per = {"step": "per step", "trace": "in the trace"}[what]
    assert every["transfers"].sentence.startswith(f"Transfers between host and device take 0.400 ms {per},")
    assert every["communication"].sentence.startswith(f"Communication takes 0.100 ms {per},")


def test_what_each_device_hides_is_of_its_own_communication() -> None:
    first = ProfileRow(device="GPU 0", devices=3, communication_ms=2.0, communication_overlapped_ms=0.5)
    others = [
        dataclasses.replace(first, device="GPU 1", communication_overlapped_ms=None),
        dataclasses.replace(first, device="GPU 2", communication_ms=None, communication_overlapped_ms=None),
    ]
    devices = found([first, *others])["devices"]
    assert devices.figures == {"devices": 3, "hidden_shares": ("GPU 0: 25%", "GPU 1: 0%")}
    failed = dataclasses.replace(first, device="GPU 3", status="out of memory")
    other = dataclasses.replace(first, workload="another model")
    assert found([first, failed, other, *others])["devices"] == devices, "of what ran, and of this trace alone"
    silent = [dataclasses.replace(each, communication_ms=None) for each in (first, *others)]
    assert found(silent)["devices"].figures["hidden_shares"] == ()


def test_graphs_are_told_with_their_part_and_notes_in_the_readers_words() -> None:
    every = on_profile(graphs_ms=0.3, kernels_ms=1.2, notes=("Two of it.", "One of that."))
    assert every["graphs"].figures == {"share": 0.25, "ms": 0.3}
    assert every["reading"].sentence == "Two of it. One of that."
    none = on_profile(graphs_ms=0.0, notes=())
    assert not {"graphs", "reading"} & set(none)
    assert "graphs" not in on_profile(graphs_ms=0.3, kernels_ms=None)
