"""Collectives on the page."""

from trainstep.kinds import row_of
from trainstep.report.html import render


def row(collective, size, time=1.0, status="ok", reason="", ranks=2):
    case = {"collective": collective, "world_size": ranks, "dtype": "fp32", "size_mb": size, "backend": "nccl"}
    values = {"n": 20, "payload_bytes": int(size * 1e6), "time_ms": time, "time_low_ms": time, "time_high_ms": time,
              "fastest_rank_ms": time, "slowest_rank_ms": time, "algorithm_gb_s": 200.0, "bus_gb_s": 200.5}  # fmt: skip
    return row_of("collective", case, values if status == "ok" else {}, status=status, reason=reason)


def fit(collective):
    case = {"collective": collective, "world_size": 2, "dtype": "fp32", "backend": "nccl"}
    values = {"overhead_us": 31.25, "bus_gb_s": 323.5, "sizes": 2, "worst_error": 0.0123}
    return row_of("collective fit", case, values)


def test_every_case_and_fit_is_a_row_with_its_raw_value():
    page = render([row("all-reduce", 1.0, 0.04875), row("all-reduce", 100.0), fit("all-reduce"),
                   row("all-gather", 1.0, status="out of memory", reason="needed 9 GiB")])  # fmt: skip
    for value in ("0.04875", "200.5", "31.25", "323.5", "0.0123"):
        assert f'data-value="{value}"' in page
    assert "needed 9 GiB" in page
    assert "collective-bus-2-ranks-fp32-nccl" in page
    assert "dashed: the fitted line" in page


def test_charts_are_per_number_of_ranks_and_need_two_sizes():
    page = render([row("all-reduce", size, ranks=ranks) for ranks in (2, 4) for size in (1.0, 10.0)])
    assert "2 ranks, fp32, nccl" in page
    assert "4 ranks, fp32, nccl" in page
    assert "fitted" not in page
    assert "collective-bus" in page
    assert "collective-bus" not in render([row("all-reduce", 1.0), row("broadcast", 1.0)])


def test_failures_alone_are_a_table():
    page = render([row("all-reduce", size, status="wrong", reason="rank 1 did not get it") for size in (1.0, 2.0)])
    assert "rank 1 did not get it" in page
