"""Records → tables, in Markdown, LaTeX, Typst, CSV and on the terminal.

A table is a pandas frame of formatted cells, made by choosing columns of records of one kind; writing it is a matter of
escaping. Every writer escapes what its format treats as special, so names from a user's model can hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainstep.report.records import Record, Scalar, of_kind

if TYPE_CHECKING:
    import pandas
    import rich.table


TERMINAL_CELL = 60
"""Characters of a cell that the terminal shows."""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    """Header, with the unit."""
    cell: Callable[[Record], str]
    """The text of one row's cell."""
    brief: bool = True
    """Whether the terminal shows it too; files always do."""
    setting: bool = False
    """Whether it says what was run: when it is the same in several rows, it moves to the caption."""


@dataclass(frozen=True)
class Table:
    """A titled table of formatted cells."""

    name: str
    """File name without ending."""
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def frame(self) -> pandas.DataFrame:
        """As a pandas frame of strings."""
        import pandas

        return pandas.DataFrame(list(self.rows), columns=list(self.columns))


def number(value: Scalar, digits: int = 3) -> str:
    """A number with `digits` significant digits (thousands in full), "–" for None, other values as they are."""
    if value is None:
        return "–"
    if isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text or abs(value) < 1e-4 else f"{value:.{digits}f}"


def value_column(title: str, name: str, scale: float = 1, digits: int = 3, brief: bool = True) -> Column:
    """One of the record's values."""

    def cell(row: Record) -> str:
        value = row.values.get(name)
        scaled = value * scale if isinstance(value, float) and scale != 1 else value
        return number(scaled, digits)

    return Column(title, cell, brief)


def case_column(title: str, name: str) -> Column:
    """One of the settings that identify the case."""
    return Column(title, lambda row: number(row.case.get(name)), setting=True)


def median_column(title: str, phase: str) -> Column:
    """The median with its 95 % interval."""

    def cell(row: Record) -> str:
        middle, low, high = (row.values.get(f"{phase}_{part}") for part in ("ms", "low_ms", "high_ms"))
        if middle is None or low is None or high is None:
            return number(middle)
        return f"{number(middle)} [{number(low)}–{number(high)}]"

    return Column(title, cell)


def mean_column(title: str, phase: str) -> Column:
    """Mean ± standard deviation."""

    def cell(row: Record) -> str:
        mean, std = row.values.get(f"{phase}_mean_ms"), row.values.get(f"{phase}_std_ms")
        return number(mean) if std is None else f"{number(mean)} ± {number(std, 2)}"

    return Column(title, cell, brief=False)


def ratio_column(title: str, name: str, brief: bool = True) -> Column:
    """A ratio with its interval."""

    def cell(row: Record) -> str:
        value, low, high = (row.values.get(name + part) for part in ("", "_low", "_high"))
        if value is None or low is None:
            return f"{number(value)}×" if value is not None else "–"
        return f"{number(value)}× [{number(low)}–{number(high)}]"

    return Column(title, cell, brief)


_OUTCOME = Column(
    "outcome", lambda row: row.status if row.status == "ok" else f"{row.status}: {row.reason}", setting=True
)

_SETTINGS = (
    *(case_column(name, name) for name in ("workload", "context", "batch", "precision", "compile", "attention")),
    case_column("loss kind", "loss"),
    case_column("checkpointing", "checkpointing"),
    case_column("optimizer kind", "optimizer"),
    case_column("seed", "seed"),
)

