"""Precision: which dtype everything had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainstep.report import columns
from trainstep.report.blocks import Section, section
from trainstep.report.findings import Finding, found
from trainstep.report.tables import define, page_table
from trainstep.rows import DtypeRow
from trainstep.rows.records import Row, by_case, of_kind

COMPUTED = "computed by torch's autocast rules for CUDA, not measured"


def _caption(rows: Sequence[Row]) -> str:
    caption = "The dtype of everything in a training step; alike modules as one row"
    has_cuda = any(row.values.get("cuda_outputs") for row in rows)
    return f"{caption}; measured on a CPU, and outputs on CUDA are {COMPUTED}" if has_cuda else caption


DTYPES = define(
    DtypeRow,
    _caption,
    *columns.SETTINGS,
    columns.case("module", "module"),
    *columns.values({"class": "class_name", "modules": "modules"}),
    *(columns.value(name, name) for name in ("parameters", "inputs", "outputs", "gradients")),
    columns.value("outputs on CUDA", "cuda_outputs"),
    columns.OUTCOME,
)
TABLES = (DTYPES,)
RESULT, LOSS = "(forward's result)", "(loss)"  # The modules of the two rows that belong to none


def dtype_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Logits, loss, parameters and gradients under each precision."""
    seen = [row for row in of_kind(rows, DtypeRow) if row.status == "ok"]
    for precision in dict.fromkeys(row.precision for row in seen if row.precision is not None):
        own = {row.module: row for row in seen if row.precision == precision}
        result, loss = (", ".join(own[name].outputs or ()) if name in own else "–" for name in (RESULT, LOSS))
        weights, gradients = (
            tuple(sorted({", ".join(each) for each in dtypes if each}) or ["none"])
            for dtypes in ([row.parameters for row in own.values()], [row.gradients for row in own.values()])
        )
        said = (
            "Under {precision}, forward's result is {result} and the loss {loss}; parameters are {parameters:list}, "
            "their gradients {gradients:list}."
        )
        figures = {"precision": precision, "result": result, "loss": loss}
        yield found("precision.dtypes", said, **figures, parameters=weights, gradients=gradients)
        if any(row.cuda_outputs or row.not_computed for row in own.values()):
            yield _on_cuda(precision, own)


def _on_cuda(precision: str, own: Mapping[str, DtypeRow]) -> Finding:
    """The outputs that would have another dtype on CUDA than they had on the CPU."""
    if why := next((row.not_computed for row in own.values() if row.not_computed), None):
        said = "This was measured on a CPU. The dtypes on CUDA under {precision} are not known: {why}."
        return found("precision.cuda", said, precision=precision, why=why)
    both = {name: (", ".join(row.outputs or ()), ", ".join(row.cuda_outputs or ())) for name, row in own.items()}
    others = tuple(f"{name} {here} → {there}" for name, (here, there) in both.items() if here != there) or ("none",)
    said = (
        f"This was measured on a CPU. On CUDA under {{precision}}, {COMPUTED}, these outputs have another dtype: "
        "{others:list}."
    )
    return found("precision.cuda", said, precision=precision, others=others)


def script_dtypes(rows: Sequence[Row]) -> list[Finding]:
    """Parameters, gradients and what modules return in a script, whose precision is its own affair."""
    seen = [row for row in of_kind(rows, DtypeRow) if row.status == "ok" and row.precision is None]
    figures = {
        name: tuple(sorted({each for row in seen for each in getattr(row, name) or ()})) or ("none",)
        for name in ("parameters", "gradients", "outputs")
    }
    if not seen:
        return []
    said = "Parameters are {parameters:list}, their gradients {gradients:list}; modules return {outputs:list}."
    return [found("precision.script", said, **figures)]


RULES = (dtype_findings, script_dtypes)


def dtypes(rows: Sequence[Row]) -> Section | None:
    """The dtypes that were seen, precision by precision."""
    groups = enumerate(by_case(of_kind(rows, DtypeRow), "module"))
    tables = [page_table(DTYPES, own, f"dtypes-{place}") for place, own in groups]
    lead = "Autocast decides operation by operation, so these are read off the tensors as they passed."
    return section("dtypes", "Precision", "Which dtype everything had", lead, *tables)


SECTIONS = (dtypes,)
