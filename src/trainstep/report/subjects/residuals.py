"""What forward keeps for backward, by module and operation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from trainstep.kinds import ResidualRow
from trainstep.records import Row, Scalar, by_case, of_kind
from trainstep.report.blocks import Block, Chart, Charts, Section
from trainstep.report.charts import Bar, bars
from trainstep.report.columns import OUTCOME, SETTINGS, Column, case_column, value_column
from trainstep.report.finding import Finding, in_gib
from trainstep.report.numbers import gib, number
from trainstep.report.tables import Definition, make_table

PARTS = {"first block": "One block", "step": "The whole step"}  # Parts that have charts, the smaller first
_GROUP = ("group", "rank", "module")  # Settings that tell the rows of one part apart


def residual_name(row: Row) -> str:
    """`1. blocks.*.attention`, or the name of a group that is no module's."""
    assert isinstance(row, ResidualRow)
    return row.group if row.rank is None else f"{row.rank}. {row.module}"


RESIDUALS = Definition(
    ResidualRow,
    "What forward keeps for backward, without parameters; each storage once",
    (
        *SETTINGS,
        case_column("part", "part"),
        Column("what", residual_name),
        value_column("kept for", "operation"),
        value_column("tensor", "tensor"),
        value_column("storages", "storages"),
        value_column("MiB", "mib"),
        value_column("share (%)", "share", 100),
        value_column("formula (MiB)", "formula_mib"),
        OUTCOME,
    ),
)
TABLES = (RESIDUALS,)


def residuals(records: Sequence[Row]) -> Section | None:
    """What forward keeps, by module and operation."""
    rows = of_kind(records, ResidualRow)
    if not rows:
        return None
    charts = []
    for part, words in PARTS.items():
        own = [row for row in rows if row.part == part and row.mib is not None]
        has_precisions = len({row.precision for row in own}) > 1
        for place, group in enumerate(by_case(own, *_GROUP)):
            told = f"{words}, {group[0].precision}" if has_precisions else words
            charts.append(_chart(f"{part}-{place}".replace(" ", "-"), told, group))
    blocks: list[Block] = [Charts(charts)] if charts else []
    for place, own in enumerate(by_case(rows, "part", *_GROUP)):
        blocks.append(make_table(RESIDUALS, own, "page", name=f"residuals-{place}"))
    lead = (
        "Tensors that autograd holds on to between forward and backward, without parameters, each storage once. These "
        "are the activations that a larger batch or context multiplies."
    )
    return Section("residuals", "Kept for backward", "What forward keeps for backward", lead, blocks)


SECTIONS = (residuals,)


def _chart(name: str, words: str, rows: Sequence[ResidualRow]) -> Chart:
    drawn = []
    for row in rows:
        if row.group == "all":
            continue
        size, share = row.mib or 0, row.share or 0
        what, tip = residual_name(row), f"{gib(size / 1024)}, {share:.1%} of it\n{row.tensor or 'various tensors'}"
        if row.operation:
            tip = f"{row.module}\n{tip}"
            is_compiled = row.operation == "CompiledFunction"  # which names neither operation nor module
            last = str(row.module).rpartition(".")[2]
            what = f"{row.rank}. {row.tensor if is_compiled else f'{row.operation}, {last}'}"
        drawn.append(Bar(what, size, f"{share:.1%}", f"{tip}\n{number(row.storages)} storages"))
    total = next((row.mib or 0 for row in rows if row.group == "all"), 0)
    form = "eager" if rows[0].compile == "off" else "compiled"
    title = f"{words}, {form}: {gib(total / 1024)}"
    return Chart(f"residuals-{name}", title, "", partial(bars, drawn, "MiB"))


def residual_findings(records: Sequence[Row]) -> list[Finding]:
    """What one block keeps, and what compilation leaves of it and of the whole step; case by case."""
    rows = [row for row in of_kind(records, ResidualRow) if row.status == "ok"]
    found, cases = [], by_case(rows, "part", *_GROUP, "compile")
    for own in cases:
        for id, sentence, figures in _kept(own):
            under = f"Under {own[0].precision}, {sentence}" if len(cases) > 1 else sentence
            told = {"precision": own[0].precision, **figures}
            found.append(Finding("kept for backward", under[0].upper() + under[1:], f"residuals.{id}", told))
    return found


RULES = (residual_findings,)


def _kept(rows: Sequence[ResidualRow]) -> list[tuple[str, str, dict[str, Scalar]]]:
    """Id, sentence and figures of each finding about rows of one case."""
    found: list[tuple[str, str, dict[str, Scalar]]] = []
    alls = {(row.part, row.compile): (row.mib or 0) / 1024 for row in rows if row.group == "all"}
    block, compiled_block = (alls.get(("first block", form)) for form in ("off", "blocks"))
    step, compiled_step = (alls.get(("step", form)) for form in ("off", "model"))
    first = next((row for row in rows if (row.part, row.compile, row.rank) == ("first block", "off", 1)), None)
    if block is not None and first is not None:
        share = first.share or 0
        sentence = (
            f"forward keeps {in_gib(block)} for the backward of one block; the largest part, {share:.0%}, is kept for "
            f"{first.operation} in {first.module} ({first.tensor})."
        )
        figures: dict[str, Scalar] = {"gib": block, "share": share, "operation": first.operation}
        found.append(("block", sentence, {**figures, "module": first.module}))
    if block is not None and compiled_block is not None:
        sentence = f"compiled, one block keeps {in_gib(compiled_block)} instead of {in_gib(block)}."
        found.append(("compiled-block", sentence, {"eager_gib": block, "compiled_gib": compiled_block}))
    if step is not None and compiled_step is not None:
        sentence = (
            f"of the whole step, eager code keeps {in_gib(step)} and compiled code {in_gib(compiled_step)} "
            f"({compiled_step / step - 1:+.0%})."
        )
        found.append(("compiled-step", sentence, {"eager_gib": step, "compiled_gib": compiled_step}))
    return found
