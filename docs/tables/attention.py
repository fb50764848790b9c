"""Tables of attention: beside the peers, the eager formula and its compiled form, by length, and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tables.source import figure, results, where
from trainstep.report.columns import Column, case_column, value_column
from trainstep.report.numbers import number
from trainstep.report.tables import Table, tabulate, text_table

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
    return text_table("peers", f"bf16, forward and backward, one run; {where(rows)}", columns, tuple(cells))


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
    return text_table("naive", f"fp32, batch 8, no heads, full; {where(rows)}", columns, tuple(cells))


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
    return text_table(name, f"{caption}; {where(rows)}", ("sequence", *impls), cells)


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


TABLES: Mapping[str, Callable[[], Table]] = {
    "attention-peers": peers,
    "attention-naive": naive,
    **{
        f"attention-flash-{dtype}-{head_dim}": partial(
            attention_by_length, "h200-attention-flash", dtype, head_dim, "both_ms", "ms"
        )
        for dtype in ("bf16", "fp32")
        for head_dim in (16, 64, 128)
    },
    "attention-memory": attention_memory,
}
