"""Fill the tables of README.md and docs/*.md from docs/results/, so that no figure in them is typed by hand.

A block between `<!-- table: NAME -->` and `<!-- end -->` is replaced by the table called NAME here. Run as `make docs`;
a test fails when a committed page differs from what this makes. The reports in docs/examples/ that show several results
at once are made here too.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from plan_tables import PLAN_TABLES

from trainstep.report.columns import Column, case_column, count_column, mean_column, median_column, value_column
from trainstep.report.compare import comparison_table, repeatability
from trainstep.report.formats import to_markdown
from trainstep.report.html import write_html
from trainstep.report.kernel_findings import brief_name
from trainstep.report.numbers import number
from trainstep.report.records import Record, of_kind, read_records
from trainstep.report.tables import Table, make_table, tabulate

DOCS = Path(__file__).parent
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
REPORTS = {
    "h200-parallel.html": ("h200-parallel", "h200-collectives"),
    "h200-attention.html": ("h200-attention-naive", "h200-attention-flash"),
    "h200-memory.html": ("h200-memory", "h200-residuals", "h200-checkpointing", "h200-allocations"),
    "h200-profile-2.7B.html": ("h200-profile-2.7B",),
}
BLOCK = re.compile(r"(<!-- table: (?P<name>[\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

PHASES = tuple(mean_column(f"{name} (ms)", name) for name in ("forward", "loss", "backward", "optimizer", "step"))
SIZE = Column("size", lambda row: str(row.case["workload"]))


def results(name: str, kind: str = "step") -> list[Record]:
    """The records of one kind in docs/results/NAME.jsonl."""
    path = DOCS / "results" / f"{name}.jsonl"
    if not path.exists():
        raise NotMeasuredError(path.name)
    return of_kind(read_records(path), kind)


class NotMeasuredError(Exception):
    """A table's results are not there."""


def where(rows: list[Record]) -> str:
    """Hardware, versions, date and commit of the rows."""
    environment = rows[0].environment
    return (
        f"{environment['device']}, torch {environment['torch']}, triton {environment['triton']}, "
        f"{environment['date']}, commit {environment['commit']}"
    )


def sizes(precision: str, compiled: str) -> Table:
    """Phases of every size in one precision, eager or compiled."""
    rows = [
        row
        for row in results("h200-step-sizes")
        if row.case["precision"] == precision and row.case["compile"] == compiled
    ]
    columns = (
        SIZE,
        *PHASES,
        value_column("TFLOP/s", "achieved_tflops"),
        value_column("utilisation (%)", "utilisation", 100),
        value_column("peak (GiB)", "peak_gib"),
    )
    form = "eager" if compiled == "off" else "blocks compiled"
    return tabulate("sizes", f"{precision}, {form}: mean ± std of 10 steps after 5; {where(rows)}", columns, rows)


def warmup() -> Table:
    """The same ten steps' mean with 0, 1, 2 and 5 steps left out before."""
    rows = [row for size in ("small", "large", "2.7B") for row in results(f"h200-warmup-{size}")]
    columns = (SIZE, case_column("warm-up", "warmup"), *PHASES, median_column("step, median [95 %]", "step"),
               value_column("first step (ms)", "first_step_ms"))  # fmt: skip
    return tabulate("warmup", f"fp32, eager, each size in a fresh process; {where(rows)}", columns, rows)


def repeat() -> Table:
    """Passes over the same cases, which must not be told apart."""
    rows = results("h200-repeat")
    return comparison_table(repeatability(rows), f"Three passes over the same cases in one run; {where(rows)}")


def ladder(size: str) -> Table:
    """The rungs of one size."""
    rows = results(f"h200-analyze-{size}", "rung")
    table = make_table("rung", rows, brief=True)
    return dataclasses.replace(table, caption=f"{table.caption}; {where(rows)}")


def limits(size: str) -> Table:
    """The phases of the ladder's first and last kept rungs."""
    kept = [row for row in results(f"h200-analyze-{size}", "rung") if row.values["kept"]]
    columns = (
        Column("rung", lambda row: str(row.case["rung"])),
        *(value_column(f"{name} (ms)", f"{name}_ms") for name in ("forward", "backward", "optimizer", "step")),
        value_column("TFLOP/s", "achieved_tflops"),
        value_column("utilisation (%)", "utilisation", 100),
    )
    return tabulate("limits", f"{size}; {where(kept)}", columns, [kept[0], kept[-1]])


SHAPE = ("batch", "heads", "seq", "head_dim", "causal")


