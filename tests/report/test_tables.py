import csv
import dataclasses
import io
import itertools
import unicodedata
from dataclasses import fields

import pytest
import rich.console
from markdown_it import MarkdownIt

from trainstep.report.findings import found, literal
from trainstep.report.formats import to_csv, to_latex, to_markdown, to_typst, write_tables
from trainstep.report.subjects import TABLES, make_tables
from trainstep.report.subjects.sweep import axis_tables
from trainstep.report.tables import make_table, text_table
from trainstep.report.terminal import to_terminal
from trainstep.rows import StepRow, SweepRow, row_of
from trainstep.rows.row import make_row
from trainstep.rows.run import OfScript

NASTY = r"""a|b *c* _d_ `e` [f](g) <h> {i} \j 50% $k$ l&m #n ~o ^p @q "r", 's' // t /* u */ - v + w = x"""
TABLE = text_table(
    "nasty", f"caption {NASTY}", ("first", NASTY), ((NASTY, "1.5 ± 0.1"), ("[start of a row", "2×\n3–4 …"))
)


def unfolded(text):
    """A cell may not break a line; everything else must survive."""
    return text.replace("\n", " ")


def test_markdown_parses_back_to_the_same_cells():
    tokens = MarkdownIt().enable("table").parse(to_markdown(TABLE))
    cells = [
        "".join(child.content for child in inline.children)
        for opening, inline in itertools.pairwise(tokens)
        if opening.type in ("td_open", "th_open")
    ]
    expected = [*TABLE.columns, *(cell for row in TABLE.texts() for cell in row)]
    assert cells == [unfolded(cell) for cell in expected]


def test_csv_parses_back_to_the_same_cells():
    assert list(csv.reader(io.StringIO(to_csv(TABLE)))) == [list(TABLE.columns), *(list(row) for row in TABLE.texts())]


def test_typst_compiles_and_keeps_the_text(tmp_path):
    import typst  # here, so that a machine without it can still collect the tests it has come for

    source = tmp_path / "table.typ"
    source.write_text(to_typst(TABLE) + "\n#metadata([])<x>", encoding="utf-8")
    drawn = typst.compile(str(source), format="svg").decode()
    assert drawn.count("<use") > 100  # the glyphs of the cells are drawn, none swallowed as a comment or markup


def test_latex_parses_strictly():
    from pylatexenc.latexwalker import LatexEnvironmentNode, LatexWalker  # here, as above

    nodes, _, _ = LatexWalker(to_latex(TABLE), tolerant_parsing=False).get_latex_nodes()
    environments = [node.environmentname for node in nodes if isinstance(node, LatexEnvironmentNode)]
    assert environments == ["table"]


def test_latex_keeps_the_columns():
    from pylatexenc.latex2text import LatexNodes2Text

    table = text_table("plain", "c", ("a & b", "100%"), (("x_1", "$5"), ("{y}", "~z^2")))
    text = LatexNodes2Text().latex_to_text(to_latex(table))
    for cell in ("a & b", "100%", "x_1", "$5", "{y}"):
        assert cell in text


def step(precision, step_ms, **changes):
    values = {"step_ms": step_ms, "step_mean_ms": step_ms, "step_std_ms": 0.5, "forward_ms": 1.0, "n": 10}
    case = {"workload": "tiny", "precision": precision, "batch": 4, "mode": "step", "warmup": 5}
    return row_of("step", case, values, **changes)


def test_shared_settings_move_to_the_caption_and_failures_stay_rows():
    failed = row_of("step", step("tf32", 0).case, status="unsupported", reason="needs a GPU")
    table = make_table(TABLES[StepRow], [step("fp32", 20.0), step("bf16", 10.0), failed])
    assert "workload tiny" in table.caption
    assert "batch 4" in table.caption
    assert table.columns[0] == "precision"
    assert [row[0] for row in table.texts()] == ["fp32", "bf16", "tf32"]
    assert table.texts()[2][-1] == "unsupported: needs a GPU"
    assert "20.0 ± 0.50" in table.texts()[0]


