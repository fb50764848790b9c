"""Sums over kernels: busy time, gaps, costs that are counted once; communication and what hides it; sets of points.

And the classifier, on names that the libraries of several vendors give their kernels.
"""

import itertools
import json
import random
import tomllib
from pathlib import Path

import pytest

from tests.measure.profile.test_trace import event
from trainstep.measure.costs import Tensors
from trainstep.measure.profile.chrome import read_chrome_trace
from trainstep.measure.profile.kernels import Kernel, kernel_family, operator_family, profile_of, short_name
from trainstep.measure.profile.overlap import busy_us, difference, gaps, intersection, length, overlap_of, union
from trainstep.measure.profile.trace import Range, Stream, Trace, own_time


def kernel(start, duration, lane="compute", stream=7):
    return Kernel(f"k{start}", "other", start, duration, Stream(0, stream), lane, True, "0", "forward", "m", None, None)


def test_streams_that_run_together_are_busy_once():
    assert busy_us([kernel(0, 10), kernel(5, 10, stream=8), kernel(20, 5)]) == 20
    assert busy_us([]) == 0


def test_gaps_are_where_no_stream_runs_the_longest_first():
    found = gaps([kernel(0, 10), kernel(2, 20, stream=8), kernel(25, 5), kernel(40, 1)])
    assert [(gap.start_us, gap.duration_us, gap.before.name) for gap in found] == [(30, 10, "k40"), (22, 3, "k25")]
    assert gaps([kernel(0, 10), kernel(10, 5)]) == []


def operator(name, start, end, *shapes):
    return Range((1, 1), start, end, "operator", name, None, Tensors(shapes, ("float",) * len(shapes)))


ROWS = (64, 8)
NORM = [
    operator("aten::_fused_rms_norm", 0, 100, ROWS, (8,)),
    operator("aten::pow", 10, 30, ROWS),
    operator("aten::mul", 40, 90, ROWS, ROWS),
]
LINEAR = [operator("aten::addmm", 0, 100, ROWS, (64, 2), (2, 8)), operator("aten::copy_", 10, 90, ROWS, ROWS)]


@pytest.mark.parametrize(
    ("ranges", "counted", "flops"),
    [(NORM, {"aten::pow", "aten::mul"}, 2 * 64 * 8), (LINEAR, {"aten::addmm", "aten::copy_"}, 2 * 64 * 2 * 8)],
    ids=["all of it in what it calls", "only its bytes in what it calls"],
)
def test_on_a_cpu_what_an_operator_leaves_to_others_is_counted_there(ranges, counted, flops):
    profile = profile_of(Trace(ranges, own_time(ranges), "CPU", is_cpu=True))
    assert {each.name for each in profile.kernels} == {each.name for each in ranges}
    assert {each.name for each in profile.kernels if each.call is not None} == counted
    assert sum(each.flops or 0 for each in profile.kernels) == flops
    assert sum(each.bytes is not None for each in profile.kernels) == 2, "a call has its bytes once"


@pytest.mark.parametrize(
    ("compute", "hidden"), [([(0, 100)], 20), ([(0, 15)], 5), ([(12, 2), (20, 5)], 7), ([(30, 10)], 0), ([], 0)]
)
def test_communication_beside_compute(compute, hidden):
    kernels = [kernel(10, 20, "communication", 9), *(kernel(*each) for each in compute)]
    found = overlap_of(kernels)
    assert length(found.hidden) == hidden
    assert length(found.exposed) == 20 - hidden


def gpu_kernel(name, start, duration, stream, category="kernel"):
    return event(category, name, start, duration, tid=stream, pid=0, device=0, stream=stream)


def overlap_of_events(path, *events):
    content = {"deviceProperties": [], "traceEvents": [event("user_annotation", "step:0", 0.0, 1000.0), *events]}
    path.write_text(json.dumps(content))
    return overlap_of(profile_of(read_chrome_trace(path)).kernels)


