"""Sums over kernels: busy time and gaps."""

from trainstep.measure.kernels import Kernel, busy_us, gaps


def kernel(start, duration, lane="compute", stream="0/7"):
    return Kernel(f"k{start}", "other", start, duration, stream, lane, True, "0", "forward", "m", None, None)


def test_streams_that_run_together_are_busy_once():
    assert busy_us([kernel(0, 10), kernel(5, 10, stream="0/8"), kernel(20, 5)]) == 20
    assert busy_us([]) == 0


def test_gaps_are_where_no_stream_runs_the_longest_first():
    found = gaps([kernel(0, 10), kernel(2, 20, stream="0/8"), kernel(25, 5), kernel(40, 1)])
    assert [(gap.start_us, gap.duration_us, gap.before.name) for gap in found] == [(30, 10, "k40"), (22, 3, "k25")]
    assert gaps([kernel(0, 10), kernel(10, 5)]) == []
