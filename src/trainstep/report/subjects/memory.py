"""Memory: peaks of the analysed step and of a grid, and what forward keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainstep.base.advice import Line
from trainstep.report import columns
from trainstep.report.blocks import Facts, Section, fact, section
from trainstep.report.columns import Column
from trainstep.report.findings import Claim, Finding, found, literal
from trainstep.report.subjects import allocations
from trainstep.report.subjects.allocations import phase_peaks
from trainstep.report.subjects.steps import analysed_step
from trainstep.report.tables import define, page_table
from trainstep.rows import PeakRow, ResidualRow, WorkloadRow
from trainstep.rows.records import Row, Scalar, by_case, of_kind

AGREES = 0.05  # A prediction of the peak that is off by more than this share is remarked on
PEAKS = define(
    PeakRow,
    "Peak memory by phase",
    *columns.SETTINGS,
    columns.case("mode", "mode"),
    columns.value("at rest (GiB)", "at_rest_gib"),
    *(columns.value(f"{name} (GiB)", f"{name}_peak_gib") for name in ("forward", "loss", "backward", "optimizer")),
    *columns.values({"peak (GiB)": "peak_gib", "predicted (GiB)": "predicted_gib"}, digits=4),
    columns.value("prediction off by (%)", "prediction_error", digits=2),
    columns.value("not predicted", "not_predicted"),
    columns.OUTCOME,
)


def memory(records: Sequence[Row]) -> Section | None:
    """Memory at rest, and the peaks of the analysed step by phase."""
    step = analysed_step(records)
    if step is None or step.peak_gib is None:
        return None
    peaks = (f"{phase}_peak_gib" for phase in phase_peaks(step))
    known = ("parameters_gib", "optimizer_state_gib", "at_rest_gib", *peaks, "peak_gib")
    source = {name: row.values[name] for row in (*of_kind(records, WorkloadRow)[:1], step) for name in row.values}
    facts = Facts([fact(name, source[name]) for name in known if source.get(name)], name="memory")
    return section("memory", "Memory", "Where the memory goes", "", facts)


def peaks(records: Sequence[Row]) -> Section | None:
    """The peaks that were measured case by case: forward alone and full steps, by context and precision."""
    rows = of_kind(records, PeakRow)
    lead = (
        "The most bytes in live tensors during one step, after steps that made the optimizer’s state. Predictions come "
        "from the model’s shape alone; they leave out what the CUDA libraries allocate for themselves."
    )
    return section("peaks", "Peaks", "Peak memory, case by case", lead, page_table(PEAKS, rows, "peaks"))


def prediction_findings(records: Sequence[Row]) -> list[Finding]:
    """Distances of the plan's peaks from the measured ones."""
    errors = [(abs(row.prediction_error), row) for row in of_kind(records, PeakRow) if row.prediction_error is not None]
    if not errors:
        return []
    worst, row = max(errors, key=lambda each: each[0])
    figures = {"worst": worst, "peaks": len(errors), "over": sum(error > AGREES for error, _ in errors)}
    if worst <= AGREES:
        count = "{peaks} measured peaks" if len(errors) > 1 else "the measured peak"
        said = f"The plan predicts {count} to within {max(worst, 1e-4):.2%}."
        return [found("memory.predicted", said, **figures)]
    said = (
        f"The plan misses by more than {AGREES:.0%} for {{over}} of {{peaks}} measured peaks, at worst by "
        f"{{worst:.1%}} ({_told(row, 'context', 'precision', 'checkpointing')}); for small models the CUDA libraries' "
        "own workspaces, which it leaves out, are that large."
    )
    return [found("memory.prediction-off", said, **figures)]


def _told(row: Row, *names: str) -> str:
    return ", ".join(f"{name} {row.case[name]}" for name in names if row.case.get(name))


def uncompiled_findings(records: Sequence[Row]) -> list[Finding]:
    """Warn that figures of memory are those of eager code, though the workload compiles some of it."""
    count = sum(bool(getattr(row, "uncompiled", None)) for row in records)
    if not count:
        return []
    said = (
        "The workload compiles code of its own. Measurements of memory ran that code eagerly, because compiled code "
        "allocates out of sight. The peaks of {count} measurements are those of eager code, times are not."
    )
    return [found("memory.uncompiled", said, count=count)]


def cache_findings(records: Sequence[Row]) -> list[Finding]:
    """Warn that forward fills a key-value cache, which training does not use."""
    sizes = [size for row in records if (size := getattr(row, "cache_gib", None))]
    if not sizes:
        return []
    said = (
        "Forward fills a key-value cache of {gib:gib} that training does not use. It is kept until the loss is there, "
        "and with checkpointing through backward. Turn it off: use_cache=False in transformers' configurations."
    )
    off = Line("model.config.use_cache = False")
    largest = max(sizes)
    claim = Claim("Forward fills a key-value cache", ("memory",), gib=largest, action=off)
    return [found("memory.cache", said, claim, gib=largest)]


