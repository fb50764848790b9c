"""Tables of attention: beside the peers, the eager formula and its compiled form, by length, and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from tables import results, times_as_long, where
from trainstep.attention.tuned import CHOICES, ChoiceCase
from trainstep.base.stats import WITHIN_RUN
from trainstep.report.numbers import NONE, number
from trainstep.report.tables import Table, text_table
from trainstep.rows import AttentionRow, CeilingRow
from trainstep.rows.records import Scalar, by_case

OURS = "flash-triton"
PARTS = ("forward", "backward", "both")
SHAPE = ("batch", "heads", "seq", "head_dim", "causal")


PEERS = ("h200-attention-peers", "h200-attention-autotune")
"""Two runs: in the second, FlexAttention tuned itself for each shape, which takes most of a minute."""
Beside = dict[str, tuple[AttentionRow, AttentionRow]]
"""Implementation → its row, and ours of the same run."""


def by_shape() -> list[Beside]:
    """The implementations of every shape, each beside ours of its own run."""
    found: dict[tuple[Scalar, ...], Beside] = {}
    for name in PEERS:
        for group in by_case(results(name, AttentionRow), "impl"):
            ours = next(row for row in group if row.impl == OURS)
            shape = found.setdefault(tuple(value for key, value in ours.case.items() if key != "impl"), {})
            for row in group:
                shape.setdefault(row.impl, (row, ours))
    return list(found.values())


def peers() -> Table:
    """Our kernels beside the others, shape by shape, and the one that `auto` takes on this GPU."""
    every = by_shape()
    others = [impl for impl in dict.fromkeys(impl for found in every for impl in found) if impl != OURS]
    ceiling = ceiling_tflops()
    lines = []
    for found in every:
        ours, _ = found[OURS]
        of_ceiling = [f"{100 * rate / ceiling:.0f}" for rate in (ours.forward_tflops, ours.backward_tflops)]
        reached = (passes(ours), number(ours.both_tflops), " / ".join(of_ceiling))
        beside = (beside_ours(*found[impl]) if impl in found else "not run" for impl in others)
        case = ChoiceCase("sm_90", "bfloat16", ours.head_dim, ours.causal == "yes")
        chosen = [impl for length, impl in CHOICES.shipped()[case].by_length if ours.seq >= length][-1]
        lines.append((*(number(ours.case[name]) for name in SHAPE), *reached, *beside, chosen))
    wanted = (
        *SHAPE,
        "ours: forward / backward / both (ms)",
        "TFLOP/s",
        f"of the matrix ceiling of {ceiling:.0f} TFLOP/s (%): forward / backward",
        *(f"{impl} (ms, times ours [95 %])" for impl in others),
        "auto takes",
    )
    caption = f"bf16, forward and backward; intervals {WITHIN_RUN}, and flex-max-autotune had a run of its own"
    return text_table("peers", _caption(caption, (row for found in every for row, _ in found.values())), wanted, lines)


def _caption(said: str, rows: Iterable[AttentionRow]) -> str:
    """With the packages and the origin of the rows."""
    every = list(rows)
    return "; ".join([said, *sorted({row.package for row in every if row.package}), where(every)])


def beside_ours(row: AttentionRow, ours: AttentionRow) -> str:
    """Another implementation's time, and how many times ours that is."""
    if row.status != "ok":
        return row.status
    return f"{number(row.times['both'].median)} ({times_as_long(row, ours)})"


def passes(row: AttentionRow) -> str:
    """`forward / backward / both`, or why there are no times."""
    return " / ".join(number(row.times[part].median) for part in PARTS) if row.status == "ok" else row.status


def both_ms(row: AttentionRow | None) -> str:
    """The time of forward and backward together, or why there is none."""
    if row is None:
        return "not run"
    return number(row.times["both"].median) if row.status == "ok" else row.status


def ceiling_tflops(precision: str = "bf16") -> float:
    """The rate that `analyze` measured of a plain matrix product on the same kind of GPU."""
    (row,) = (row for row in results("h200-analyze-large", CeilingRow) if row.precision == precision)
    return row.tflops


