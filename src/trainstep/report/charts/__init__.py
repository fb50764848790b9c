"""The page's charts, drawn with Bokeh from plain rows. Bokeh is imported when a chart is drawn, not before.

No colour is fixed here. Every colour is a stand-in for a CSS variable of the page (`COLOURS`); the page's script puts
the variable's value in its place when it draws, and draws again when the reader switches between light and dark.
Charts have no toolbar and take no gestures, so they never catch a finger that scrolls the page; hovering (or tapping)
shows a row's figures. Names come from the user's model: they are drawn as plain text, and escaped in tooltips.
"""

from trainstep.report.charts.lines import Series, curves, dots, lines
from trainstep.report.charts.rows import ROW_HEIGHT, Bar, Fall, Outcome, bars, waterfall
from trainstep.report.charts.style import COLOURS, FONT, KINDS, SERIES, TOOLTIP, embedded, empty_figure

__all__ = [
    "COLOURS",
    "FONT",
    "KINDS",
    "ROW_HEIGHT",
    "SERIES",
    "TOOLTIP",
    "Bar",
    "Fall",
    "Outcome",
    "Series",
    "bars",
    "curves",
    "dots",
    "embedded",
    "empty_figure",
    "lines",
    "waterfall",
]
