import functools
import json
import re
from collections import deque
from statistics import median

import pytest
import torch
from torch import nn
from torch._inductor.exc import InductorError

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.bench import step as bench_step
from trainstep.bench.step import plainest, run_cases, step_cases
from trainstep.check.step import StepCheck
from trainstep.measure.outcome import Failure, attempt
from trainstep.measure.step import measure_step
from trainstep.plan.flops import step_flops
from trainstep.rows.records import RecordWriter, read_records
from trainstep.step.workload import Workload, WorkloadSource, builtin_source

TOY = ModelConfig(d_model=32, d_ff=64, num_layers=2, num_heads=2, vocab_size=256)
SOURCE = builtin_source("toy", TOY)
SMALL = {"batch": (2,), "context": (32,), "device": ("cpu",)}


def test_every_phase_of_every_mode():
    cases = step_cases([SOURCE], SMALL, modes=("forward", "forward-backward", "step"), warmups=(1,), steps=6)
    forward, both, whole = run_cases(cases)
    phases = ("forward", "loss", "backward", "optimizer")
    assert [f"{name}_ms" in forward.values for name in phases] == [True, False, False, False]
    assert [f"{name}_ms" in both.values for name in phases] == [True, True, True, False]
    assert [f"{name}_ms" in whole.values for name in phases] == [True, True, True, True]
    for record in (forward, both, whole):
        assert record.status == "ok"
        assert record.values["n"] == 6
        assert record.case["batch"] == 2
        assert record.case["context"] == 32
        assert record.environment["torch"] == torch.__version__
    laps = [sum(each) for each in zip(*(whole.samples[name] for name in phases), strict=True)]
    assert all(each <= step_ms for each, step_ms in zip(laps, whole.samples["step"], strict=True))
    assert median(laps) >= 0.5 * median(whole.samples["step"]), "in a single one another process may come between"


def test_the_numbers_follow_from_the_samples():
    (record,) = run_cases(step_cases([SOURCE], SMALL, warmups=(2,), steps=7))
    samples = torch.tensor(record.samples["step"], dtype=torch.float64)
    assert record.values["step_ms"] == pytest.approx(float(samples.median()))
    assert record.values["step_mean_ms"] == pytest.approx(float(samples.mean()))
    assert record.values["step_std_ms"] == pytest.approx(float(samples.std()))
    assert record.values["step_low_ms"] <= record.values["step_ms"] <= record.values["step_high_ms"]
    flops = step_flops(TOY, 2, 32, "step")
    assert record.values["model_tflop"] == pytest.approx(flops / 1e12)
    assert record.values["achieved_tflops"] == pytest.approx(flops / record.values["step_ms"] / 1e9)
    assert record.values["tokens_per_s"] == pytest.approx(64 / record.values["step_ms"] * 1e3)
    assert record.values["optimizer_state_gib"] * 2**30 >= 2 * 4 * TOY.num_parameters


def test_the_warmup_study_is_windows_of_one_run():
    calls = []

    def build(step):
        calls.append(step)
        return SOURCE.build(step)

    source = WorkloadSource("counted", build, TOY)
    records = list(run_cases(step_cases([source], SMALL, warmups=(0, 1, 2, 5), steps=6), check=False))
    assert len(calls) == 1
    assert [record.case["warmup"] for record in records] == [0, 1, 2, 5]
    cold, warm = records[0].samples["step"], records[3].samples["step"]
    assert len(cold) == len(warm) == 6
    assert cold[5] == warm[0]  # the sixth step of the run
    assert cold[0] == records[0].values["first_step_ms"] == records[3].values["first_step_ms"]


@pytest.mark.parametrize(
    ("warmups", "order"), [((0,), ["timed", "checked"]), ((2, 0), ["timed", "checked"]), ((1,), ["checked", "timed"])]
)
def test_a_check_comes_after_a_cold_run(warmups, order, monkeypatch):
    """Before it, the check would take the first step of the process."""
    seen = []

    def noted(what, function):
        return lambda *args, **named: seen.append(what) or function(*args, **named)

    monkeypatch.setattr(bench_step, "measure_step", noted("timed", measure_step))
    monkeypatch.setattr(StepCheck, "judge", noted("checked", StepCheck.judge))
    rows = list(run_cases(step_cases([SOURCE], SMALL, warmups=warmups, steps=2)))
    assert seen == order
    assert all(row.gradient_error is not None and row.status == "ok" for row in rows)


def test_a_cold_run_that_fails_the_check_has_no_times(monkeypatch):
    monkeypatch.setattr(bench_step.Verdict, "is_right", property(lambda _: False))
    rows = list(run_cases(step_cases([SOURCE], SMALL, warmups=(0, 1), steps=2)))
    assert [(row.status, row.times) for row in rows] == [("wrong", {})] * 2


