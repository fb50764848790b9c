"""Charts: what they draw, and that no colour and no string escapes the page's control."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from xml.etree import ElementTree

import pytest

from trainstep.report.charts import ROLES, Scale
from trainstep.report.charts.lines import Series, lines
from trainstep.report.charts.rows import BEYOND, BROKEN, Fall, waterfall

FALLS = [
    Fall("baseline", 0, 200, "baseline", "200 ms", "", 190, 205),
    Fall("faster", 200, 120, "kept", "120 ms", "", 118, 121),
    Fall("wrong", 120, None, "failed", "wrong", "off"),
    Fall("same", 120, 119, "left", "119 ms", ""),
    Fall("slower", 120, 150, "slower", "150 ms", "", 149, 152),
]
LINES = [Series("one", [1, 2, 3], [1.0, 2.0, 4.0], "accent"), Series("two", [2, 3], [2.0, 3.0], "neutral")]


def part(chart: str, name: str) -> ElementTree.Element:
    found = ElementTree.fromstring(chart).find(f".//*[@class='{name}']")
    assert found is not None
    return found


def drawn(chart: str, tag: str, role: str = "") -> list[dict[str, str]]:
    """The attributes of all marks of a kind; of those with the words of `role` as classes."""
    found = [each.attrib for each in part(chart, "marks").iter(tag)]
    return [each for each in found if set(role.split()) <= set(each["class"].split())]


def spans(chart: str, role: str = "", tip: str = "") -> list[tuple[float, float]]:
    """Left and right of rectangles whose tooltip begins so, in the chart's unit."""
    low, high = ends(chart)[:2]
    bars = [each for each in drawn(chart, "rect", role) if each.get("data-tip", "").startswith(tip)]
    share = [[float(each[name].removesuffix("%")) / 100 for name in ("x", "width")] for each in bars]
    return [(low + x * (high - low), low + (x + width) * (high - low)) for x, width in share]


def ends(chart: str) -> list[float]:
    """Both ends of x and of y."""
    return [float(each) for each in part(chart, "frame").attrib["data-ends"].split()]


def names(chart: str, axis: str) -> list[str]:
    return [text.text or "" for text in part(chart, f"{axis}-axis").iter("text")]


def tips(chart: str) -> list[str]:
    return [each["data-tip"] for each in drawn(chart, "rect", "cover")]


def test_the_waterfall_runs_from_the_kept_time_to_each_rung_s() -> None:
    chart = waterfall(FALLS, "ms")

    bars = {role: spans(chart, role=role) for role in ("neutral", "accent", "outline", "hatched")}
    expected = {
        "neutral": [(0, 200), (119, 120)],
        "accent": [(120, 200)],
        "outline": [(119, 120)],
        "hatched": [(120, 150)],
    }
    assert bars == {role: [pytest.approx(each, abs=0.01) for each in found] for role, found in expected.items()}
    (cross,) = drawn(chart, "text", "cross")
    assert float(cross["x"].removesuffix("%")) / 100 * ends(chart)[1] == pytest.approx(120, abs=0.01)
    levels = [float(each["d"].split()[0][1:]) / 1000 * ends(chart)[1] for each in drawn(chart, "path", "muted")]
    assert levels == pytest.approx([200, 120, 120, 120], abs=0.1)
    assert ends(chart)[1] > 205


def test_a_waterfall_that_starts_with_a_failure() -> None:
    chart = waterfall([Fall("first", 0, None, "failed", "out of memory", "full"), *FALLS], "ms")

    first, _ = drawn(chart, "text", "cross")
    assert first["x"] == "0%"
    assert len(drawn(chart, "path", "muted")) == 4


