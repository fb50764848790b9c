"""Schemes of data parallel training: their steps, memory and ratios to torch's, and traced steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trainstep.base.schemes import SCHEMES as SCHEMES_BY_NAME
from trainstep.report import columns
from trainstep.report.blocks import Block, Chart, Charts, Finding, Section, found, told_apart
from trainstep.report.charts.rows import Bar, bars
from trainstep.report.charts.traces import LEGEND, overlap_chart
from trainstep.report.columns import Cell, Column
from trainstep.report.numbers import NONE, number, numeric
from trainstep.report.tables import Definition, define, make_table
from trainstep.rows import (
    ParallelFamilyRow,
    ParallelRatioRow,
    ParallelRow,
    ParallelTraceRow,
)
from trainstep.rows.records import Row, Scalar, by_case, of_kind

_RANKS, _REPLICAS = columns.case("ranks", "world_size"), columns.case("replicas", "replicas")
_BLOCKS = columns.case("blocks a group", "blocks_per_group")
_SCHEME = columns.word("scheme", "scheme")
_ARM = (*columns.SETTINGS, _RANKS, columns.case("timing", "timing"), _SCHEME, _REPLICAS, _BLOCKS)
MEMORY_KINDS = {"weights": "weights", "gradients": "gradients", "state": "optimizer_state"}
"""Titles of what a rank holds → the middle of its columns."""

SAID_FAMILIES = 3
"""Of a traced step's kernels."""
PACE = 0.05
"""Of a step: so much the GPU may still have to do before the update when the host has launched that."""
LAUNCHED = 0.9
"""Of a step in a window, where the host may run ahead: so long it takes to launch one where it cannot."""
SHARES_DIFFER = 1e-3
"""Gradients of a batch further than this from the mean of its shares' differ by more than rounding."""


def alone_ms(row: ParallelRow, rows: Sequence[ParallelRow]) -> float | None:
    """What a scheme's step would take without communication, from the same run's step on one rank.

    A rank that keeps a part of the optimizer's state updates that part alone: of the one rank's optimizer time, 1/N is
    counted then, N being the ranks of a replica. Nothing is taken off for weights that a rank keeps a part of, whose
    casts it may divide too.
    """
    same = [each for each in rows if each.scheme == "single" and _is_alike(each, row)]
    single = next((each for each in same if "step" in each.times), None)
    if single is None:
        return None
    scheme = SCHEMES_BY_NAME.get(row.scheme)
    if scheme is None or scheme.planned_as in (None, "ddp"):
        return single.times["step"].median
    update = single.times["optimizer"].median if "optimizer" in single.times else 0.0
    return single.times["step"].median - update * (1 - (row.replicas or 1) / row.world_size)


def _is_alike(single: ParallelRow, row: ParallelRow) -> bool:
    """Whether both are of the same training on as many ranks."""
    own = ("scheme", "replicas", "blocks_per_group")
    return all(single.case.get(name) == value for name, value in row.case.items() if name not in own)


def beyond_alone(rows: Sequence[ParallelRow]) -> tuple[Column, Column]:
    """The step without communication, and what a scheme takes beyond it."""

    def alone(row: Row) -> Cell:
        assert isinstance(row, ParallelRow)
        value = alone_ms(row, rows) if "step" in row.times else None
        return Cell(number(value), value, "alone_ms")

    def beyond(row: Row) -> Cell:
        assert isinstance(row, ParallelRow)
        value, step = alone_ms(row, rows), _step_ms(row)
        over = None if value is None or step is None or row.scheme == "single" else step - value
        return Cell(number(over), over, "exposed_ms")

    return Column("without communication (ms)", alone), Column("beyond that (ms)", beyond)


def _schemes(rows: Sequence[Row]) -> Sequence[Column]:
    alone = beyond_alone(of_kind(rows, ParallelRow))
    at = next(place for place, each in enumerate(_COLUMNS) if each.title == "tokens/s")
    return (*_COLUMNS[:at], *alone, *_COLUMNS[at:])


