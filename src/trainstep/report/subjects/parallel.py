"""Schemes of data parallel training: their steps, memory and ratios to torch's, and traced steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from trainstep.base.config import PHASES
from trainstep.report import columns
from trainstep.report.blocks import Chart, Charts, Section, section, told_apart
from trainstep.report.charts.traces import LEGEND, overlap_chart
from trainstep.report.columns import Cell, Column
from trainstep.report.findings import Claim, Finding, found
from trainstep.report.numbers import number, numeric
from trainstep.report.tables import define, page_table
from trainstep.rows import ParallelFamilyRow, ParallelRatioRow, ParallelRow, ParallelTraceRow
from trainstep.rows.records import AnyRow, Row, Scalar, by_case, of_kind

_RANKS, _REPLICAS = columns.case("ranks", "world_size"), columns.case("replicas", "replicas")
_BLOCKS = columns.case("blocks a group", "blocks_per_group")
_SCHEME = columns.word("scheme", "scheme")
_ARM = (*columns.SETTINGS, _RANKS, columns.case("timing", "timing"), _SCHEME, _REPLICAS, _BLOCKS)
MEMORY_KINDS = {"weights": "weights", "gradients": "gradients", "state": "optimizer_state"}
"""Titles of what a rank holds → the middle of its columns."""

MB_OF_GIB = 2**30 / 1e6
SAID_FAMILIES = 3
"""Families of a traced step's kernels that are named."""
PACE = 0.05
"""Share of a step that the GPU may still have to do before the update when the host has launched that."""
LAUNCHED = 0.9
"""Share of a step in a window, where the host may run ahead, that it takes to launch one where it cannot."""
SHARES_DIFFER = 1e-3
"""Gradients of a batch further than this from the mean of its shares' differ by more than rounding."""


SCHEMES = define(
    ParallelRow,
    "Schemes of data parallel training, on the slowest rank: phases without their waits for other ranks, and those "
    "waits, the exposed communication. Speed-up is over one process. Memory is of the rank that holds most",
    *columns.SETTINGS,
    _RANKS,
    columns.case("scheme", "scheme"),
    _REPLICAS,
    _BLOCKS,
    columns.COUNTED,
    columns.value("rounds", "rounds", brief=False, page=False),
    columns.median("step (ms) [95 %]", "step"),
    *(columns.value(f"{phase} (ms)", f"{phase}_computing_ms") for phase in PHASES),  # without its waits
    *columns.values({"exposed (ms)": "exposed_communication_ms", "of the step (%)": "exposed_share"}),
    Column("speed-up", lambda row: _times_as_fast(row)),
    *columns.values({"samples/s": "samples_per_s", "communication in all (ms)": "all_communication_ms"}),
    columns.count("calls", "collectives"),
    columns.value("sent (MB)", "sent_gib", scale=MB_OF_GIB),
    columns.value("sent by plan (MB)", "sent_floor_gib", scale=MB_OF_GIB),
    *columns.values({"tokens/s": "tokens_per_s", "launched by the host in (ms)": "issue_ms"}, brief=False),
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
    *columns.words({"phase": "phase", "family": "family"}),
    columns.count("kernels", "kernels"),
    *columns.values({"ms": "ms", "share (%)": "share"}),
)
RATIOS = define(
    ParallelRatioRow,
    "Ours over torch’s: below 1 is faster, or smaller; a peer with several settings takes its fastest",
    *_ARM,
    columns.word("beside", "peer_setting"),
    columns.ratio("time, ours over torch’s", "ratio"),
    *columns.values({"peak memory, ours over torch’s": "peak_ratio", "rounds": "rounds"}),
    columns.OUTCOME,
)


def exposed_findings(records: Sequence[Row]) -> list[Finding]:
    """The schemes that wait most and least for other ranks."""
    rows = of_kind(records, ParallelRow)
    timed = [row for row in rows if "exposed_communication" in row.times and row.scheme != "single"]
    if not timed:
        return []
    said, figures = list[str](), dict[str, Scalar]()
    for which, row in _ends(timed, lambda row: numeric(row.exposed_share)):
        waits = f"({{{which}_exposed_ms:n}} of {{{which}_step_ms:ms}})"
        said.append(f"{{{which}_share:share}} of the step with {{{which}}} {waits}")
        figures |= {which: label_among(row, rows), f"{which}_share": row.exposed_share}
        figures |= {f"{which}_exposed_ms": row.times["exposed_communication"].median}
        figures |= {f"{which}_step_ms": _step_ms(row)}
    return [found("parallel.exposed", f"Exposed communication takes {', and '.join(said)}.", **figures)]


