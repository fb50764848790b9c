"""Where a command takes what no flag gives: the size, the file, the named grid, or its own defaults."""

import dataclasses
import math

import pytest

from trainstep.base.config import SIZES, StepConfig
from trainstep.base.errors import UsageError
from trainstep.bench.cases import AttentionCase
from trainstep.commands.cli import main, parse
from trainstep.train.config import TrainConfig


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nsize = "small"\nd_ff = 2048\n[step]\ncontext = 256\nprecision = "bf16"\ncheckpointing = "every-1"\n'
        "[train]\nsteps = 7\ntensorboard = false\n"
    )
    return str(path)


def test_flags_change_what_the_size_and_the_file_say(run_toml):
    plain = parse(["analyze", "--size", "large", "--d-model", "1024", "--num-heads", "16", "--d-ff", "5120"])
    assert plain.model_config() == dataclasses.replace(SIZES["large"], d_model=1024, num_heads=16)
    assert plain.step_config() == StepConfig()
    assert plain.model_name() == "large d_model=1024 num_heads=16", "a value that the size has too is no change"
    step = StepConfig(context=256, precision="bf16", checkpointing="every-1")
    for command in (["analyze"], ["profile"], ["train"], ["bench", "ladder"], ["bench", "parallel"]):
        flags = parse([*command, "--config", run_toml])
        assert flags.model_config() == dataclasses.replace(SIZES["small"], d_ff=2048)
        assert (flags.step_config(), flags.model_name()) == (
            step,
            "run d_model=768 d_ff=2048 num_layers=12 num_heads=12",
        )
        flags = parse([*command, f"--config={run_toml}", "--size=medium", "--context=512", "--precision=fp32"])
        assert (flags.model_config(), flags.model_name()) == (SIZES["medium"], "medium")
        assert flags.step_config() == StepConfig(checkpointing="every-1"), "a flag may ask for the usual default again"


def test_training_flags_change_what_the_file_says(run_toml):
    assert parse(["train", "--config", run_toml]).run_config().train == TrainConfig(steps=7, tensorboard=False)
    changed = parse(["train", "--config", run_toml, "--steps", "9", "--tensorboard", "--clip-norm", "inf"])
    assert changed.run_config().train == TrainConfig(steps=9, clip_norm=math.inf)
    assert parse(["train", "--size", "tiny", "--no-tensorboard"]).run_config().train == TrainConfig(tensorboard=False)


def argument_of(monkeypatch, module, function, words):
    """The argument that a command calls `function` with."""
    taken = []
    monkeypatch.setattr(f"trainstep.{module}.{function}", lambda *given, **_: taken.append(given[-1]) or [])
    with pytest.raises(SystemExit):
        main(words)
    return taken[0]


def test_a_plan_has_a_size_and_a_step_of_its_own(run_toml, tmp_path, monkeypatch):
    def planned(*words):
        out = ["--out", str(tmp_path / "out")]
        return argument_of(monkeypatch, "plan.rows", "plan_records", ["plan", *words, *out])

    usual = StepConfig(precision="bf16", attention="sdpa", optimizer="adamw-fused")
    request = planned()
    assert (request.name, request.model, request.step) == ("2.7B", SIZES["2.7B"], usual)
    request = planned("--size", "10B", "--batch", "8")
    assert (request.model, request.step) == (SIZES["10B"], dataclasses.replace(usual, batch=8))
    request = planned("--config", run_toml, "--optimizer", "sgd")
    assert request.model == dataclasses.replace(SIZES["small"], d_ff=2048)
    assert request.step.optimizer == "sgd"
    assert (request.step.attention, request.step.context) == ("eager", 256), "the file is a whole step"


def test_grids_take_what_is_not_given_from_the_file_or_the_named_grid(run_toml, tmp_path, monkeypatch):
    out = ["--out", str(tmp_path / "out")]
    words = ["bench", "attention", "--grid", "flash", "--seq", "128", "--dtype", "bf16"]
    cases = argument_of(monkeypatch, "bench.attention.AttentionTurns", "run", [*words, *out])
    assert {(case.seq, case.heads, case.dtype) for case in cases} == {(128, 1, "bf16")}
    assert {case.head_dim for case in cases} == {16, 32, 64, 128}
    assert len(cases) == 4 * 8
    (case,) = argument_of(monkeypatch, "bench.attention.AttentionTurns", "run", ["bench", "attention", *out])
    assert case == AttentionCase()
    taken = []
    monkeypatch.setattr("trainstep.bench.memory.peak_records", lambda _, configs, __: taken.extend(configs) or [])
    with pytest.raises(SystemExit):
        main(["memory", "--config", run_toml, "--peaks", "--batch", "1,2", "--device", "cpu", *out])
    usual = StepConfig(context=256, precision="bf16", checkpointing="every-1", device="cpu")
    assert taken == [dataclasses.replace(usual, batch=batch) for batch in (1, 2)]


def test_a_flag_with_or_without_a_value():
    """--fit alone asks for what the device has."""
    assert parse(["memory"]).fit is None
    assert parse(["memory", "--fit"]).fit == ""
    assert parse(["memory", "--fit", "--compare"]).fit == ""
    assert parse(["memory", "--fit", "65%", "--compare"]).fit == "65%"
    with pytest.raises(UsageError, match="expected one SIZE, or none"):
        parse(["memory", "--fit", "1GiB", "2GiB"])
