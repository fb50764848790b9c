"""A page as a reader of its source finds it, and what its ladder should hold."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

from tests.report import sample
from trainstep.rows import ChangeRow
from trainstep.rows.records import Row

HOSTILE = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
"""A name that would run as code, if it were not escaped."""
LADDER_COLUMNS = {
    "step_ms", "step_low_ms", "step_high_ms", "speedup", "speedup_low", "speedup_high", "gain", "gain_low", "gain_high",
    "peak_gib", "gradient_error", "error_budget", "power_w", "throttled_by", "verdict",
}  # fmt: skip


class Page(HTMLParser):
    """Elements and the raw values in the cells of tables, by table, row and column."""

    VOID = frozenset({"meta", "link", "br", "img", "i"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.values: dict[str, dict[str, dict[str, str]]] = {}
        self.anchors: list[str] = []  # of the navigation
        self.links: list[str] = []  # all
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.table = self.row = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        if tag not in self.VOID:
            self.open.append(tag)
        self.table, self.row = found.get("data-table", self.table), found.get("data-row", self.row)
        if "id" in found:
            self.ids.append(found["id"])
        self.addresses += [
            found[name] for name in ("src", "srcset", "href", "action", "data", "poster") if name in found
        ]
        if tag == "a":
            self.links.append(found["href"])
            self.anchors += [found["href"]] if "nav" in self.open else []
        if "table" in self.open and "data-column" in found and "data-value" in found:
            self.values.setdefault(self.table, {}).setdefault(self.row, {})[found["data-column"]] = found["data-value"]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes something else"


def hostile_records() -> list[Row]:
    """Names as a user's model could bear them: HTML, TeX and braces."""
    names = {"fused attention": HOSTILE, "bf16 autocast": "$$\\frac{1}{2}$$ @name"}
    return [
        dataclasses.replace(row, change=names.get(row.change, row.change), worst_parameter=f"blocks.0.{HOSTILE}")
        if isinstance(row, ChangeRow)
        else row
        for row in sample.cpu_analysis(workload=HOSTILE)
    ]
