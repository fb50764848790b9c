import pytest

from trainstep.report.columns import Cell
from trainstep.report.numbers import count, gib, number, typeset


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (True, "yes"), ("x", "x"), (5, "5"), (1234567, "1,234,567"), (0.0123456, "0.0123"),
        (51.26, "51.3"), (999.4, "999"), (1234.5, "1,234"), (1.4e-06, "1.40e-06"), (0.5, "0.500"), (-0.012, "-0.0120"),
        (999.7, "1,000"), (4.0, "4.00"), (0.0, "0"), (100.0, "100"),
    ],
)  # fmt: skip
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("value", "text"), [(56.0, "56"), (1304.0, "1,304"), (2.5, "2.50"), (3, "3"), (None, "–")])
def test_whole_counts_have_no_decimals(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    ("text", "typeset_text"),
    [
        ("0", "0"), ("5,409", "5,409"), ("9.81e-08", "9.81×10⁻⁸"), ("-0.000123", "−0.000123"),
        ("-1.23e-05", "−1.23×10⁻⁵"), ("1.5e+10 ± 2e-05", "1.5×10¹⁰ ± 2×10⁻⁵"), ("12 ms [11–13]", "12 ms [11–13]"),
        ("yes", "yes"), ("–", "–"), ("3-4", "3-4"),
    ],
)  # fmt: skip
def test_numbers_are_typeset_on_the_page(text, typeset_text):
    assert typeset(text) == typeset_text
    assert Cell(text, 1.0).typeset == typeset_text
    assert Cell(text, text).typeset == text, "a name stays as it is"


def test_sizes_carry_the_unit_that_reads_better():
    assert gib(0.2229630290) == "228 MiB"
    assert gib(27.9) == "27.9 GiB"
    assert gib(None) == "–"
