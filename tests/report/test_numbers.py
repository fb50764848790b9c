import pytest

from trainstep.report.numbers import count, number


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
