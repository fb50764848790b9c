"""Numbers as text, the same in files, in the terminal, in sentences and, `typeset`, on the page."""

from __future__ import annotations

import re

from trainstep.base.errors import UsageError
from trainstep.rows.records import Scalar

NONE = "–"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MINUS = re.compile(r"(?<![\w.])-(?=\d)")
_EXPONENT = re.compile(r"(?<=\d)e([+-]?\d+)")


def number(value: Scalar, digits: int = 3) -> str:
    """A number with `digits` significant digits; whole numbers and thousands in full; words as they are."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, int) or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    text = f"{value:#.{digits}g}".rstrip(".")
    return f"{value:,.0f}" if "e" in text else text  # 999.7 has become a thousand


def count(value: Scalar) -> str:
    """Write a count: whole numbers without decimals, even where they are a mean over steps."""
    return number(int(value) if isinstance(value, float) and value.is_integer() else value)


def gib(value: Scalar) -> str:
    """A size with its unit: `1.23 GiB`, or MiB where that reads better."""
    size = as_float(value)
    if size is None:
        return NONE
    unit, scale = unit_of(size)
    return f"{number(size * scale)} {unit}"


def unit_of(largest_gib: float, least_gib: float = 1.0) -> tuple[str, float]:
    """The unit of sizes up to the largest, and how many of it a GiB has: MiB where the largest is below `least_gib`."""
    return ("GiB", 1.0) if largest_gib >= least_gib else ("MiB", 1024.0)


def typeset(text: str) -> str:
    """Text made by `number`, with a true minus sign and powers of ten: `−1.2×10⁻⁵`."""
    return _EXPONENT.sub(lambda found: f"×{power_of_ten(int(found[1]))}", _MINUS.sub("−", text))


def power_of_ten(exponent: int) -> str:
    """`10⁻⁵`."""
    return f"10{str(exponent).translate(SUPERSCRIPT)}"


def as_float(value: Scalar) -> float | None:
    """The value if it is a number."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def numeric(value: object) -> float:
    """A record's value that has to be a number; `UsageError` for rows of a file where it is none."""
    if not isinstance(value, (int, float)):
        raise UsageError(f"a row has {value!r} where a number belongs; measure again")
    return float(value)


def in_ms(value: object) -> str:
    """`12.3 ms`."""
    return f"{number(numeric(value))} ms"


def in_gib(value: float) -> str:
    """`1.23 GiB`, or MiB where that reads better."""
    return f"{value:,.2f} GiB" if unit_of(value)[0] == "GiB" else gib(value)


def percent(share: float) -> str:
    """`12%`, or `1.2%` below ten."""
    return f"{abs(share):.0%}" if abs(share) >= 0.1 else f"{abs(share):.1%}"
