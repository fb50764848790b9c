"""Tables of kernel profiles: top kernels, attention's pieces, families, sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tables.source import SIZE, results, where
from trainstep.records import Row
from trainstep.report.columns import Column, case_column, count_column, value_column
from trainstep.report.kernel_findings import brief_name
from trainstep.report.tables import Table, tabulate


def profile_rows(kind: str) -> list[Row]:
    """Rows of the kernel profiles, sizes and contexts in the order they were run."""
    return results("h200-profile", kind)


PROFILED = (SIZE, *(case_column(name, name) for name in ("batch", "context", "precision", "attention")))


def profile_kernels() -> Table:
    """The top kernel of forward and of the step, and matmul's share in both."""
    rows = profile_rows("profile")
    columns = [*PROFILED]
    for where_, words in (("forward", "forward"), ("step", "the step")):
        columns += [
            Column(f"top kernel of {words}", partial(_top_kernel, where_)),
            value_column(f"its family ({where_})", f"top_{where_}_kernel_family"),
            count_column(f"calls per {where_}", f"top_{where_}_kernel_calls"),
            value_column(f"of {words} (%)", f"top_{where_}_kernel_share", 100),
            value_column(f"matmul, of {words} (%)", f"matmul_share_{where_}", 100),
        ]
    return tabulate("profile-kernels", where(rows), columns, rows)


def _top_kernel(where_: str, row: Row) -> str:
    return brief_name(row.values[f"top_{where_}_kernel"])


def profile_attention() -> Table:
    """Softmax beside the score product and the weighted sum in forward: time, FLOPs, bytes."""
    rows = [row for row in profile_rows("attention piece") if row.case["phase"] == "forward"]
    columns = (
        *PROFILED,
        Column("piece", lambda row: str(row.case["piece"])),
        value_column("all its kernels (ms)", "ms"),
        value_column("product or softmax alone (ms)", "main_ms"),
        value_column("GFLOP", "main_tflop", 1e3),
        value_column("GB", "main_gb"),
        value_column("TFLOP/s", "main_tflops"),
        value_column("GB/s", "main_gb_s"),
    )
    return tabulate("profile-attention", f"forward; {where(rows)}", columns, rows)


def profile_families() -> Table:
    """Kernel time of the whole step by family."""
    rows = [row for row in profile_rows("family") if row.case["phase"] == "step"]
    columns = (
        *PROFILED,
        Column("family", lambda row: str(row.case["family"])),
        count_column("calls", "calls"),
        value_column("ms", "ms"),
        value_column("share (%)", "share", 100),
        value_column("TFLOP/s", "tflops"),
        value_column("GB/s", "gb_s"),
    )
    return tabulate("profile-families", where(rows), columns, rows)


def profile_sums() -> Table:
    """What attribution covers, what profiling cost, and the kernels' sums beside the step without it."""
    rows = profile_rows("profile")
    columns = (
        *PROFILED,
        value_column("in a known phase and module (%)", "module_coverage", 100, digits=5),
        value_column("step (ms)", "step_ms"),
        value_column("profiled (ms)", "profiled_step_ms"),
        *(value_column(f"{name}: kernels (ms)", f"{name}_busy_ms") for name in ("forward", "backward", "optimizer")),
        *(value_column(f"{name}: phase (ms)", f"{name}_ms") for name in ("forward", "backward", "optimizer")),
        value_column("idle (%)", "idle_share", 100),
    )
    return tabulate("profile-sums", where(rows), columns, rows)


TABLES: Mapping[str, Callable[[], Table]] = {
    "profile-kernels": profile_kernels,
    "profile-attention": profile_attention,
    "profile-families": profile_families,
    "profile-sums": profile_sums,
}
