"""The page's charts: SVG, drawn from plain rows when the page is written.

Every place is in per cent of the chart's frame. So a chart is as wide as its column, on a screen and on paper, while
texts, lines and dots keep their size. Colours are classes of the style sheet. A mark's `data-tip` is what the page's
script shows beside the pointer; names come from the user's model and are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from trainstep.report.numbers import typeset

SERIES = ("series-1", "series-2", "series-3", "series-4")  # For lines that follow one another, the first the palest
KINDS = tuple(f"kind-{number}" for number in range(1, 9))  # For different things, told apart by hue (Okabe & Ito)
ROLES = ("ink", "muted", "rule", "accent", "neutral", "warn", "paper", *SERIES, *KINDS)
"""Classes of a mark; each has the colour of the CSS variable of its name."""
_LETTER = 0.55  # em that a letter takes


@dataclass(frozen=True)
class Scale:
    """An axis from one value to another."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Per cent of the way from low to high."""
        low, high, at = map(math.log10, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return 100 * (at - low) / (high - low or 1)

    def ticks(self, most: int = 5, least: float = 0.0) -> dict[float, str]:
        """About `most` round numbers with their texts, at least `least` apart."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            found = [each for each in found if self.low <= each <= self.high]
            tens = [each for each in found if f"{each:e}".startswith("1.0")]
            found = found if len(found) <= most + 2 else tens[:: -(-len(tens) // (most + 2))]
        else:
            apart = max((self.high - self.low) / most, least) or 1.0
            unit = 10.0 ** math.floor(math.log10(apart))
            step = next(unit * digit for digit in (1, 2, 5, 10) if unit * digit >= 0.999 * apart)
            found = [step * at for at in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]
        return {each: typeset(f"{each:,.6g}") for each in found}


class Plot:
    """A chart: marks in a frame, and around it the axes' texts."""

    def __init__(self, x: Scale, y: Scale, height: int) -> None:
        self.x, self.y, self.height = x, y, height
        self._marks: list[str] = []
        self._around = {"x": list[str](), "y": list[str]()}
        self._left, self._right, self._top, self._below = 1.5, 1.5, 0.2, 0.5  # em around the frame
        self._name = ""

    def bar(self, x: tuple[float, float], y: tuple[float, float], role: str, tip: str = "", opacity: float = 1) -> None:
        """A rectangle between two x and two y."""
        (left, right), (low, high) = sorted(map(self.x, x)), sorted(map(self.y, y))
        place = f'x="{left:.6g}%" y="{100 - high:.5g}%" width="{right - left:.5g}%" height="{high - low:.5g}%"'
        place += "" if opacity == 1 else f' fill-opacity="{opacity:.2f}"'
        self._marks.append(f'<rect class="{role}" {place}{_tip(tip)}/>')

    def line(self, x: Sequence[float], y: Sequence[float], role: str, width: float = 1.2) -> None:
        """A line through points, or an area where the role has `area`."""
        at = " ".join(f"{10 * self.x(a):.5g} {1000 - 10 * self.y(b):.5g}" for a, b in zip(x, y, strict=True))
        path = f'<path class="{role}" stroke-width="{width}" d="M{at}"/>'
        self._marks.append(f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none">{path}</svg>')

    def stack(self, edges: Sequence[float], layers: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Areas on one another: roles, from below, and the height in each stretch between two edges."""
        steps = twice(edges)[1:-1]
        below = [0.0] * len(steps)
        for role, heights in layers:
            above = [low + height for low, height in zip(below, twice(heights), strict=True)]
            self.line([*steps, *reversed(steps)], [*below, *reversed(above)], f"{role} area")
            below = above

    def dot(self, x: float, y: float, role: str, tip: str = "", size: float = 4) -> None:
        """A filled circle."""
        place = f'cx="{self.x(x):.5g}%" cy="{100 - self.y(y):.5g}%" r="{size}"'
        self._marks.append(f'<circle class="{role}" {place}{_tip(tip)}/>')

    def text(self, x: float, y: float, text: str, role: str, anchor: str = "middle", dy: str = ".35em") -> None:
        """A small text, its middle at y."""
        self._marks.append(_text(f"{self.x(x):.5g}%", f"{100 - self.y(y):.5g}%", text, role, anchor, dy))

    def across(self, x: float, role: str) -> None:
        """A line from the bottom to the top."""
        self.line((x, x), (self.y.low, self.y.high), role)

    def x_axis(self, name: str, ticks: Mapping[float, str], has_grid: bool = False) -> None:
        """Texts below the frame, and what they count."""
        self._below = 3.2 if name else 1.6
        for value, text in ticks.items():
            at = f"{self.x(value):.5g}%"
            self._around["x"].append(f'<line class="rule" x1="{at}" x2="{at}" y2="100%"/>' if has_grid else "")
            self._around["x"].append(_text(at, "100%", text, "muted", "middle", "1.3em"))
        self._name = _text("50%", "100%", name, "muted", "middle", "2.8em")

    def y_axis(self, name: str, ticks: Mapping[float, str], role: str = "muted", side: str = "left") -> None:
        """Texts beside the frame, and above them what they count; numbers have a grid, names have none."""
        room = _LETTER * max(map(len, ticks.values()), default=0) + 1.2
        self._left, self._right = (room, self._right) if side == "left" else (self._left, room)
        self._top = 1.7 if name else self._top
        at, anchor, dx = ("0%", "end", -0.6) if side == "left" else ("100%", "start", 0.6)
        for value, text in ticks.items():
            y = f"{100 - self.y(value):.5g}%"
            self._around["y"].append(f'<line class="rule" x2="100%" y1="{y}" y2="{y}"/>' if role == "muted" else "")
            self._around["y"].append(_text(at, y, text, role, anchor, ".35em", f"{dx}em"))
        self._around["y"].append(
            _text("0%", "0%", name, "muted", "start", "-.6em", f"{0.2 - self._left:.3g}em") if name else ""
        )

    def svg(self, zoom: str = "") -> str:
        """The chart as HTML.

        Args:
            zoom: the axes along which the reader may see a part closer, "x" or "xy".
        """
        room = " ".join(f"{each:.3g}em" for each in (self._top, self._right, self._below, self._left))
        ends = f"{self.x.low!r} {self.x.high!r} {self.y.low!r} {self.y.high!r}"
        return "".join(
            (
                f'<div class="plot" style="padding: {room}"><svg width="100%" height="{self.height}">',
                *(f'<g class="{axis}-axis">{"".join(texts)}</g>' for axis, texts in self._around.items()),
                self._name,
                f'<svg class="frame" data-ends="{ends}" data-zoom="{zoom}">',
                '<rect class="back" width="100%" height="100%"/>',
                f'<svg class="marks">{"".join(self._marks)}</svg></svg></svg></div>',
            )
        )


def twice(values: Iterable[float]) -> list[float]:
    """The values, each at the beginning of its stretch and at the end."""
    return [value for value in values for _ in range(2)]


def _tip(text: str) -> str:
    said = escape(text).replace("\n", "&#10;")
    return f' data-tip="{said}"' if text else ""


def _text(x: str, y: str, text: str, role: str, anchor: str, dy: str, dx: str = "0") -> str:
    place = f'x="{x}" y="{y}" dx="{dx}" dy="{dy}" text-anchor="{anchor}"'
    return f'<text class="{role}" {place}>{escape(text)}</text>'