COLUMNS: Mapping[str, tuple[str, tuple[Column, ...]]] = {
    "workload": (
        "The workload",
        (
            case_column("workload", "workload"),
            value_column("parameters", "parameters"),
            value_column("weights (GiB)", "parameters_gib"),
            value_column("blocks", "blocks"),
            value_column("tokens per step", "tokens"),
            value_column("forward (TFLOP)", "forward_tflop"),
        ),
    ),
    "step": (
        "Time of one step and its phases, ms",
        (
            *_SETTINGS,
            case_column("mode", "mode"),
            case_column("warm-up", "warmup"),
            case_column("pass", "repeat"),
            Column("n", lambda row: number(row.values.get("n")), setting=True),
            *(value_column(name, f"{name}_ms") for name in ("forward", "loss", "backward", "optimizer")),
            median_column("step [95 %]", "step"),
            *(
                mean_column(f"{name}, mean ± std", name)
                for name in ("forward", "loss", "backward", "optimizer", "step")
            ),
            value_column("host waits", "wait_ms", brief=False),
            value_column("first step", "first_step_ms"),
            value_column("tokens/s", "tokens_per_s", brief=False),
            value_column("TFLOP/s", "achieved_tflops", brief=False),
            value_column("utilisation (%)", "utilisation", 100, brief=False),
            value_column("peak (GiB)", "peak_gib"),
            _OUTCOME,
        ),
    ),
    "rung": (
        "The ladder: one change per rung, each checked against the first rung's loss and gradients",
        (
            *_SETTINGS[:3],
            Column("rung", lambda row: str(row.case["rung"])),
            median_column("step (ms) [95 %]", "step"),
            ratio_column("speed-up [95 %]", "speedup"),
            ratio_column("against the rung before", "gain", brief=False),
            value_column("peak (GiB)", "peak_gib"),
            value_column("utilisation (%)", "utilisation", 100, brief=False),
            value_column("gradient error", "gradient_error", digits=2),
            value_column("budget", "error_budget", digits=2),
            value_column("verdict", "verdict"),
            Column("kept", lambda row: "yes" if row.values.get("kept") else "no", brief=False),
            Column("reason", lambda row: row.reason, brief=False),
        ),
    ),
    "control": (
        "The baseline at the start of the ladder and at its end: the interval of their ratio should contain 1",
        (
            *_SETTINGS[:3],
            value_column("start (ms)", "first_ms"),
            value_column("end (ms)", "again_ms"),
            ratio_column("end / start [95 %]", "ratio"),
            _OUTCOME,
        ),
    ),
    "attention": (
        "Attention: median of the passes in ms; TFLOP/s counts causal attention as half, backward as 2.5 forwards",
        (
            *(case_column(name, name) for name in ("dtype", "causal", "batch", "heads", "head_dim", "seq")),
            Column("implementation", lambda row: str(row.case["impl"])),
            value_column("forward", "forward_ms"),
            value_column("backward", "backward_ms"),
            median_column("both [95 %]", "both"),
            value_column("TFLOP/s forward", "forward_tflops", brief=False),
            value_column("TFLOP/s backward", "backward_tflops", brief=False),
            value_column("TFLOP/s", "both_tflops"),
            value_column("before backward (GiB)", "before_backward_gib"),
            value_column("by formula (GiB)", "predicted_before_backward_gib", brief=False),
            value_column("peak (GiB)", "peak_gib"),
            value_column("peak by formula (GiB)", "predicted_peak_gib"),
            value_column("score matrices at the peak", "score_matrices_at_peak", brief=False),
            value_column("error of o", "o_error", digits=2, brief=False),
            value_column("check and compilation (s)", "check_s", digits=2, brief=False),
            value_column("graphs compiled", "compilations", brief=False),
            value_column("recompiled while timed", "recompilations_timed", brief=False),
            _OUTCOME,
        ),
    ),
    "ceiling": (
        "What this device reaches",
        (
            case_column("operation", "what"),
            value_column("TFLOP/s", "tflops"),
            value_column("GB/s, read + written", "gb_s"),
        ),
    ),
    "dtype": (
        "The dtype of everything in a training step; alike modules as one row",
        (
            *_SETTINGS,
            case_column("module", "module"),
            value_column("class", "class"),
            value_column("modules", "modules"),
            *(value_column(name, name) for name in ("parameters", "inputs", "outputs", "gradients")),
            _OUTCOME,
        ),
    ),
    "accumulation": (
        "0.01 added a thousand times",
        (
            case_column("accumulator", "accumulator"),
            case_column("addend", "addend"),
            Column("sum", lambda row: f"{row.values['total']:.4f}"),
            value_column("why", "why"),
        ),
    ),
    "residual": (
        "What forward keeps for backward, without parameters; each storage once",
        (
            *_SETTINGS,
            case_column("part", "part"),
            Column("what", lambda row: str(row.case["what"])),
            value_column("kept for", "operation"),
            value_column("tensor", "tensor"),
            value_column("storages", "storages"),
            value_column("MiB", "mib"),
            value_column("share (%)", "share", 100),
            value_column("formula (MiB)", "formula_mib"),
            _OUTCOME,
        ),
    ),
    "checkpointing": (
        "One training step under checkpointing policies: peak memory predicted and measured, and time",
        (
            *(column for column in _SETTINGS if column.title != "checkpointing"),
            Column("checkpointing", lambda row: str(row.case["checkpointing"])),
            value_column("predicted (GiB)", "predicted_gib", digits=4),
            value_column("peak (GiB)", "peak_gib", digits=4),
            value_column("prediction off by (%)", "prediction_error", 100, digits=2),
            value_column("peak in", "peak_phase"),
            median_column("step (ms) [95 %]", "step"),
            _OUTCOME,
        ),
    ),
}
"""For every kind of record: its table's caption and columns."""


def make_tables(records: Sequence[Record], *, brief: bool = False) -> list[Table]:
    """One table per kind of record that has columns here; `brief` for the terminal."""
    kinds = [kind for kind in COLUMNS if of_kind(records, kind)]
    return [make_table(kind, of_kind(records, kind), brief=brief) for kind in kinds]