def fields_of(kind):
    return {each.name: each for each in fields(kind)}


def of_model(kind, workload):
    """A row of this kind about a built-in model, whatever else it is of."""
    examples = {"str": "x", "int": 1, "float": 1.0}
    own = {name: examples[each.type] for name, each in fields_of(kind).items() if each.default is each.default_factory}
    own |= {"mib": 1.0} if "mib" in fields_of(kind) else {}  # some tables of one step have columns of values alone
    return kind(**own | {"workload": workload} | ({"context": 8, "batch": 1} if "context" in fields_of(kind) else {}))


OF_MODELS = [kind for kind in TABLES if "workload" in fields_of(kind) and not issubclass(kind, OfScript)]


@pytest.mark.parametrize("kind", OF_MODELS, ids=lambda kind: kind.kind)
@pytest.mark.parametrize("place", ["files", "terminal", "page"])
def test_a_table_that_names_a_size_has_its_shape(kind, place):
    names = {"2026/xl": "2560×10240×32×32", "small num_layers=2": "768×3072×2×12", "my.project:workload": None}
    for shown in (list(names), *([name] for name in names)):
        table = make_table(TABLES[kind], [of_model(kind, name) for name in shown], place)
        text = table.caption + "".join(map("".join, table.texts()))
        for name in shown:
            shape = names[name]
            assert (f"{name} {shape}" in table.caption) is (name in text and shape is not None), table.caption
        assert place != "files" or all(name in text for name in shown), "else nothing was tested"


def test_a_users_model_that_is_called_like_one_of_ours_has_no_shape():
    """`trainstep.analyze(small)`: a function's name."""
    assert "×" not in make_table(TABLES[StepRow], [StepRow(workload="small", precision="fp32")]).caption


def test_a_sweep_over_sizes_has_their_shapes():
    rows = [
        make_row(SweepRow, {"command": "plan", "size": size}, {"step_ms": 1.0}) for size in ("small,2025/xl", "m.toml")
    ]
    for table in make_tables(rows):
        assert table.caption.endswith("small 768×3072×12×12, 2025/xl 1600×6400×48×25"), table.name


def sized(kind, gib):
    """A row of this kind, all of whose sizes in GiB are this large."""
    fields = [each for each in dataclasses.fields(kind) if each.name not in ("samples", "environment", "series")]
    given = {each.name: "x" for each in fields if each.default is each.default_factory is dataclasses.MISSING}
    return kind(**given | {each.name: gib for each in fields if each.name.endswith("_gib")})


@pytest.mark.parametrize("kind", [kind for kind in TABLES if "_gib" in str(kind.__dataclass_fields__)])
def test_columns_of_small_sizes_are_in_mib_everywhere(kind):
    """The header has the unit, so that all cells of a column have it. The largest size decides."""
    for place in ("files", "terminal", "page"):
        small, mixed, large = (
            make_table(TABLES[kind], [sized(kind, size) for size in sizes], place)
            for sizes in ([0.05, 0.0999], [0.05, 0.1], [0.2, 30.0])
        )
        assert mixed.columns == large.columns
        assert small.columns == [title.replace("(GiB)", "(MiB)") for title in large.columns]
        assert "GiB" not in " ".join([*small.columns, small.caption])
        columns = zip(small.columns, *small.texts(), strict=True)
        sizes = [list(map(float, texts)) for title, *texts in columns if title not in large.columns]
        assert sizes or place == "terminal", "of a script's ladder the terminal shows no memory"
        assert all(each == pytest.approx([51.2, 102.3], rel=5e-3) for each in sizes)


@pytest.mark.parametrize(("gib", "head"), [(0.05, "MiB"), (0.5, "GiB")])
def test_a_sweep_of_memory_has_the_unit_that_fits(gib, head):
    rows = [row_of("sweep", {"command": "memory", "batch": n}, {"peak_gib": n * gib / 2, "number": n}) for n in (1, 2)]
    (table,) = axis_tables(rows)
    assert table.caption == f"Peak memory by batch, {head}"
    assert table.texts()[-1][-1] == {"MiB": "51.2", "GiB": "0.500"}[head]


