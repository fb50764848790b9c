"""The tables of facts: what `docs/facts.toml` names, with the figures of docs/results/."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tables import one
from trainstep.bench.cases import expand
from trainstep.report.numbers import number
from trainstep.report.tables import Table, text_table
from trainstep.rows import KINDS

FACTS = Path(__file__).parents[1] / "facts.toml"


def table(name: str) -> Table:
    """The figures of one page, each with the file of docs/results/ that it is from."""
    page = tomllib.loads(FACTS.read_text(encoding="utf-8"))[name]
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


TABLES = {name: partial(table, name) for name in ("course-facts", "profile-facts")}