def _ends(rows: Sequence[AnyRow], key: Callable[[AnyRow], float]) -> list[tuple[str, AnyRow]]:
    """Name the rows that have most and least of something; one row alone is the most."""
    ordered = sorted(rows, key=key, reverse=True)
    return [("most", ordered[0]), ("least", ordered[-1])][: len(ordered)]


def overlap_findings(records: Sequence[Row]) -> list[Finding]:
    """The traced scheme that hides most of its communication, and the one that hides least."""
    traced = [row for row in of_kind(records, ParallelTraceRow) if row.hidden_share is not None]
    if not traced:
        return []
    said, figures = list[str](), dict[str, Scalar]()
    ends = _ends(traced, lambda row: numeric(row.hidden_share))
    for which, row in ends:
        exposed = f"{{{which}_exposed_ms:n}} of {{{which}_communication_ms:n}} ms"
        said.append(f"{{{which}_hidden_share:.0%}} with {{{which}}} ({exposed}{' are exposed' * (which == 'most')})")
        figures |= {which: row.label, f"{which}_hidden_share": row.hidden_share}
        figures |= {f"{which}_exposed_ms": row.exposed_communication_ms}
        figures |= {f"{which}_communication_ms": row.communication_ms}
    claimed = "With {least}, {least_hidden_share:.0%} of communication is hidden; with {most}, {most_hidden_share:.0%}"
    exposed_ms = ends[1][1].exposed_communication_ms if len(ends) > 1 else None
    claim = Claim(claimed, ("parallel-trace", "parallel"), ms=exposed_ms, is_part=False)
    said_of = f"Of communication in the traced step, computation hides {', and '.join(said)}."
    return [found("parallel.hidden", said_of, claim, **figures)]


def computation_findings(records: Sequence[Row]) -> list[Finding]:
    """Findings on what the fastest traced scheme computes, by family of kernels."""
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
    # The first families are named and the rest is one figure, so that the figures add up to the whole.
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
    """Findings on what is odd about a workload's batches or its loss when they are divided: no scheme is wrong for
    it."""
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
        "Launch-bound: {schemes}. The GPU comes to the update when the host does ({latest}: launched in "
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
    # The host waits for all that the GPU has left; less the update's share, that is its work before the update.
    before_update = wait + update_issue - update
    return before_update <= PACE * step and (row.timing != "sustained" or issue >= LAUNCHED * step)


def parallel(records: Sequence[Row]) -> Section | None:
    """Schemes of data parallel training: each one's step beside one without communication, and what a rank holds."""
    lead = (
        "Each scheme first trained a few steps and was compared with one process on the whole batch. A step lasts as "
        "long as on its slowest rank. Its exposed communication is marked in the timed steps, wherever they wait."
    )
    blocks = (
        page_table(SCHEMES, records),
        page_table(RATIOS, records, "parallel ratios"),
        *_traced(of_kind(records, ParallelTraceRow)),
        page_table(TRACES, records, "parallel trace"),
        page_table(FAMILIES, records, "parallel families"),
    )
    return section("parallel", "Data parallel", "Data parallel training by scheme", lead, *blocks)


def label_among(row: ParallelRow, rows: Sequence[ParallelRow]) -> str:
    """Label of a row's scheme, and how it is compiled if it is, where that is not the same for all of them."""
    differ = len({each.compile for each in rows}) > 1
    return f"{row.label}, compile {row.compile}" if differ and row.compile != "off" else row.label


def _step_ms(row: ParallelRow) -> float | None:
    return row.times["step"].median if "step" in row.times else None


def _times_as_fast(row: Row) -> Cell:
    """The speed-up, with its interval on the page alone: it would be the widest column of a terminal."""
    cell = columns.ratio_cell(row, "speedup")
    return replace(cell, in_files=cell.text)


def _traced(rows: Sequence[ParallelTraceRow]) -> list[Charts]:
    """Draw steps below one another, a figure for each workload and number of ranks."""
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
    return [Charts([chart]) for chart in charts]


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
RULES = (data_findings, exposed_findings, host_findings, overlap_findings, computation_findings)
SECTIONS = (parallel,)
