"""Numbers as text, the same in files, in the terminal, in sentences and (typeset by `cells`) on the page."""

from __future__ import annotations

from trainstep.records import Scalar

NONE = "–"


def number(value: Scalar, digits: int = 3) -> str:
    """A number with `digits` significant digits; whole numbers and thousands in full; words as they are."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, int) or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    text = f"{value:#.{digits}g}".rstrip(".")
    return f"{value:,.0f}" if "e" in text else text  # 999.7 has become a thousand


def count(value: Scalar) -> str:
    """How many: whole numbers without decimals, even where they are a mean over steps."""
    return number(int(value) if isinstance(value, float) and value.is_integer() else value)


def as_float(value: Scalar) -> float | None:
    """The value if it is a number."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def numeric(value: object) -> float:
    """A record's value that is known to be a number."""
    assert isinstance(value, (int, float)), f"expected a number, got {value!r}"
    return float(value)
