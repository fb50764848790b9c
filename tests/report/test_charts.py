"""Charts: what they draw, and that no colour and no string escapes the page's control."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from bokeh.models import GlyphRenderer, HBar, HoverTool, PlainText, Scatter, Segment
from bokeh.plotting import figure

from trainstep.report.charts import COLOURS, embedded
from trainstep.report.charts.lines import Series, curves, lines
from trainstep.report.charts.rows import Fall, waterfall

FALLS = [
    Fall("baseline", 0, 200, "baseline", "200 ms", "", 190, 205),
    Fall("faster", 200, 120, "kept", "120 ms", "", 118, 121),
    Fall("wrong", 120, None, "failed", "wrong", "off"),
    Fall("same", 120, 119, "left", "119 ms", ""),
    Fall("slower", 120, 150, "slower", "150 ms", "", 149, 152),
]
LINES = [Series("one", [1, 2, 3], [1.0, 2.0, 4.0], "accent"), Series("two", [2, 3], [2.0, 3.0], "neutral")]


def glyphs(plot: figure, kind: type) -> list[dict[str, Any]]:
    """The data behind every glyph of a kind that has its columns to itself."""
    found = []
    for renderer in plot.renderers:
        if isinstance(renderer, GlyphRenderer) and isinstance(renderer.glyph, kind):
            found.append(dict(renderer.data_source.data))
    return found


def hover_texts(plot: figure) -> list[tuple[str, str]]:
    (tool,) = plot.select(HoverTool)
    (renderer,) = tool.renderers
    data = renderer.data_source.data
    return list(zip(data["name"], data["tip"], strict=True))


def labels(plot: figure, side: str) -> list[Any]:
    (axis,) = getattr(plot, side)
    return [axis.major_label_overrides[tick] for tick in axis.ticker.ticks]


def plots() -> list[figure]:
    return [waterfall(FALLS, "ms"), lines(LINES, "x", "y"), curves([1, 2, 3], LINES, "x", "y")]


def test_the_waterfall_runs_from_the_kept_time_to_each_rung_s() -> None:
    plot = waterfall(FALLS, "ms")

    drawn = [(data["y"][0], data["left"][0], data["right"][0]) for data in glyphs(plot, HBar) if "left" in data]
    assert drawn == [(0, 0, 200), (-1, 120, 200), (-3, 119, 120), (-4, 120, 150)]
    assert [(data["x"], data["y"]) for data in glyphs(plot, Scatter)] == [([120], [-2])]
    levels = [data["x0"][0] for data in glyphs(plot, Segment) if len(data["x0"]) == 1]
    assert levels == [200, 120, 120, 120]
    assert plot.x_range.end > 205


def test_a_waterfall_that_starts_with_a_failure() -> None:
    plot = waterfall([Fall("first", 0, None, "failed", "out of memory", "full"), *FALLS], "ms")

    assert [(data["x"], data["y"]) for data in glyphs(plot, Scatter)] == [([0, 120], [0, -3])]
    assert [data["x0"][0] for data in glyphs(plot, Segment) if len(data["x0"]) == 1] == [200, 120, 120, 120]


def test_rows_are_labelled_with_plain_text_never_typeset() -> None:
    tex = "$$\\frac{1}{2}$$"
    plot = waterfall([Fall(tex, 0, 1.0, "baseline", tex, ""), Fall("x" * 60, 0, 1.0, "left", "", "")], "ms")

    left, right = labels(plot, "left"), labels(plot, "right")
    assert all(isinstance(text, PlainText) for text in left + right)
    assert left[0].text == right[0].text == tex
    assert left[1].text == "x" * 23 + "…"


def test_hovering_shows_each_row_or_all_lines_at_one_x() -> None:
    assert hover_texts(waterfall(FALLS, "ms"))[:3] == [("baseline", ""), ("faster", ""), ("wrong", "off")]
    assert hover_texts(lines(LINES, "batch", "loss")) == [
        ("batch 1", "one: 1"),
        ("batch 2", "one: 2\ntwo: 2"),
        ("batch 3", "one: 4\ntwo: 3"),
    ]
    named = [Series("one", [1], [1.0], "accent", texts=["1e-5"])]
    assert hover_texts(lines(named, "batch", "loss")) == [("batch 1", "one: 1e-5")]


def test_noise_is_not_blown_up_to_fill_a_chart() -> None:
    flat = lines([Series("flat", [1, 2], [100.0, 100.1], "accent")], "x", "y")
    assert flat.y_range.end - flat.y_range.start >= 5

    wide = lines([Series("wide", [1, 2], [1.0, 9.0], "accent")], "x", "y")
    assert wide.y_range.start < 1 < 9 < wide.y_range.end < 11

    balanced = lines([Series("off", [1, 2], [-1.0, 3.0], "accent")], "x", "y", around_zero=True)
    assert balanced.y_range.start == -balanced.y_range.end < -3


@pytest.mark.parametrize("plot", plots(), ids=["waterfall", "lines", "curves"])
def test_charts_take_no_gestures_fill_their_column_and_have_stand_ins_for_colours(plot: figure) -> None:
    colours = set(re.findall(r"#[0-9a-fA-F]{6}\b", json.dumps(embedded(plot))))
    assert set() < colours <= set(COLOURS.values())
    assert (plot.toolbar_location, plot.sizing_mode) == (None, "stretch_width")
    assert [type(tool) for tool in plot.tools] == [HoverTool]


def test_stand_ins_are_distinct_and_are_in_the_style_sheet() -> None:
    from importlib.resources import files

    css = files("trainstep.report").joinpath("page.css").read_text()
    day, night = css.split("prefers-color-scheme: dark", 1)
    assert len(set(COLOURS.values())) == len(COLOURS)
    for part in (day, night):
        assert [role for role in COLOURS if not re.search(rf"--{role}: #[0-9a-f]{{6}};", part)] == []
