"""Sums over kernels: busy time, gaps, and costs that are counted once."""

import pytest

from trainstep.measure.chrome_trace import own_time
from trainstep.measure.kernels import Kernel, busy_us, gaps, profile_of
from trainstep.measure.trace import Range, Tensors, Trace


def kernel(start, duration, lane="compute", stream="0/7"):
    return Kernel(f"k{start}", "other", start, duration, stream, lane, True, "0", "forward", "m", None, None)


def test_streams_that_run_together_are_busy_once():
    assert busy_us([kernel(0, 10), kernel(5, 10, stream="0/8"), kernel(20, 5)]) == 20
    assert busy_us([]) == 0


def test_gaps_are_where_no_stream_runs_the_longest_first():
    found = gaps([kernel(0, 10), kernel(2, 20, stream="0/8"), kernel(25, 5), kernel(40, 1)])
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
LINEAR = [
    operator("aten::addmm", 0, 100, ROWS, (64, 2), (2, 8)),
    operator("aten::copy_", 10, 90, ROWS, ROWS),
]


@pytest.mark.parametrize(
    ("ranges", "counted", "flops"),
    [
        (NORM, {"aten::pow", "aten::mul"}, 2 * 64 * 8),
        (LINEAR, {"aten::addmm", "aten::copy_"}, 2 * 64 * 2 * 8),
    ],
    ids=["all of it in what it calls", "only its bytes in what it calls"],
)
def test_on_a_cpu_what_an_operator_leaves_to_others_is_counted_there(ranges, counted, flops):
    profile = profile_of(Trace(ranges, own_time(ranges), "CPU"))
    assert {each.name for each in profile.kernels} == {each.name for each in ranges}
    assert {each.name for each in profile.kernels if each.call is not None} == counted
    assert sum(each.flops or 0 for each in profile.kernels) == flops
    assert sum(each.bytes is not None for each in profile.kernels) == 2, "a call has its bytes once"
