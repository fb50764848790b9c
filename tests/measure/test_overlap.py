"""Communication and what hides it: exact times of a trace that is known; and what a CPU's trace shows of Gloo."""

import json

import pytest

from tests.measure.test_chrome_trace import event
from trainstep.measure.chrome_trace import read_chrome_trace
from trainstep.measure.intervals import length
from trainstep.measure.kernels import Kernel, profile_of
from trainstep.measure.overlap import overlap_of


def kernel(start, duration, lane="compute", stream="0/7"):
    return Kernel(f"k{start}", "other", start, duration, stream, lane, True, "0", "forward", "m", None, None)


@pytest.mark.parametrize(
    ("compute", "hidden"),
    [([(0, 100)], 20), ([(0, 15)], 5), ([(12, 2), (20, 5)], 7), ([(30, 10)], 0), ([], 0)],
)
def test_communication_beside_compute(compute, hidden):
    kernels = [kernel(10, 20, "communication", "0/9"), *(kernel(start, length) for start, length in compute)]
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