def make_table(kind: str, rows: Sequence[Record], *, brief: bool = False) -> Table:
    """The table of records of one kind, with the columns of that kind."""
    caption, columns = COLUMNS[kind]
    return tabulate(kind, caption, [column for column in columns if column.brief or not brief], rows)


def tabulate(name: str, caption: str, columns: Sequence[Column], rows: Sequence[Record]) -> Table:
    """The rows' cells under the given columns, without the empty ones; shared settings move to the caption."""
    shown = {column: cells for column in columns if set(cells := [column.cell(row) for row in rows]) - {"–", ""}}
    common = {
        column: cells[0] for column, cells in shown.items() if column.setting and len(rows) > 1 and len(set(cells)) == 1
    }
    kept = {column: cells for column, cells in shown.items() if column not in common}
    stated = ", ".join(f"{column.title} {text}" for column, text in common.items() if column is not _OUTCOME)
    return Table(
        name=name,
        caption=f"{caption} ({stated})" if stated else caption,
        columns=tuple(column.title for column in kept),
        rows=tuple(zip(*kept.values(), strict=True)),
    )


def to_markdown(table: Table) -> str:
    """A GitHub-flavoured Markdown table, its caption above."""
    escaped = _escaped(table, _MARKDOWN)
    return f"{_escape(table.caption, _MARKDOWN)}\n\n{escaped.to_markdown(index=False, disable_numparse=True)}\n"


def to_latex(table: Table) -> str:
    """A LaTeX `table` with a `tabular`; needs no package."""
    escaped = _escaped(table, _LATEX)
    rules = [" & ".join(escaped.columns), *(" & ".join(row) for row in escaped.itertuples(index=False))]
    body = " \\\\\n".join(rules[:1]) + " \\\\\n\\hline\n" + " \\\\\n".join(rules[1:]) + " \\\\"
    return (
        f"\\begin{{table}}\n\\caption{{{_escape(table.caption, _LATEX)}}}\n"
        f"\\begin{{tabular}}{{{'l' * len(table.columns)}}}\n\\hline\n{body}\n\\hline\n"
        "\\end{tabular}\n\\end{table}\n"
    )


def to_typst(table: Table) -> str:
    """A Typst `figure` with a `table`."""
    escaped = _escaped(table, _TYPST)
    header = ", ".join(f"[{title}]" for title in escaped.columns)
    body = "\n".join("    " + ", ".join(f"[{cell}]" for cell in row) + "," for row in escaped.itertuples(index=False))
    return (
        f"#figure(\n  table(\n    columns: {len(table.columns)},\n    table.header({header}),\n{body}\n  ),\n"
        f"  caption: [{_escape(table.caption, _TYPST)}],\n)\n"
    )


def to_csv(table: Table) -> str:
    """Comma-separated values, quoted where needed (RFC 4180)."""
    return str(table.frame().to_csv(index=False))


WRITERS: Mapping[str, Callable[[Table], str]] = {
    "md": to_markdown,
    "tex": to_latex,
    "typ": to_typst,
    "csv": to_csv,
}
"""File ending → writer."""


def write_tables(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write every table in every format into `folder`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for table in make_tables(records):
        for ending, writer in WRITERS.items():
            path = folder / f"{table.name}.{ending}"
            path.write_text(writer(table), encoding="utf-8")
            written.append(path)
    return written


def to_terminal(table: Table) -> rich.table.Table:
    """A rich table; markup in cells is shown, not obeyed, and long reasons are cut: the files have them in full."""
    import rich.box
    import rich.table
    import rich.text

    drawn = rich.table.Table(
        title=rich.text.Text(table.caption), box=rich.box.SIMPLE_HEAD, title_justify="left", pad_edge=False
    )
    for title in table.columns:
        drawn.add_column(rich.text.Text(title), overflow="fold")
    for row in table.rows:
        cells = (cell if len(cell) <= TERMINAL_CELL else cell[: TERMINAL_CELL - 1] + "…" for cell in row)
        drawn.add_row(*map(rich.text.Text, cells))
    return drawn


def _escaped(table: Table, escapes: Mapping[str, str]) -> pandas.DataFrame:
    frame = table.frame()
    frame.columns = [_escape(title, escapes) for title in frame.columns]
    return frame.map(lambda cell: _escape(cell, escapes))


def _escape(text: str, escapes: Mapping[str, str]) -> str:
    return "".join(escapes.get(character, character) for character in text)


_BREAKS = {"\n": " ", "\r": " "}
_MARKDOWN = _BREAKS | {character: f"\\{character}" for character in "\\|`*_[]<>#~$"}
_LATEX = _BREAKS | {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "[": "{[}",  # a row that starts with [ would be read as an argument of the \\ before it
    "]": "{]}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    "…": r"\ldots{}",
}
_TYPST = _BREAKS | {character: f"\\{character}" for character in "\\*_`$#<>@[]~/=-+"}