def windows() -> Table:
    """Our kernels beside the others under a sliding window."""
    lines = []
    groups = by_case(results("h200-attention-window", AttentionRow), "impl")
    for group in groups:
        ours = next(row for row in group if row.impl == OURS)
        for row in group:
            times = NONE if row is ours else times_as_long(row, ours)
            lines.append((f"{row.window:,}", row.impl, passes(row), number(row.both_tflops), times))
    case = groups[0][0]
    setting = f"bf16, causal, {case.batch} × {case.heads} × {case.seq:,} × {case.head_dim}; intervals {WITHIN_RUN}"
    wanted = ("window", "implementation", "forward / backward / both (ms)", "TFLOP/s", "times ours [95 %]")
    return text_table("windows", _caption(setting, itertools.chain(*groups)), wanted, lines)


def deterministic() -> Table:
    """Our pair of kernels beside the others under `torch.use_deterministic_algorithms`."""
    groups = by_case(results("h200-attention-deterministic", AttentionRow), "impl")
    others = [row.impl for row in groups[0] if row.impl != OURS]
    lines = []
    for group in groups:
        by_impl = {row.impl: row for row in group}
        ours = by_impl[OURS]
        beside = (beside_ours(by_impl[impl], ours) for impl in others)
        lines.append((*(number(ours.case[name]) for name in SHAPE), passes(ours), number(ours.both_tflops), *beside))
    wanted = (*SHAPE, "ours: forward / backward / both (ms)", "TFLOP/s")
    wanted += tuple(f"{impl} (ms, times ours [95 %])" for impl in others)
    caption = f"bf16, the same bits every time; intervals {WITHIN_RUN}"
    return text_table("deterministic", _caption(caption, itertools.chain(*groups)), wanted, lines)


def naive() -> Table:
    """The eager formula beside its compiled form: time, and what both hold."""
    rows = results("h200-attention-naive", AttentionRow)
    found = {(row.head_dim, row.seq, row.impl): row for row in rows}
    lines = []
    for head_dim, seq in sorted({(row.head_dim, row.seq) for row in rows}):
        both = eager, compiled = [found[head_dim, seq, impl] for impl in ("eager", "eager-compiled")]
        is_timed = eager.status == compiled.status == "ok"
        times = (*map(passes, both), times_as_long(eager, compiled) if is_timed else NONE)
        held = (f"{number(row.before_backward_gib)} / {number(row.peak_gib)}" for row in both)
        formula = f"{number(eager.predicted_before_backward_gib)} / {number(eager.predicted_peak_gib)}"
        lines.append((number(head_dim), f"{seq:,}", *times, *held, formula))
    wanted = (
        *("head_dim", "sequence", "eager: forward / backward / both (ms)", "compiled (ms)"),
        *(f"compiled is faster by [95 %, {WITHIN_RUN}]", "eager: before backward / peak (GiB)", "compiled (GiB)"),
        "eager by formula (GiB)",
    )
    return text_table("naive", f"fp32, batch 8, no heads, full, intervals {WITHIN_RUN}; {where(rows)}", wanted, lines)


def by_length(dtype: str, head_dim: int) -> Table:
    """Time of every implementation against the sequence length."""
    name = "h200-attention-flash"
    rows = [row for row in results(name, AttentionRow) if (row.dtype, row.head_dim) == (dtype, head_dim)]
    impls = list(dict.fromkeys(row.impl for row in rows))
    found = {(row.seq, row.impl): row for row in rows}

    lines = [
        (f"{seq:,}", *(both_ms(found.get((seq, impl))) for impl in impls)) for seq in sorted({row.seq for row in rows})
    ]
    setting = f"{dtype}, head_dim {head_dim}, batch {rows[0].batch}, causal {rows[0].causal}"
    caption = f"forward and backward (ms), {setting}; {where(rows)}"
    return text_table(name, caption, ("sequence", *impls), lines)


TABLES: Mapping[str, Callable[[], Table]] = {
    "attention-peers": peers,
    "attention-windows": windows,
    "attention-deterministic": deterministic,
    "attention-naive": naive,
    **{
        f"attention-flash-{dtype}-{head_dim}": partial(by_length, dtype, head_dim)
        for dtype in ("bf16", "fp32")
        for head_dim in (16, 64, 128)
    },
}