@pytest.mark.parametrize("times", [0.9, 1.1])
def test_one_slow_change_breaks_the_axis_and_flattens_no_other(times: float) -> None:
    slow = replace(FALLS[-1], end=200 * BROKEN * times, low=None, high=None)
    chart = waterfall([*FALLS[:-1], slow], "ms")

    is_broken = times > 1
    assert len(drawn(chart, "text", "break")) == is_broken
    assert ends(chart)[1] == pytest.approx(BEYOND * 200 if is_broken else 1.03 * slow.end)
    assert spans(chart, role="hatched")[0][1] == pytest.approx(min(slow.end, ends(chart)[1]), rel=1e-3)


def test_names_are_escaped_and_cut() -> None:
    tex = r"$$\frac{1}{2}$$ <b>&"
    chart = waterfall([Fall(tex, 0, 1.0, "baseline", tex, tex), Fall("x" * 60, 0, 1.0, "left", "", "")], "ms")

    assert names(chart, "y") == [tex, "x" * 23 + "…", tex, ""]
    assert tips(chart)[0] == f"{tex}\n{tex}"


def test_hovering_shows_each_row_or_all_lines_at_one_x() -> None:
    assert tips(waterfall(FALLS, "ms"))[:3] == ["baseline\n", "faster\n", "wrong\noff"]
    chart = lines(LINES, "batch", "loss")
    assert tips(chart) == ["batch 1\none: 1", "batch 2\none: 2\ntwo: 2", "batch 3\none: 4\ntwo: 3"]
    low, high = ends(chart)[:2]
    columns = [(low, 1.5), (1.5, 2.5), (2.5, high)]
    assert spans(chart, role="cover") == [pytest.approx(each, abs=0.01) for each in columns]
    assert tips(lines([Series("one", [1], [1.0], "accent", texts=["1e-5"])], "batch", "loss")) == ["batch 1\none: 1e-5"]


def test_curves_have_a_tick_and_a_dot_at_each_size() -> None:
    chart = lines([Series("one", [64, 256], [1.0, 8.0], "accent")], "length", "ms", log=True, sizes=[64, 128, 256])
    assert names(chart, "x") == ["64", "128", "256"]
    assert len(drawn(chart, "circle")) == 2
    first, last = (float(each["cx"].removesuffix("%")) for each in drawn(chart, "circle"))
    assert first == pytest.approx(100 - last, abs=0.01)


def test_noise_is_not_blown_up_to_fill_a_chart() -> None:
    low, high = ends(lines([Series("flat", [1, 2], [100.0, 100.1], "accent")], "x", "y"))[2:]
    assert high - low >= 5

    low, high = ends(lines([Series("wide", [1, 2], [1.0, 9.0], "accent")], "x", "y"))[2:]
    assert low < 1 < 9 < high < 11

    low, high = ends(lines([Series("off", [1, 2], [-1.0, 3.0], "accent")], "x", "y", around_zero=True))[2:]
    assert low == -high < -3


@pytest.mark.parametrize(
    ("scale", "texts"),
    [
        (Scale(0, 250), ["0", "50", "100", "150", "200", "250"]),
        (Scale(0.97, 4.1), ["1", "2", "3", "4"]),
        (Scale(-0.3, 0.3), ["−0.2", "0", "0.2"]),
        (Scale(0.9, 4000, log=True), ["1", "10", "100", "1,000"]),
        (Scale(3, 40, log=True), ["5", "10", "20"]),
        (Scale(1e-6, 4e-6), ["1×10⁻⁶", "2×10⁻⁶", "3×10⁻⁶", "4×10⁻⁶"]),
    ],
)
def test_ticks_are_round(scale: Scale, texts: list[str]) -> None:
    assert list(scale.ticks().values()) == texts
    assert [scale(scale.low), scale(scale.high)] == [0, pytest.approx(100)]


def test_every_role_has_a_colour_by_day_and_by_night() -> None:
    css = files("trainstep.report").joinpath("page.css").read_text()
    day, night = css.split("prefers-color-scheme: dark", 1)
    for part in (day, night):
        assert [role for role in ROLES if not re.search(rf"--{role}: #[0-9a-f]{{6}};", part)] == []
    assert [role for role in ROLES if f".{role} {{ --swatch: var(--{role}); }}" not in css] == []