def test_a_judge_that_has_its_reference_takes_the_plain_step_no_second_time():
    built = []

    def build(step):
        built.append((step.precision, step.attention))
        return SOURCE.build(step)

    source = WorkloadSource("counted", build, TOY)
    config = StepConfig(batch=2, context=32, device="cpu", attention="sdpa")
    cases = list(step_cases([source], SMALL | {"attention": ("sdpa",)}, warmups=(1,), steps=6))
    judge = StepCheck(source, plainest(config))
    assert judge.judge(config).is_right
    for given, is_taken in ((judge, False), (None, True), (StepCheck(SOURCE, plainest(config)), True)):
        built.clear()
        (row,) = run_cases(cases, judge=given)
        assert row.gradient_error is not None
        assert (("fp32", "eager") in built) is is_taken, "another workload's judge says nothing of this one"


def test_passes_alternate():
    cases = step_cases([SOURCE], SMALL | {"precision": ("fp32", "bf16")}, repeat=2)
    assert [(case.config.precision, case.repeat) for case in cases] == [
        ("fp32", 0), ("bf16", 0), ("fp32", 1), ("bf16", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [{"steps": 0}, {"repeat": 0}, {"warmups": (-1,)}, {"warmups": ()}])
def test_an_empty_grid_is_refused(bad):
    with pytest.raises(UsageError, match="nothing to run"):
        step_cases([SOURCE], SMALL, **bad)


def failing_source(name, error):
    def build(step):
        raise error

    return WorkloadSource(name, build, TOY)


def test_failures_are_rows_and_the_rest_goes_on():
    sources = [
        failing_source("too big", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")),
        failing_source("not here", UnsupportedError("tf32 needs a GPU")),
        failing_source("broken", ZeroDivisionError("division by zero")),
        failing_source("not compiled", InductorError(TypeError("no truth value of s5 < 32\nmore"), None)),
        SOURCE,
    ]
    records = list(run_cases(step_cases(sources, SMALL, steps=1, warmups=(0,))))
    assert [record.status for record in records] == ["out of memory", "unsupported", "failed", "unsupported", "ok"]
    assert records[0].reason == "CUDA out of memory. Tried to allocate 20.00 GiB."
    assert re.fullmatch(r"ZeroDivisionError: division by zero \(test_step.py:\d+\)", records[2].reason)
    assert records[3].reason == "torch.compile cannot compile it: TypeError: no truth value of s5 < 32"
    assert all(record.case["context"] == 32 for record in records)


def test_a_failure_names_the_users_line_and_keeps_its_traceback_for_debugging(caplog):
    def build(step):
        return Workload(
            module=nn.Linear(4, 4),
            batches=[{"inputs": torch.randn(2, 4)}],
            forward=lambda module, batch: module(batch["inputs"][:, :3]),  # one column too few, found inside torch
            loss=lambda out, batch: out.mean(),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        )

    with caplog.at_level("DEBUG", logger="trainstep"):
        (record,) = run_cases(step_cases([WorkloadSource("narrow", build)], {"device": ("cpu",)}, steps=1))
    line = build.__code__.co_firstlineno + 4
    assert record.status == "failed"
    assert record.reason.endswith(f"(test_step.py:{line})")
    assert "Traceback" in caplog.text


def test_real_out_of_memory_on_a_cpu_is_recognised():
    outcome = attempt(lambda: torch.empty(2**45))
    assert isinstance(outcome, Failure)
    assert outcome.status == "out of memory"


def test_wrong_input_ends_the_run():
    with pytest.raises(UsageError, match="no such data"):
        list(run_cases(step_cases([failing_source("x", UsageError("no such data"))], SMALL)))


def test_what_was_measured_is_on_disk_when_it_is_interrupted(tmp_path):
    sources = [SOURCE, failing_source("interrupted", KeyboardInterrupt())]
    writer = RecordWriter(tmp_path / "results.jsonl")
    with pytest.raises(KeyboardInterrupt):
        deque(map(writer.write, run_cases(step_cases(sources, SMALL, steps=1, warmups=(0,)))))
    (kept,) = read_records(tmp_path / "results.jsonl")
    assert kept.case["workload"] == "toy"
    assert json.loads((tmp_path / "results.jsonl").read_text())["values"]["step_ms"] > 0


@pytest.mark.gpu
def test_gpu_rows_have_both_clocks():
    source = builtin_source("toy", TOY)
    (record,) = run_cases(step_cases([source], {"batch": (2,), "context": (64,)}, steps=7))
    assert record.status == "ok", record.reason
    assert record.values["wait_ms"] >= 0
    assert record.values["forward_issue_ms"] > 0
    assert record.values["sm_clock_mhz"] > 0
    assert record.values["peak_gib"] > record.values["at_rest_gib"] > 0


@pytest.mark.gpu
def test_gpu_out_of_memory_is_a_row():
    huge = builtin_source("huge", ModelConfig(d_model=8192, d_ff=32768, num_layers=200, num_heads=64))
    first, second = run_cases(step_cases([huge, SOURCE], {"batch": (2,), "context": (32,)}, steps=1, warmups=(0,)))
    assert first.status == "out of memory"
    assert second.status == "ok"