_COLUMNS = (
    *columns.SETTINGS,
    _RANKS,
    columns.case("scheme", "scheme"),
    _REPLICAS,
    _BLOCKS,
    columns.COUNTED,
    columns.value("rounds", "rounds", brief=False, page=False),
    columns.median("step (ms) [95 %]", "step"),
    columns.value("launched by the host in (ms)", "issue_ms", brief=False),
    *columns.values({"tokens/s": "tokens_per_s", "collectives": "collectives"}),
    *columns.values({"sent (GiB)": "sent_gib", "sent by plan (GiB)": "sent_floor_gib"}),
    *(
        column
        for title, when in (("start", "start"), ("before step", "before_step"), ("after step", "after_step"))
        for column in (
            columns.value(f"{title} (GiB)", f"{when}_gib"),
            columns.value(f"{title} by plan (GiB)", f"predicted_{when}_gib"),
            *(
                columns.value(f"{title}: {kind} (GiB)", f"{when}_{name}_gib", brief=False)
                for kind, name in MEMORY_KINDS.items()
            ),
        )
    ),
    columns.value("peak (GiB)", "peak_gib"),
    columns.value("reserved (GiB)", "peak_reserved_gib", brief=False),
    *columns.values({"gradients off by": "gradient_error", "allowed": "gradient_allowed"}, brief=False),
    *columns.values({"in float32": "float32_error", "allowed": "float32_allowed"}, brief=False),
    *columns.values({"optimizer off by": "optimizer_error", "allowed": "optimizer_allowed"}, brief=False),
    *columns.values({"loss off by": "loss_error", "allowed": "loss_allowed"}, brief=False),
    *columns.values({"update off by": "update_error", "allowed": "update_allowed"}, brief=False),
    columns.OUTCOME,
)
SCHEMES = Definition(
    ParallelRow,
    "Schemes of data parallel training: step on the slowest rank, memory on the one that holds most; without "
    "communication a rank would take the single step, less the part of the update that others make in its place",
    _schemes,
)
TRACES = define(
    ParallelTraceRow,
    "One profiled step of rank 0, ms: exposed is communication while nothing is computed, idle is neither",
    *_ARM,
    *columns.values({"step without the profiler": "step_ms", "traced, first to last kernel": "span_ms"}),
    *columns.values({"computation": "computation_ms", "communication": "communication_ms"}),
    columns.value("hidden communication", "hidden_communication_ms"),
    *columns.values({"exposed communication": "exposed_communication_ms", "hidden (%)": "hidden_share"}),
    columns.value("idle", "idle_ms"),
    columns.count("kernels", "kernels", brief=False),
    columns.OUTCOME,
)
FAMILIES = define(
    ParallelFamilyRow,
    "Where the profiled step’s computation goes: kernel time of rank 0 by phase and family, added up",
    *_ARM,
    columns.word("phase", "phase"),
    columns.word("family", "family"),
    columns.count("kernels", "kernels"),
    *columns.values({"ms": "ms", "share (%)": "share"}),
)
RATIOS = define(
    ParallelRatioRow,
    "Ours over torch’s: below 1 is faster, or smaller; a peer with several settings takes its fastest",
    *_ARM,
    columns.word("beside", "peer_setting"),
    columns.ratio("time, ours over torch’s", "ratio"),
    columns.value("peak memory, ours over torch’s", "peak_ratio"),
    columns.value("rounds", "rounds"),
    columns.OUTCOME,
)


def overlap_findings(records: Sequence[Row]) -> list[Finding]:
    """The traced scheme that hides most of its communication, and the one that hides least."""
    traced = [row for row in of_kind(records, ParallelTraceRow) if row.hidden_share is not None]
    if not traced:
        return []
    traced.sort(key=lambda row: numeric(row.hidden_share), reverse=True)
    said, figures = "Of communication in the traced step, computation hides ", dict[str, Scalar]()
    for which, row in list({"most": traced[0], "least": traced[-1]}.items())[: len(traced)]:
        said += ", and " if which == "least" else ""
        said += f"{{{which}_hidden_share:.0%}} with {{{which}}} "
        said += f"({{{which}_exposed_ms:n}} of {{{which}_communication_ms:n}} ms"
        said += ")" if which == "least" else " are exposed)"
        figures |= {which: row.label, f"{which}_hidden_share": row.hidden_share}
        figures |= {f"{which}_exposed_ms": row.exposed_communication_ms}
        figures |= {f"{which}_communication_ms": row.communication_ms}
    return [found("parallel.hidden", f"{said}.", **figures)]