def fit_findings(records: Sequence[Row]) -> list[Finding]:
    """Cases of the grid that ran out of memory, with what they would have needed."""
    every = []
    for row in (row for row in of_kind(records, PeakRow) if row.status == "out of memory"):
        needs = row.predicted_gib
        why = ": it needs {predicted_gib:gib} by prediction" if needs is not None else ""
        said = f"Does not fit: a {{mode}} at {literal(_told(row, 'context', 'precision'))}{why}."
        claim = Claim("A {mode} does not fit", ("peak", "peaks"), gib=needs, is_part=False)
        every.append(found("memory.does-not-fit", said, claim, mode=row.mode, context=row.context, predicted_gib=needs))
    return every


_GROUP = ("group", "rank", "module")  # Settings that tell the rows of one part apart


def residual_name(row: Row) -> str:
    """`1. blocks.*.attention`, or the name of a group that is no module's."""
    assert isinstance(row, ResidualRow)
    return row.group if row.rank is None else f"{row.rank}. {row.module}"


RESIDUALS = define(
    ResidualRow,
    "What forward keeps for backward, without parameters; each storage once",
    *columns.SETTINGS,
    columns.case("part", "part"),
    Column("what", residual_name),
    *columns.values({"kept for": "operation", "tensor": "tensor", "storages": "storages", "MiB": "mib"}),
    *columns.values({"share (%)": "share", "formula (MiB)": "formula_mib"}),
    columns.OUTCOME,
)


def residuals(records: Sequence[Row]) -> Section | None:
    """Section of what forward saves, by module and operation."""
    groups = enumerate(by_case(of_kind(records, ResidualRow), "part", *_GROUP))
    tables = [page_table(RESIDUALS, own, f"residuals-{place}") for place, own in groups]
    lead = (
        "Tensors that autograd holds on to between forward and backward, without parameters, each storage once. These "
        "are the activations that a larger batch or context multiplies."
    )
    title = "What forward keeps for backward"
    return section("residuals", "Kept for backward", title, lead, *tables)


def residual_findings(records: Sequence[Row]) -> list[Finding]:
    """Findings on what one block saves, and what compilation leaves of it and of the whole step; case by case."""
    cases = by_case([row for row in of_kind(records, ResidualRow) if row.status == "ok"], "part", *_GROUP, "compile")
    return [finding for own in cases for finding in _kept(own, "Under {precision}, " if len(cases) > 1 else "")]


def _kept(rows: Sequence[ResidualRow], under: str) -> Iterator[Finding]:
    def kept(id: str, said: str, claim: Claim | None = None, /, **figures: Scalar) -> Finding:
        said = under + said if under else said[0].upper() + said[1:]
        return found(f"residuals.{id}", said, claim, precision=rows[0].precision, **figures)

    # Totals are of one part in one compiled form each; a sentence needs both forms of the same part.
    alls = {(row.part, row.compile): row.mib / 1024 for row in rows if row.group == "all" and row.mib is not None}
    block, compiled_block = (alls.get(("first block", form)) for form in ("off", "blocks"))
    step, compiled_step = (alls.get(("step", form)) for form in ("off", "model"))
    first = next((row for row in rows if (row.part, row.compile, row.rank) == ("first block", "off", 1)), None)
    if block is not None and first is not None and first.share is not None:
        said = (
            "forward keeps {gib:gib} for the backward of one block; the largest part, {share:.0%}, is kept for "
            f"{{operation}} in {{module}} ({literal(str(first.tensor))})."
        )
        claim = Claim("What one block keeps for backward", ("residuals",), gib=block, is_part=False, severity="aside")
        figures = {"share": first.share, "operation": first.operation, "module": first.module}
        yield kept("block", said, claim, gib=block, **figures)
    by_group = {row.group: row for row in rows}
    change, made = by_group.get("change of memory"), by_group.get("gradients")
    if change and made and change.mib is not None and made.mib and made.formula_mib:
        said = (
            "one block's backward frees {freed_gib:gib} and makes {gib:gib} of gradients (formula: {formula_gib:gib})."
        )
        sizes = {"freed_gib": made.mib - change.mib, "gib": made.mib, "formula_gib": made.formula_mib}
        yield kept("gradients", said, **{name: size / 1024 for name, size in sizes.items()})
    if block is not None and compiled_block is not None:
        said = "compiled, one block keeps {compiled_gib:gib} instead of {eager_gib:gib}."
        yield kept("compiled-block", said, eager_gib=block, compiled_gib=compiled_block)
    if step is not None and compiled_step is not None:
        said = (
            "of the whole step, eager code keeps {eager_gib:gib} and compiled code {compiled_gib:gib} "
            f"({compiled_step / step - 1:+.0%})."
        )
        yield kept("compiled-step", said, eager_gib=step, compiled_gib=compiled_step)


TABLES = (PEAKS, *allocations.TABLES, RESIDUALS)
SECTIONS = (memory, peaks, *allocations.SECTIONS, residuals)
RULES = (*allocations.RULES, residual_findings, prediction_findings, uncompiled_findings, cache_findings, fit_findings)
