"""Tables that TOML declares: columns of rows in `docs/tables.toml`, and single figures in `docs/facts.toml`."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tables import DECLARED, one, plain, results, setting, where
from tables.alone import communication
from trainstep.base.config import SIZES
from trainstep.base.schemes import SCHEMES
from trainstep.bench.cases import expand
from trainstep.bench.parallel.planned import moments, planned_bytes
from trainstep.bench.parallel.ratios import ratios_alike
from trainstep.report import columns
from trainstep.report.columns import Cell, Column, value_cell
from trainstep.report.numbers import number
from trainstep.report.subjects import fit
from trainstep.report.subjects.kernel_findings import brief_name
from trainstep.report.subjects.memory import residual_name
from trainstep.report.tables import Table, tabulate, text_table
from trainstep.rows import KINDS, ParallelRow
from trainstep.rows.records import Row

FACTS = tomllib.loads(Path(__file__).parents[1].joinpath("facts.toml").read_text("utf-8"))
SENT = DECLARED["sent"]
"""Scheme → how gradients and updated parameters travel, and how much a rank sends."""
FORMS: Mapping[str, Callable[[Row, str], Cell | str]] = {
    "plain": lambda row, name: columns.case(name, name).of(row),
    "thousands": lambda row, name: value_cell(row, name, lambda value: number(1e3 * value)),  # type: ignore[operator,arg-type]
    "kernel": lambda row, name: brief_name(str(row.values[name])),
    "code": lambda row, name: "eager" if row.case[name] == "off" else "compiled",
    "residual": lambda row, _: residual_name(row),
    "fit": lambda row, _: fit.form_of(row),
    "outcome": lambda row, _: row.status,
    "stem": lambda row, name: Path(str(row.case.get(name, "none"))).stem,
    "sent": lambda row, place: SENT[str(row.case["scheme"])][int(place)],
}
"""Form in `docs/tables.toml` → the cell; those of `trainstep.report.columns` go by their names."""


def planned_anew(row: Row) -> Row:
    """A scheme's row with today's plan; rows of other kinds as they are."""
    if not isinstance(row, ParallelRow):
        return row
    model, scheme = SIZES[str(row.workload)], SCHEMES[row.scheme]
    by_copies = row.transport == "peer-copies"
    if row.transport is None:  # FSDP's older rows do not say it
        by_copies = (scheme.wrapper, scheme.transport) == ("fsdp", "auto")
    scheme = dataclasses.replace(scheme, replicas=row.replicas, blocks_per_group=row.blocks_per_group or 1)
    settings = {"precision": row.precision, "optimizer": row.optimizer, "peer_copies": by_copies}
    plan = planned_bytes(scheme, model.num_parameters, row.world_size, model=model, **settings)
    return dataclasses.replace(row, **moments(plan))


def table(name: str, spec: Mapping[str, Any]) -> Table:
    """The table of a group's settings and its own."""
    kind: type[Row] = KINDS[spec["kind"]]
    if "columns" not in spec:
        return plain(*spec["files"], kind, brief=spec["brief"])
    made: Any = ratios_alike if spec.get("ratios") else list
    rows = [row for file in spec["files"] for row in made(results(file, kind)) if _is_shown(row, spec)]
    for by, order in reversed(spec.get("order", {}).items()):
        rows.sort(key=lambda row: order.index(row.case[by]) if order else row.case[by])
    if spec.get("planned"):
        rows = [planned_anew(row) for row in rows]
    caption = spec["caption"] if "caption" in spec else setting(rows) if spec["kind"] == "parallel" else ""
    wanted = [column for line in spec["columns"].strip().splitlines() for column in _columns(line, rows)]
    return tabulate(name, f"{caption}; {where(rows)}" if caption else where(rows), wanted, rows)


def _is_shown(row: Row, spec: Mapping[str, Any]) -> bool:
    fields = {**row.values, **row.case, "status": row.status}
    only = {**spec.get("order", {}), **spec.get("only", {})}
    return (
        all(fields.get(name) in values for name, values in only.items() if values)
        and all(fields.get(name) not in values for name, values in spec.get("without", {}).items())
        and all((fields.get(name) or 0) >= value for name, value in spec.get("least", {}).items())
    )


def _columns(line: str, rows: Sequence[Any]) -> Iterator[Column]:
    """The columns of a line of a group's `columns`."""
    title, _, words = line.rpartition(" = ")
    if words == "communication":
        yield from communication(rows)
    elif not title:
        yield from columns.named(*words.split(", "))
    else:
        *forms, name = words.split()
        name, _, digits = name.partition(":")
        form = forms[0] if forms else "value"
        if form in FORMS:
            yield Column(title, lambda row: FORMS[form](row, name))
        elif digits:
            yield columns.value(title, name, int(digits))
        else:
            yield getattr(columns, form)(title, name)


def facts_of(name: str) -> Table:
    """The figures of one page, each with the file of docs/results/ that it is from."""
    page = FACTS[name]
    facts = [fact for group in page["groups"] for fact in _facts(**group)]
    return text_table(name, page["caption"], ("figure", "value", "from"), facts)


def _facts(
    file: str,
    kind: str,
    facts: list[dict[str, Any]],
    case: Mapping[str, Any] | None = None,
    digits: int = 3,
    without: tuple[str, ...] = (),
) -> Iterator[tuple[str, str, str]]:
    for common in _cases(case or {}):
        for fact in facts:
            for further in _cases(fact.get("case", {})):
                settings = common | further
                says, name = fact["says"].format(**settings), file.format(**settings)
                value: Any = one(name, KINDS[kind], without, **settings).values[fact["value"]]
                shown = number(100 * value if says.endswith("(%)") else value, fact.get("digits", digits))
                yield says, shown, f"{name}.jsonl"


def _cases(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values of settings that have several."""
    return list(expand({name: value if isinstance(value, list) else [value] for name, value in settings.items()}))


TABLES: Mapping[str, Callable[[], Table]] = {
    name: partial(table, name, group | own) for group in DECLARED["group"] for name, own in group["table"].items()
} | {name: partial(facts_of, name) for name in FACTS}
