"""Cold cases of `bench step`: each in a fresh process, checked once and after it was timed."""

import pytest

from trainstep.base.config import ModelConfig
from trainstep.bench.step import step_cases
from trainstep.bench.sweep import alone
from trainstep.bench.sweep.alone import cold_records
from trainstep.bench.sweep.rows import rows_of
from trainstep.commands.cli import parse
from trainstep.rows import StepRow
from trainstep.rows.records import make_row, read_records
from trainstep.step.workload import builtin_source


@pytest.fixture
def processes(monkeypatch):
    """The settings of every process that would start. Its command runs here instead."""
    started = []

    def run_here(cases):
        for case in cases:
            started.append(dict(case.settings))
            case.folder.mkdir(parents=True)
            case.keep(rows_of(case, parse([*case.words, "--out", str(case.folder)]).run(), 0.0))
            yield case

    monkeypatch.setattr(alone, "run_here", run_here)
    return started


@pytest.mark.parametrize(
    ("words", "cases", "unchecked"),
    [
        (["--warmup", "0,2"], 2, [False, True]),
        (["--warmup", "1,0", "--seed", "0,1"], 4, [False, True, False, True]),
        (["--warmup", "0", "--repeat", "2", "--mode", "forward-backward"], 2, [False, True]),
        (["--warmup", "0,1", "--no-check"], 2, [True, True]),
        (["--warmup", "0"], 0, []),
        (["--warmup", "1,2"], 0, []),
    ],
)
def test_each_cold_case_has_a_process(words, cases, unchecked, processes, tmp_path):
    model = tmp_path / "toy.toml"
    model.write_text("[model]\nnum_layers = 1\nd_model = 16\nd_ff = 32\nnum_heads = 2\nvocab_size = 256\n")
    fixed = ["--size", str(model), "--context", "8", "--batch", "1", "--device", "cpu", "--steps", "2"]
    assert parse(["bench", "step", *fixed, *words, "--out", str(tmp_path / "out")]).run() == 0
    rows = read_records(tmp_path / "out" / "results.jsonl")
    assert len(processes) == cases
    assert [each["no_check"] for each in processes] == unchecked
    assert {row.workload.partition(" ")[0] for row in rows} == {"toy"}
    assert len({tuple(row.case.items()) for row in rows}) == len(rows) == max(cases, len(words[1].split(",")))
    if cases:
        assert [(row.warmup, row.seed, row.mode) for row in rows] == [
            (each["warmup"], each["seed"], each["mode"]) for each in processes
        ]
    is_checked = "--no-check" not in words
    assert all((row.gradient_error is not None) is is_checked and row.status == "ok" for row in rows)


def test_a_wrong_step_is_not_timed_again_and_a_crash_checks_nothing(monkeypatch, tmp_path):
    source, ended = builtin_source("toy", ModelConfig()), iter(["failed", "wrong"])
    run = []

    def step_alone(settings, out, number):
        run.append(settings["no_check"])
        return make_row(StepRow, {}, {}, status=next(ended), reason="why")

    monkeypatch.setattr(alone, "step_alone", step_alone)
    cases = step_cases([source], {"batch": (2,)}, warmups=(0, 1, 2, 5))
    rows = list(cold_records(cases, lambda case: {"size": "tiny"}, tmp_path, check=True))
    assert [(row.status, row.warmup, row.workload, row.batch) for row in rows] == [
        (status, warmup, "toy", 2) for status, warmup in zip(["failed", *["wrong"] * 3], (0, 1, 2, 5), strict=True)
    ]
    assert run == [False, False], "of a wrong step no further process starts"