def peers() -> Table:
    """Our kernels beside what torch ships, shape by shape, all in one run."""
    rows = results("h200-attention-peers", "attention")
    ours = "flash-triton"
    ceiling = ceiling_tflops("matmul bf16")
    others = [impl for impl in dict.fromkeys(str(row.case["impl"]) for row in rows) if impl != ours]
    shapes = dict.fromkeys(tuple(row.case[name] for name in SHAPE) for row in rows)
    cells = []
    for shape in shapes:
        times = {row.case["impl"]: row for row in rows if tuple(row.case[name] for name in SHAPE) == shape}
        own = {name: figure(times[ours], name) for name in times[ours].values if name.endswith(("_ms", "_tflops"))}
        line = [number(part) for part in shape]
        line += [" / ".join(number(own[f"{part}_ms"]) for part in ("forward", "backward", "both"))]
        line += [number(own["both_tflops"])]
        line += [" / ".join(f"{100 * own[f'{part}_tflops'] / ceiling:.0f}" for part in ("forward", "backward"))]
        for impl in others:
            other = figure(times[impl], "both_ms")
            line.append(f"{number(other)} ({other / own['both_ms']:.2f}×)")
        cells.append(tuple(line))
    columns = (
        *SHAPE,
        "ours: forward / backward / both (ms)",
        "TFLOP/s",
        f"of the matrix ceiling of {ceiling:.0f} TFLOP/s (%): forward / backward",
        *(f"{impl} (ms, times ours)" for impl in others),
    )
    return Table("peers", f"bf16, forward and backward, one run; {where(rows)}", columns, tuple(cells))


def figure(row: Record, name: str) -> float:
    """A measured figure that must be there."""
    value = row.values[name]
    assert isinstance(value, int | float), (row.case, name, value)
    return float(value)


def ceiling_tflops(what: str) -> float:
    """The rate that `analyze` measured of a plain matrix product on the same kind of GPU."""
    (row,) = [row for row in results("h200-analyze-large", "ceiling") if row.case["what"] == what]
    return figure(row, "tflops")


def naive() -> Table:
    """The eager formula beside its compiled form: time, and what both hold."""
    rows = results("h200-attention-naive", "attention")
    found = {(row.case["head_dim"], row.case["seq"], row.case["impl"]): row for row in rows}
    cells = []
    for head_dim, seq in sorted({(int(row.case["head_dim"] or 0), int(row.case["seq"] or 0)) for row in rows}):
        eager, compiled = (found[head_dim, seq, impl] for impl in ("eager", "eager-compiled"))
        line = [number(head_dim), f"{seq:,}"]
        for row in (eager, compiled):
            if row.status == "ok":
                line += [" / ".join(number(row.values[f"{part}_ms"]) for part in ("forward", "backward", "both"))]
            else:
                line += [row.status]
        both = [row.values.get("both_ms") for row in (eager, compiled)]
        line += [f"{both[0] / both[1]:.2f}×" if isinstance(both[0], float) and isinstance(both[1], float) else "–"]
        for row in (eager, compiled):
            line += [f"{number(row.values.get('before_backward_gib'))} / {number(row.values.get('peak_gib'))}"]
        predicted = (eager.values["predicted_before_backward_gib"], eager.values["predicted_peak_gib"])
        cells.append((*line, " / ".join(number(value) for value in predicted)))
    columns = (
        *("head_dim", "sequence", "eager: forward / backward / both (ms)", "compiled (ms)", "compiled is faster by"),
        *("eager: before backward / peak (GiB)", "compiled (GiB)", "eager by formula (GiB)"),
    )
    return Table("naive", f"fp32, batch 8, no heads, full; {where(rows)}", columns, tuple(cells))


def attention_by_length(name: str, dtype: str, head_dim: int, value: str, unit: str) -> Table:
    """One value of every implementation against the sequence length."""
    rows = [
        row for row in results(name, "attention") if row.case["dtype"] == dtype and row.case["head_dim"] == head_dim
    ]
    impls = list(dict.fromkeys(str(row.case["impl"]) for row in rows))
    lengths = sorted({int(row.case["seq"] or 0) for row in rows})
    found = {(row.case["seq"], row.case["impl"]): row for row in rows}

    def cell(seq: int, impl: str) -> str:
        row = found.get((seq, impl))
        if row is None:
            return "not run"
        return number(row.values.get(value)) if row.status == "ok" else row.status

    cells = tuple((f"{seq:,}", *(cell(seq, impl) for impl in impls)) for seq in lengths)
    case = rows[0].case
    what = "forward and backward" if value == "both_ms" else "peak memory"
    caption = f"{what} ({unit}), {dtype}, head_dim {head_dim}, batch {case['batch']}, causal {case['causal']}"
    return Table(name, f"{caption}; {where(rows)}", ("sequence", *impls), cells)


