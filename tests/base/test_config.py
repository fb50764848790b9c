import dataclasses

import pytest

from trainstep.base.config import (
    CASE,
    FIXED,
    FORM,
    RESUMABLE,
    SIZES,
    ModelConfig,
    StepConfig,
    load_toml,
    resolve_size,
    settings_with,
)
from trainstep.base.errors import UsageError
from trainstep.rows.row import Row, StepSettings


def test_gpt2_and_cs336_shapes():
    shapes = {name: (c.d_model, c.d_ff, c.num_layers, c.num_heads) for name, c in SIZES.items()}
    assert shapes["small"] == (768, 3072, 12, 12)
    assert shapes["medium"] == (1024, 4096, 24, 16)
    assert shapes["large"] == (1280, 5120, 36, 20)
    assert shapes["xl"] == (1600, 6400, 48, 25)
    assert shapes["2.7B"] == (2560, 10240, 32, 32)
    assert shapes["10B"] == (4608, 12288, 50, 36)
    assert shapes["8B"] == (4096, 11008, 34, 32)
    assert {name: config.vocab_size for name, config in SIZES.items() if config.vocab_size != 10_000} == {"8B": 151_936}
    assert (StepConfig().batch, StepConfig().context) == (4, 512)


def test_settings_carry_their_roles():
    assert settings_with(FORM) == ("precision", "compile", "attention", "loss", "fused", "optimizer")
    assert settings_with(FIXED, without=("loss", "fused")) == ("batch", "context", "learning_rate")
    assert {*settings_with(CASE), *settings_with(RESUMABLE)} == {*vars(StepConfig())} - {"learning_rate"}
    own = {each.name for each in dataclasses.fields(StepSettings)} - {each.name for each in dataclasses.fields(Row)}
    assert own == {"workload", *settings_with(CASE)}, "a result has every setting of its case"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "does not divide into 3 heads"),
        ({"d_model": 12, "num_heads": 4}, "head_dim is 3"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"vocab_size": -5}, "vocab_size is -5"),
    ],
)
def test_impossible_models(changes, message):
    with pytest.raises(UsageError, match=message):
        ModelConfig(**changes)


@pytest.mark.parametrize("changes", [{"batch": 0}, {"context": -1}, {"learning_rate": 0.0}])
def test_impossible_steps(changes):
    with pytest.raises(UsageError, match="expected a positive number"):
        StepConfig(**changes)


def test_unknown_size_lists_the_known():
    with pytest.raises(UsageError, match=r"unknown size 'huge'; expected one of tiny, .*10B"):
        resolve_size("huge")


def test_toml_starts_from_a_size(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nsize = "small"\nnum_layers = 6\n[step]\nprecision = "bf16"\nlearning_rate = 1\n')
    loaded = load_toml(path)
    assert loaded.model == ModelConfig(d_model=768, d_ff=3072, num_layers=6, num_heads=12)
    assert loaded.step == StepConfig(precision="bf16", learning_rate=1)
    assert resolve_size(str(path)) == loaded.model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nwidth = 3\n", r"\[model\]: unknown key 'width'"),
        ("[model]\nd_model = 'wide'\n", "expected a value of type int"),
        ("[model]\nd_model = true\n", "expected a value of type int"),
        ("[model]\nnum_heads = 7\n", "does not divide into 7 heads"),
        ("[step]\nprecision = 'fp8'\n", "'fp8'; expected one of 'fp32'"),
        ("[step]\nseed = -1\n", "seed is -1; expected 0 or more"),
        ("step = 3\n", r"step is 3; expected a table, written \[step\]"),
        ("[training]\n", "unknown table or key 'training'"),
        ("[model\n", "cannot read the configuration"),
    ],
)
def test_bad_toml(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_toml(path)


def test_absent_toml():
    with pytest.raises(UsageError, match="cannot read the configuration"):
        resolve_size("absent.toml")
