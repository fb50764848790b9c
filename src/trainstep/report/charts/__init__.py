"""The page's charts, drawn with Bokeh from plain rows. Bokeh is imported when a chart is drawn, not before.

No colour is fixed here. Every colour is a stand-in for a CSS variable of the page (`COLOURS`); the page's script puts
the variable's value in its place when it draws, and draws again when the reader switches between light and dark.
Charts have no toolbar and take no gestures, so they never catch a finger that scrolls the page; hovering (or tapping)
shows a row's figures. Names come from the user's model: they are drawn as plain text, and escaped in tooltips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bokeh.plotting import figure

SERIES = ("series-1", "series-2", "series-3", "series-4")  # For lines that follow one another, the first the palest
KINDS = tuple(f"kind-{number}" for number in range(1, 9))  # For different things, told apart by hue (Okabe & Ito)
_ROLES = ("ink", "muted", "rule", "accent", "neutral", "warn", "paper", *SERIES, *KINDS)
COLOURS: Mapping[str, str] = {role: f"#fe{number:02x}fd" for number, role in enumerate(_ROLES)}
"""Role → the stand-in for the page's CSS variable of that name."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

TOOLTIP = '<div style="white-space: pre-line"><strong>@name</strong>\n@tip</div>'

COVER: Mapping[str, Any] = {
    "fill_color": COLOURS["muted"],
    "fill_alpha": 0,
    "line_color": None,
    "hover_fill_color": COLOURS["muted"],
    "hover_fill_alpha": 0.08,
    "hover_line_color": None,
}  # Of an invisible bar over what hovering should react to: it shows only under the pointer


def embedded(plot: figure) -> dict[str, Any]:
    """A chart as the object that BokehJS draws from."""
    from bokeh.embed import json_item

    return dict(json_item(plot))


def empty_figure(**options: Any) -> figure:
    """An empty chart in the page's style."""
    from bokeh.plotting import figure

    bare = dict.fromkeys(("toolbar_location", "background_fill_color", "border_fill_color", "outline_line_color"))
    plot = figure(sizing_mode="stretch_width", tools="", min_border=0, **bare, **options)
    style_axes(plot.axis)
    plot.grid.grid_line_color = None
    return plot


def style_axes(axes: Any) -> None:
    """Quiet axes: labels, and no lines."""
    axes.axis_line_color = axes.major_tick_line_color = axes.minor_tick_line_color = None
    axes.major_label_text_color = axes.axis_label_text_color = COLOURS["muted"]
    axes.major_label_text_font = axes.axis_label_text_font = FONT
    axes.major_label_text_font_size = axes.axis_label_text_font_size = "12px"
    axes.axis_label_text_font_style = "normal"
    axes.axis_label_standoff = 6


def name_ticks(axis: Any, texts: Mapping[float, str], role: str = "muted") -> None:
    """Texts for ticks, as `PlainText`: Bokeh would typeset `$$` as TeX, by a script from the network."""
    from bokeh.models import FixedTicker, PlainText

    axis.ticker = FixedTicker(ticks=list(texts))
    axis.major_label_overrides = {place: PlainText(text=text) for place, text in texts.items()}
    axis.major_label_text_color = COLOURS[role]


def add_hover(plot: figure, *renderers: Any) -> None:
    """Show `@name` and `@tip` of what lies under the pointer in these."""
    from bokeh.models import HoverTool

    plot.add_tools(HoverTool(renderers=[*renderers], tooltips=TOOLTIP, point_policy="follow_mouse", visible=False))


def add_zoom(plot: figure, renderers: Sequence[Any], dimensions: str = "width") -> None:
    """Drag to see a part closer (along x, also by Shift and the wheel), double-click (or the tool) for all."""
    from bokeh.models import BoxZoomTool, ResetTool, WheelZoomTool

    plot.toolbar_location = "above"
    plot.toolbar.logo = None
    plot.toolbar.active_drag = zoom = BoxZoomTool(dimensions=dimensions)
    plot.add_tools(zoom)
    if dimensions == "width":
        plot.toolbar.active_scroll = wheel = WheelZoomTool(dimensions=dimensions, modifiers={"shift": True})
        plot.add_tools(wheel)
    plot.add_tools(ResetTool())
    add_hover(plot, *renderers)


def add_text(
    plot: figure, x: Sequence[float], y: Sequence[float], texts: Sequence[str], role: str, **style: Any
) -> None:
    """Small texts in the chart."""
    from bokeh.core.properties import value

    font = {"text_font": value(FONT), "text_font_size": "12px"}
    plot.text(x=list(x), y=list(y), text=list(texts), text_color=COLOURS[role], **font, **style)