def parallel() -> Table:
    """Schemes of data parallel training: time and traffic."""
    rows = results("h200-parallel", "parallel")
    columns = (
        case_column("scheme", "scheme"),
        median_column("step on the slowest rank (ms) [95 %]", "step"),
        value_column("beyond the step without communication (ms)", "exposed_ms"),
        *(value_column(f"{name} (ms)", f"{name}_ms") for name in ("forward", "backward", "communication", "optimizer")),
        value_column("collectives", "collectives"),
        value_column("sent by a rank (GiB)", "sent_gib"),
        value_column("must be sent", "sent_floor_gib"),
        value_column("parameters off by (of their movement)", "update_error"),
        value_column("allowed", "update_allowed"),
    )
    return tabulate("parallel", f"2.7B, context 512, batch 4 per GPU, bf16 autocast; {where(rows)}", columns, rows)


def parallel_memory() -> Table:
    """The same: memory at three moments, measured and planned."""
    rows = results("h200-parallel", "parallel")
    moments = (("start", "start"), ("before the optimizer", "before_step"), ("after it", "after_step"))
    columns = (
        case_column("scheme", "scheme"),
        *(
            column
            for title, name in moments
            for column in (
                value_column(f"{title} (GiB)", f"{name}_gib"),
                value_column("by plan", f"predicted_{name}_gib"),
            )
        ),
        value_column("weights", "before_step_weights_gib"),
        value_column("gradients", "before_step_gradients_gib"),
        value_column("state", "before_step_optimizer_state_gib"),
        value_column("peak", "peak_gib"),
    )
    return tabulate("parallel-memory", f"GiB; {where(rows)}", columns, rows)


def plain(name: str, kind: str) -> Table:
    """All records of one kind, as the files have them."""
    rows = results(name, kind)
    table = make_table(kind, rows, brief=True)
    return dataclasses.replace(table, caption=f"{table.caption}; {where(rows)}")


def attention_memory() -> Table:
    """Measured bytes beside the formula: the eager formula's, ours, and what a case that did not fit needed."""
    rows = [
        row
        for name in ("h200-attention-flash", "h200-attention-naive")
        for row in results(name, "attention")
        if row.values.get("predicted_peak_gib") is not None
        and row.case["head_dim"] == 128
        and int(row.case["seq"] or 0) >= 16384
    ]
    columns = (
        Column("implementation", lambda row: str(row.case["impl"])),
        *(case_column(name, name) for name in ("dtype", "causal", "batch", "seq")),
        value_column("before backward (GiB)", "before_backward_gib"),
        value_column("by formula", "predicted_before_backward_gib"),
        value_column("peak (GiB)", "peak_gib"),
        value_column("peak by formula", "predicted_peak_gib"),
        value_column("score matrices at the peak", "score_matrices_at_peak"),
        Column("outcome", lambda row: row.status),
    )
    return tabulate("attention-memory", f"head_dim 128; {where(rows)}", columns, rows)


def memory_peaks() -> Table:
    """Peaks of forward alone and of the whole step, by context and precision."""
    rows = results("h200-memory", "peak")
    columns = (
        SIZE,
        *(case_column(name, name) for name in ("batch", "attention", "optimizer", "precision", "context", "mode")),
        value_column("at rest (GiB)", "at_rest_gib"),
        *(value_column(f"{name} (GiB)", f"{name}_peak_gib") for name in ("forward", "loss", "backward")),
        value_column("optimizer (GiB)", "optimizer_peak_gib"),
        value_column("peak (GiB)", "peak_gib", digits=4),
        value_column("predicted (GiB)", "predicted_gib", digits=4),
        value_column("off by (%)", "prediction_error", 100, digits=2),
        Column("outcome", lambda row: row.status),
    )
    return tabulate("memory-peaks", where(rows), columns, sorted(rows, key=_by_precision_and_context))


def _by_precision_and_context(row: Record) -> tuple[bool, int, bool]:
    return row.case["precision"] != "fp32", int(row.case["context"] or 0), row.case["mode"] != "forward"