def computation_findings(records: Sequence[Row]) -> list[Finding]:
    """What the fastest traced scheme computes, by family of kernels."""
    traced = [row for row in of_kind(records, ParallelTraceRow) if row.computation_ms is not None]
    if not traced:
        return []
    fastest = min(traced, key=lambda row: numeric(row.computation_ms))
    ms: dict[str, float] = {}
    for row in of_kind(records, ParallelFamilyRow):
        if {**row.case, "phase": None, "family": None} == {**fastest.case, "phase": None, "family": None}:
            ms[row.family] = ms.get(row.family, 0.0) + numeric(row.ms)
    if not ms:
        return []
    most = sorted(ms, key=lambda family: -ms[family])
    figures: dict[str, Scalar] = {"scheme": fastest.label, "computation_ms": sum(ms.values())}
    parts = []
    for place, family in enumerate(most[:SAID_FAMILIES]):
        figures |= {f"family_{place}": family, f"family_{place}_ms": ms[family]}
        parts.append(f"{{family_{place}}} {{family_{place}_ms:n}}")
    if rest := sum(ms[family] for family in most[SAID_FAMILIES:]):
        figures["rest_ms"] = rest
        parts.append("everything else {rest_ms:n}")
    said = (
        f"Of {{computation_ms:n}} ms of kernels that compute in the traced step of {{scheme}}: {', '.join(parts)} ms."
    )
    return [found("parallel.computation", said, **figures)]


def data_findings(records: Sequence[Row]) -> list[Finding]:
    """What is odd about a workload's batches or its loss when they are divided: no scheme is wrong for it."""
    rows, told = of_kind(records, ParallelRow), list[Finding]()
    for row in {row.workload: row for row in rows if row.batches is not None}.values():
        said = "{workload}: its loader gives every rank other batches; all schemes, and the one process beside them, "
        said += "trained on those of rank 0, divided among the ranks."
        told.append(found("parallel.batches", said, workload=row.workload))
    for row in {row.workload: row for row in rows if numeric(row.share_difference or 0) > SHARES_DIFFER}.values():
        said = "{workload}: the gradients of a whole batch are {share:.1%} away from the mean of its shares’. Its loss "
        said += "is no mean over equal counts (padding, ignored labels), or looks across the batch (statistics, "
        said += "negatives): with more ranks every scheme, ours and torch’s, trains something a little different."
        told.append(found("parallel.shares", said, workload=row.workload, share=row.share_difference))
    return told


def host_findings(records: Sequence[Row]) -> list[Finding]:
    """The schemes of which the host sets the pace: when it comes to the update, so does the GPU."""
    rows = of_kind(records, ParallelRow)
    late = [row for row in rows if _waits_for_host(row)]
    if not late:
        return []
    latest = max(late, key=lambda row: row.times["issue"].median)
    compiling = "Compiled blocks, more" if any(row.compile == "off" for row in late) else "More"
    said = (
        "The host sets the pace of {schemes}: the GPU comes to the update when the host does ({latest}: launched in "
        f"{{issue_ms:ms}}, of a step of {{step_ms:ms}}). {compiling} tokens per GPU, or host cores of each rank’s own "
        "(taskset, torchrun’s --numa-binding) help; faster links will not."
    )
    figures: dict[str, Scalar] = {"schemes": ", ".join(dict.fromkeys(label_among(row, rows) for row in late))}
    figures |= {"latest": label_among(latest, rows), "issue_ms": latest.times["issue"].median}
    return [found("parallel.host", said, **figures, step_ms=_step_ms(latest))]


def _waits_for_host(row: ParallelRow) -> bool:
    """Told by steps with a synchronisation around each; in a window, only if to run ahead gains nothing either."""
    step, parts = _step_ms(row), ("issue", "wait", "optimizer", "optimizer_issue")
    if step is None or not all(name in row.times for name in parts):
        return False
    issue, wait, update, update_issue = (row.times[name].median for name in parts)
    before_update = wait + update_issue - update
    return before_update <= PACE * step and (row.timing != "sustained" or issue >= LAUNCHED * step)


def parallel(records: Sequence[Row]) -> Section | None:
    """Schemes of data parallel training: each one's step beside one without communication, and what a rank holds."""
    rows, traced = of_kind(records, ParallelRow), of_kind(records, ParallelTraceRow)
    families = of_kind(records, ParallelFamilyRow)
    if not rows and not traced:
        return None
    lead = (
        "Each scheme first trained a few steps and was compared with one process on the whole batch. A step lasts as "
        "long as on its slowest rank; what communication costs is the difference to the same step without any, where "
        "a sharded scheme’s rank updates only its part of the parameters."
    )
    ratios = of_kind(records, ParallelRatioRow)
    blocks = [
        *(_timed(rows) if rows else []),
        *([make_table(RATIOS, ratios, "page", name="parallel ratios")] if ratios else []),
        *(_traced(traced) if traced else []),
        *([make_table(FAMILIES, families, "page", name="parallel families")] if families else []),
    ]
    return Section("parallel", "Data parallel", "Data parallel training by scheme", lead, blocks)