def test_a_gpu_s_kernels_to_the_microsecond(tmp_path):
    found = overlap_of_events(
        tmp_path / "trace.json",
        gpu_kernel("nvjet_gemm", 100.0, 100.0, 7),
        gpu_kernel("nvjet_gemm", 210.0, 90.0, 7),
        gpu_kernel("Memset (Device)", 300.0, 5.0, 7, "gpu_memset"),
        gpu_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 150.0, 100.0, 20),
        gpu_kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 240.0, 20.0, 24),
        gpu_kernel("Memcpy PtoP (Device -> Device)", 290.0, 40.0, 28, "gpu_memcpy"),
        gpu_kernel("Memcpy DtoD (Device -> Device)", 350.0, 50.0, 7, "gpu_memcpy"),
    )
    assert found.computation == [(100, 200), (210, 305), (350, 400)]
    assert found.communication == [(150, 260), (290, 330)]
    assert found.hidden == [(150, 200), (210, 260), (290, 305)]
    assert found.exposed == [(200, 210), (305, 330)]
    assert found.idle_us == 20
    assert found.span_us == 300
    assert found.span_us == length(found.computation) + length(found.exposed) + found.idle_us


def test_on_a_cpu_gloo_s_threads_communicate(tmp_path):
    found = overlap_of_events(
        tmp_path / "trace.json",
        event("cpu_op", "aten::mm", 100.0, 50.0),
        event("cpu_op", "c10d::allreduce_", 150.0, 10.0),
        event("cpu_op", "aten::copy_", 152.0, 4.0),
        event("user_annotation", "gloo:all_reduce", 158.0, 100.0, tid=11),
        event("cpu_op", "aten::add_", 165.0, 80.0, tid=11),
        event("cpu_op", "aten::copy_", 170.0, 10.0, tid=11),
        event("cpu_op", "aten::mm", 160.0, 40.0),
    )
    assert found.computation == [(100, 150), (152, 156), (160, 200)]
    assert found.communication == [(150, 152), (156, 258)]
    assert length(found.hidden) == 40
    assert found.idle_us == 0


def test_on_a_cpu_waiting_is_no_computation(tmp_path):
    """In a hook of the engine, or in a range that a library opens and names as operators are named."""
    found = overlap_of_events(
        tmp_path / "trace.json",
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 100.0, 90.0),
        event("cpu_op", "aten::mm", 110.0, 20.0),
        event("user_annotation", "FSDP::post_backward_reduce", 200.0, 50.0),
        event("cpu_op", "aten::copy_", 205.0, 10.0),
        event("user_annotation", "gloo:reduce_scatter", 130.0, 120.0, tid=11),
    )
    assert found.computation == [(110, 130), (205, 215)]
    assert length(found.exposed) == 110


def test_of_nothing_there_is_nothing():
    assert overlap_of([]).span_us == overlap_of([]).idle_us == 0


def test_against_sets_of_points():
    draw = random.Random(0)
    for _ in range(300):
        raw = [[(a, a + draw.randrange(-1, 6)) for a in draw.choices(range(40), k=draw.randrange(9))] for _ in range(2)]
        points = [{x for start, end in one for x in range(start, end)} for one in raw]
        first, second = map(union, raw)
        assert sum(end - start for start, end in first) == length(first) == len(points[0])
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(first)), "what touches is one"
        for found, expected in (
            (intersection(first, second), points[0] & points[1]),
            (difference(first, second), points[0] - points[1]),
        ):
            assert {x for start, end in found for x in range(start, end)} == expected
            assert found == union(found)


NAMES = tomllib.loads(Path(__file__).with_name("kernels.toml").read_text(encoding="utf-8"))
SHORT = NAMES.pop("short names")["pairs"]


@pytest.mark.parametrize(
    ("what", "family", "name"),
    [(what, family, name) for what, told in NAMES.items() for family, names in told.items() for name in names],
)
def test_names_say_the_family(what, family, name):
    assert (kernel_family if what == "kernels" else operator_family)(name) == family


def test_the_operator_tells_where_the_kernel_s_name_does_not():
    assert kernel_family("_attend", "trainstep::flash_attention_forward") == "fused attention"
    helper = "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)"
    assert kernel_family(helper, "aten::_cudnn_attention_backward") == "fused attention"
    assert kernel_family(helper) == "other"
    assert kernel_family("softmax_and_bias", "aten::_addmm_activation") == "matmul", "whatever its name"
    assert kernel_family("void cublasLt::splitKreduce_kernel<32>(x)", "aten::_scaled_mm") == "reduction"


@pytest.mark.parametrize(("name", "short"), SHORT)
def test_short_names(name, short):
    assert short_name(name) == short