def memory_residuals() -> Table:
    """What one block keeps, eager and compiled, and the residual stream beside its formula."""
    rows = results("h200-residuals", "residual")
    shown = [row for row in rows if row.case["part"] in ("first block", "residual stream") and row.status == "ok"]
    columns = (
        *(case_column(name, name) for name in ("batch", "context", "attention", "precision")),
        Column("code", lambda row: "eager" if row.case["compile"] == "off" else "compiled"),
        Column("module", lambda row: str(row.case["what"])),
        value_column("kept for", "operation"),
        value_column("tensor", "tensor"),
        value_column("storages", "storages"),
        value_column("MiB", "mib"),
        value_column("share (%)", "share", 100),
        value_column("by formula (MiB)", "formula_mib"),
    )
    return tabulate("memory-residuals", f"One block of 2.7B; {where(rows)}", columns, shown)


def memory_checkpointing() -> Table:
    """Policies at 2.7B, context 2048, predicted and measured."""
    rows = results("h200-checkpointing", "checkpointing")
    columns = (
        SIZE,
        *(case_column(name, name) for name in ("batch", "context", "optimizer", "precision", "attention")),
        Column("policy", lambda row: str(row.case["checkpointing"])),
        value_column("predicted (GiB)", "predicted_gib", digits=4),
        value_column("measured (GiB)", "peak_gib", digits=4),
        value_column("off by (%)", "prediction_error", 100, digits=2),
        value_column("peak in", "peak_phase"),
        value_column("step (ms)", "step_ms"),
        Column("outcome", lambda row: row.status),
    )
    return tabulate("memory-checkpointing", where(rows), columns, rows)


def memory_owners() -> Table:
    """Who owns the peak of one recorded step."""
    rows = results("h200-allocations", "owner")
    table = make_table("owner", rows)
    return dataclasses.replace(table, caption=f"{table.caption}; {where(rows)}")


def memory_largest() -> Table:
    """The largest allocations of the same step."""
    rows = results("h200-allocations", "allocation")
    table = make_table("allocation", rows)
    return dataclasses.replace(table, caption=f"{table.caption}; {where(rows)}")


def profile_rows(kind: str) -> list[Record]:
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


def _top_kernel(where_: str, row: Record) -> str:
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
    "sizes-fp32": lambda: sizes("fp32", "off"),
    "sizes-bf16": lambda: sizes("bf16", "off"),
    "sizes-fp32-compiled": lambda: sizes("fp32", "blocks"),
    "sizes-bf16-compiled": lambda: sizes("bf16", "blocks"),
    "warmup": warmup,
    "repeat": repeat,
    "ladder-small": lambda: ladder("small"),
    "ladder-large": lambda: ladder("large"),
    "limits-large": lambda: limits("large"),
    "ladder-2.7B": lambda: ladder("2.7B"),
    "parallel": parallel,
    "parallel-memory": parallel_memory,
    "collectives": partial(plain, "h200-collectives", "collective"),
    "collectives-fit": partial(plain, "h200-collectives", "collective fit"),
    "attention-peers": peers,
    "attention-naive": naive,
    **{
        f"attention-flash-{dtype}-{head_dim}": partial(
            attention_by_length, "h200-attention-flash", dtype, head_dim, "both_ms", "ms"
        )
        for dtype in ("bf16", "fp32")
        for head_dim in (16, 64, 128)
    },
    "attention-flash-memory": lambda: attention_by_length("h200-attention-flash", "bf16", 64, "peak_gib", "GiB"),
    "attention-memory": attention_memory,
    "memory-peaks": memory_peaks,
    "memory-residuals": memory_residuals,
    "memory-checkpointing": memory_checkpointing,
    "memory-owners": memory_owners,
    "memory-largest": memory_largest,
    "profile-kernels": profile_kernels,
    "profile-attention": profile_attention,
    "profile-families": profile_families,
    "profile-sums": profile_sums,
    **PLAN_TABLES,
}


def render(text: str) -> str:
    """`text` with every block filled anew."""

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise SystemExit(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        try:
            table = to_markdown(TABLES[name]())
        except NotMeasuredError as error:
            table = f"Not measured yet: there is no docs/results/{error}.\n"
        return f"{match[1]}{table}{match[3]}"

    return BLOCK.sub(fill, text)


def main() -> None:
    """Rewrite the pages in place, or with --check only say which differ."""
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (made := render(text)) != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(made, encoding="utf-8")
    if "--check" not in sys.argv:
        for report, names in REPORTS.items():
            rows = [row for name in names for row in read_records(DOCS / "results" / f"{name}.jsonl")]
            write_html(rows, DOCS / "examples" / report)
    print(f"changed: {', '.join(stale)}" if stale else "all tables are up to date")
    if stale and "--check" in sys.argv:
        sys.exit(1)


if __name__ == "__main__":
    main()