def _timed(rows: Sequence[ParallelRow]) -> list[Block]:
    names = [label_among(row, rows) for row in rows]
    alone = [alone_ms(row, rows) for row in rows]
    steps = [_step_bar(*each) for each in zip(names, rows, alone, strict=True)]
    drawn = partial(bars, steps, "ms per step")
    legend = _step_legend([ms for row, ms in zip(rows, alone, strict=True) if "step" in row.times])
    charts = [Chart("parallel-step", "Step on the slowest rank", "", drawn, legend)]
    if any(row.peak_gib is not None for row in rows):
        legend = [("neutral", "weights, gradients and optimizer state"), ("accent", "all else, at the peak")]
        drawn = partial(bars, [_memory_bar(*each) for each in zip(names, rows, strict=True)], "GiB")
        charts.append(Chart("parallel-memory", "Memory of a rank", "", drawn, legend))
    return [Charts(charts), make_table(SCHEMES, rows, "page")]


def _step_legend(alone: Sequence[float | None]) -> list[tuple[str, str]]:
    """What the colours of the bars mean, by which have a step without communication to be held against."""
    whole = "the whole step: no single was timed beside it, so what communication costs is not known"
    if all(ms is None for ms in alone):
        return [("accent", whole)]
    beyond = "exposed communication and other cost" + (f"; or {whole}" if None in alone else "")
    return [("neutral", "the step without communication"), ("accent", beyond)]


def label_among(row: ParallelRow, rows: Sequence[ParallelRow]) -> str:
    """Its scheme, and how it is compiled if it is, where that is not the same for all of them."""
    differ = len({each.compile for each in rows}) > 1
    return f"{row.label}, compile {row.compile}" if differ and row.compile != "off" else row.label


def _step_ms(row: ParallelRow) -> float | None:
    return row.times["step"].median if "step" in row.times else None


def _step_bar(name: str, row: ParallelRow, alone: float | None) -> Bar:
    step = _step_ms(row)
    if step is None:
        return Bar(name, None, row.status, f"{row.status}: {row.reason}")
    tip = f"{number(step)} ms"
    if alone is not None and row.scheme != "single":
        tip += f"\n{number(step - alone)} ms beyond {number(alone)} ms without communication"
    base = step if row.scheme == "single" else min(alone or 0, step)
    times = row.times["step"]
    return Bar(name, step, f"{number(step)} ms", tip, low=times.low, high=times.high, base=base)


def _memory_bar(name: str, row: ParallelRow) -> Bar:
    peak = row.peak_gib
    if peak is None:
        return Bar(name, None, NONE, row.reason or "not measured")
    kept = {
        "weights": row.before_step_weights_gib or 0,
        "gradients": row.before_step_gradients_gib or 0,
        "optimizer state": row.before_step_optimizer_state_gib or 0,
    }
    tip = "\n".join([f"peak {number(peak)} GiB", *(f"{kind} {number(size)}" for kind, size in kept.items())])
    return Bar(name, peak, f"{number(peak)} GiB", tip, base=min(sum(kept.values()), peak))


def _traced(rows: Sequence[ParallelTraceRow]) -> list[Block]:
    """Steps below one another, a figure for each workload and number of ranks; and their sums."""
    groups = by_case([row for row in rows if row.status == "ok" and row.bars], "scheme", "replicas", "blocks_per_group")
    charts = [
        Chart(
            f"parallel-trace{f'-{place}' if place else ''}",
            "One step of rank 0, scheme by scheme, as the profiler saw it",
            _explained(group) + (f" {told_apart(group[0], [each[0] for each in groups])}." if len(groups) > 1 else ""),
            partial(overlap_chart, group),
            LEGEND,
        )
        for place, group in enumerate(groups)
    ]
    return [*(Charts([chart]) for chart in charts), make_table(TRACES, rows, "page", name="parallel trace")]


def _explained(rows: Sequence[ParallelTraceRow]) -> str:
    where = (
        "Communication is the time of Gloo’s threads in a collective"
        if any(row.on_cpu for row in rows)
        else "Communication is NCCL’s kernels and copies between GPUs"
    )
    shortest = max(row.exposed_from_us or 0 for row in rows)
    text = (
        f"{where}, waiting for other ranks included; it is exposed where nothing is computed meanwhile (drawn from "
        f"{number(shortest)} µs on, the table has all). Drag over a part, or scroll with Shift, to see it closer."
    )
    if (below := max(row.joined_below_us or 0 for row in rows)) > 0:
        text += f" Neighbouring kernels that together are shorter than {number(below)} µs are drawn as one."
    return text


TABLES = (SCHEMES, RATIOS, TRACES, FAMILIES)
RULES = (data_findings, host_findings, overlap_findings, computation_findings)
SECTIONS = (parallel,)