def test_every_format_is_written_and_brief_tables_have_fewer_columns(tmp_path):
    (full,), (brief,) = make_tables([step("fp32", 20.0)]), make_tables([step("fp32", 20.0)], "terminal")
    assert set(brief.columns) < set(full.columns)
    write_tables([step("fp32", 20.0)], tmp_path)
    written = list(tmp_path.iterdir())
    assert sorted(path.name for path in written) == ["step.csv", "step.md", "step.tex", "step.typ"]
    assert all(path.stat().st_size > 50 for path in written)


def test_a_single_row_in_a_terminal_has_its_settings_in_the_caption_and_its_failure_in_the_row():
    case = {"workload": "m", "precision": "bf16", "compile": "off", "mode": "step"}
    (measured,) = make_tables([row_of("step", case, {"step_ms": 5.0})], "terminal")
    assert measured.caption == "Time of one step and its phases, ms (precision bf16, compile off, mode step)"
    assert (measured.columns[0], measured.texts()[0][0]) == ("workload", "m")
    assert "precision" not in measured.columns
    failed = row_of("step", case, status="failed", reason="no room")
    assert make_table(TABLES[StepRow], [failed], "terminal").texts() == [("m", "failed: no room")]
    assert "precision" in make_table(TABLES[StepRow], [failed]).columns, "files keep them as columns"


HOSTILE = "ok\x1b[2J\x1b]0;owned\x07\r\u202egnp.exe\u2066\u200f\u2028\x9b31m\udc80\x00end"


def terminal_text(table):
    console = rich.console.Console(file=io.StringIO(), width=400, force_terminal=False)
    console.print(to_terminal(table, 400))
    return console.file.getvalue()


def is_safe(text):
    """No character that is not seen but obeyed: controls, half surrogates, other line ends, directions of writing."""
    bidi = "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    obeyed = [each for each in text if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") or each in bidi]
    return not set(obeyed) - set("\n\t")


def test_names_cannot_steer_a_terminal():
    markup = terminal_text(text_table("t", "c", ("[bold]x[/bold]",), (("[red]y",),)))
    assert "[bold]x[/bold]" in markup
    assert "[red]y" in markup
    table = text_table("x", HOSTILE, [HOSTILE], [[HOSTILE]])
    shown = terminal_text(table)
    assert is_safe(shown)
    assert r"\x1b[2J" in shown
    assert r"\u202egnp.exe" in shown
    for writer in (to_markdown, to_latex, to_typst, to_csv):
        assert is_safe(writer(table)), writer
        writer(table).encode()


def test_findings_cannot_steer_a_terminal():
    sentence = found("kernels.top", "kernel {kernel}" + literal(HOSTILE), kernel=HOSTILE).sentence
    assert is_safe(sentence)
    assert "\n" not in sentence


@pytest.mark.parametrize(("names", "said"), [(("a",), "a"), (("b", "c"), "b and c"), (("d", "e", "f"), "d, e and f")])
def test_a_finding_lists_names_in_words(names, said):
    assert found("kernels.top", "limits {names}.", names=names).sentence == f"limits {said}."


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "@SUM(A1)", "-2+3+cmd", "\t=1", "=-1", "-x"]
NUMBERS = ["-1.5", "+3", "-0.5%", "-1.2e-05", "-1,234", "−3", "–", "1-2", "-1.5 ± 0.2", "-1 [-2–3]"]


def test_a_spreadsheet_runs_no_formula_of_a_name_and_numbers_stay_numbers():
    table = text_table("x", "y", ["name"], [[text] for text in (*FORMULAS, *NUMBERS)])
    _, *cells = csv.reader(io.StringIO(to_csv(table)))
    assert [cell for (cell,) in cells] == [*(f"'{text}" for text in FORMULAS), *NUMBERS]
