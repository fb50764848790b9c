"""Tables of attention: beside the peers, the eager formula and its compiled form, by length, and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def by_shape(*names: str) -> list[Beside]:
    """The implementations of every shape in these files, each beside ours of its own run."""
    found: dict[tuple[Scalar, ...], Beside] = {}
    for name in names or PEERS:
        for group in by_case(results(name, AttentionRow), "impl"):
            ours = next(row for row in group if row.impl == OURS)
            shape = found.setdefault(tuple(value for key, value in ours.case.items() if key != "impl"), {})
            for row in group:
                shape.setdefault(row.impl, (row, ours))
    return list(found.values())


def beside(
    said: str,
    *names: str,
    settings: Sequence[str] = SHAPE,
    more: Sequence[tuple[str, Callable[[AttentionRow], str]]] = (),
) -> Table:
    """Our kernels beside the others of these files, shape by shape, with `more` columns of ours."""
    every = by_shape(*names)
    others = [impl for impl in dict.fromkeys(impl for found in every for impl in found) if impl != OURS]
    lines = []
    for found in every:
        ours, _ = found[OURS]
        of_ours = (*(number(ours.case[name]) for name in settings), passes(ours), number(ours.both_tflops))
        of_others = (beside_ours(*found[impl]) if impl in found else "not run" for impl in others)
        lines.append((*of_ours, *of_others, *(cell(ours) for _, cell in more)))
    wanted = (*settings, "ours: forward / backward / both (ms)", "TFLOP/s")
    wanted += (*(f"{impl} (ms, times ours [95 %])" for impl in others), *(title for title, _ in more))
    rows = [row for found in every for row, _ in found.values()]
    packages = sorted({row.package for row in rows if row.package})
    return text_table("beside", "; ".join([f"bf16, {said}", *packages, where(rows)]), wanted, lines)


def peers() -> Table:
    """The same with the share of the ceiling that ours reaches, and the one that `auto` takes on this GPU."""
    (ceiling,) = (row.tflops for row in results("h200-analyze-large", CeilingRow) if row.precision == "bf16")

    def of_ceiling(ours: AttentionRow) -> str:
        return " / ".join(f"{100 * rate / ceiling:.0f}" for rate in (ours.forward_tflops, ours.backward_tflops))

    def chosen(ours: AttentionRow) -> str:
        case = ChoiceCase("sm_90", "bfloat16", ours.head_dim, ours.causal == "yes")
        return [impl for length, impl in CHOICES.shipped()[case].by_length if ours.seq >= length][-1]

    said = f"forward and backward; intervals {WITHIN_RUN}, and flex-max-autotune had a run of its own"
    share = f"ours, of the matrix ceiling of {ceiling:.0f} TFLOP/s (%): forward / backward"
    return beside(said, more=[(share, of_ceiling), ("auto takes", chosen)])


def beside_ours(row: AttentionRow, ours: AttentionRow) -> str:
    """Another implementation's times, and how many times ours the sum is."""
    return passes(row) + (f" ({times_as_long(row, ours)})" if row.status == "ok" else "")


def passes(row: AttentionRow, *parts: str) -> str:
    """`forward / backward / both`, or these parts alone; or why there are no times."""
    return " / ".join(number(row.times[part].median) for part in parts or PARTS) if row.status == "ok" else row.status


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
    lines = []
    for seq in sorted({row.seq for row in rows}):
        both = (passes(found[seq, impl], "both") if (seq, impl) in found else "not run" for impl in impls)
        lines.append((f"{seq:,}", *both))
    setting = f"{dtype}, head_dim {head_dim}, batch {rows[0].batch}, causal {rows[0].causal}"
    caption = f"forward and backward (ms), {setting}; {where(rows)}"
    return text_table(name, caption, ("sequence", *impls), lines)


TABLES = {
    "attention-peers": peers,
    "attention-windows": partial(
        beside, f"intervals {WITHIN_RUN}", "h200-attention-window", settings=("window", *SHAPE)
    ),
    "attention-deterministic": partial(
        beside, f"the same bits every time; intervals {WITHIN_RUN}", "h200-attention-deterministic"
    ),
    "attention-naive": naive,
    **{
        f"attention-flash-{dtype}-{head_dim}": partial(by_length, dtype, head_dim)
        for dtype in ("bf16", "fp32")
        for head_dim in (16, 64, 128)
    },
}
