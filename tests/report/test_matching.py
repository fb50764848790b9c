"""Cases of two files that are left out of a comparison, and conditions that differ between the files."""

from dataclasses import replace

import pytest

from trainstep.commands.compare import Compare
from trainstep.commands.output import NOTHING_RAN
from trainstep.report.compare import other_conditions, unmatched
from trainstep.rows import row_of
from trainstep.rows.records import write_whole


def step(precision="fp32", workload="small", status="ok", reason="", **environment):
    samples = {"step": [1.0] * 7} if status == "ok" else {}
    case = {"workload": workload, "precision": precision}
    return row_of("step", case, {}, samples=samples, status=status, reason=reason, environment=environment)


WRONG = step("bf16", status="wrong", reason="off by 5")


def said(old, new, **options):
    return [(str(each), each.is_lost) for each in unmatched(old, new, **options)]


def test_cases_that_both_files_have_times_of_are_not_mentioned():
    assert said([step(), row_of("profile", {"workload": "small"}, {})], [step()]) == []


@pytest.mark.parametrize(
    ("old", "new", "state", "is_lost"),
    [
        ([step("bf16")], [WRONG], "measured in the first file, wrong (off by 5) in the second", True),
        ([step("bf16")], [], "measured in the first file, no row in the second", False),
        ([], [step("bf16")], "no row in the first file, measured in the second", False),
        ([WRONG], [step("bf16")], "wrong (off by 5) in the first file, measured in the second", False),
        ([WRONG], [WRONG], "wrong (off by 5) in the first file, wrong (off by 5) in the second", False),
        ([], [step("bf16", status="failed")], "no row in the first file, failed in the second", False),
        ([step("bf16")], [replace(WRONG, status="out of memory")],
         "measured in the first file, out of memory (off by 5) in the second", True),
        ([step("bf16")], [replace(step("bf16"), samples={})],
         "measured in the first file, no times in the second", True),
        ([step("bf16")], [step("bf16"), WRONG], "measured in the first file, wrong (off by 5) in the second", True),
        ([step("bf16")], [WRONG, step("bf16")], "measured in the first file, wrong (off by 5) in the second", True),
    ],
)  # fmt: skip
def test_what_is_left_out_is_named_with_its_reason(old, new, state, is_lost):
    expected = [(f"kind step, workload small, precision bf16: {state}", is_lost)]
    assert said([step(), *old], [step(), *new]) == expected


def test_columns_that_may_differ_are_no_part_of_a_case():
    other = replace(WRONG, workload="other")
    assert said([step("bf16")], [other], across=["workload"]) == [
        ("kind step, precision bf16: measured in the first file, wrong (off by 5) in the second", True)
    ]
    assert len(said([step("bf16")], [other])) == 2


def test_conditions_that_differ_between_files_are_told():
    old = step(device="A", torch="2.11", threads=1, cores=2)
    assert other_conditions([old], [old]) == []
    assert other_conditions([old], [step(device="B", torch="2.13", threads=4, cores=9)]) == [
        "device A → B", "torch 2.11 → 2.13", "threads 1 → 4"
    ]  # fmt: skip
    assert other_conditions([old], [step(torch="2.11", threads=1)]) == ["device A → –"]
    failed = step(status="failed", device="B")
    assert other_conditions([old], [old, failed]) == [], "nothing was measured there"
    assert other_conditions([old, replace(old, environment={**old.environment, "threads": 2})], [old]) == [
        "threads 1 and 2 → 1"
    ]


def test_the_command_names_them_and_ends_with_an_error_where_a_case_was_lost(tmp_path, capsys):
    files = [tmp_path / f"{name}.jsonl" for name in ("old", "new", "more")]
    for path, rows in zip(
        files, ([step(device="A"), step("bf16")], [step(device="B"), WRONG], [step(), step("bf16"), step("tf32")]),
        strict=True,
    ):  # fmt: skip
        write_whole(path, rows)
    assert Compare(old=files[0], new=files[1]).run() == NOTHING_RAN
    printed = " ".join(capsys.readouterr().out.split())
    assert "Not measured under the same conditions: device A" in printed
    assert "precision bf16: measured in the first file, wrong (off by 5) in the second" in printed
    assert Compare(old=files[0], new=files[2]).run() == 0
    assert "precision tf32: no row in the first file, measured in the second" in " ".join(
        capsys.readouterr().out.split()
    )
