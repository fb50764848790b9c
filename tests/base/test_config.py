import dataclasses
import tomllib
from pathlib import Path

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
    shape_of,
)
from trainstep.base.errors import UsageError
from trainstep.bench.sweep.cases import load_grid
from trainstep.commands.cli import parse
from trainstep.rows.row import Row, StepSettings

COMMON = {"small": (768, 3072, 12, 12), "medium": (1024, 4096, 24, 16), "large": (1280, 5120, 36, 20)}
HANDOUTS = {
    "2025": COMMON | {"xl": (1600, 6400, 48, 25), "2.7B": (2560, 10240, 32, 32)},
    "2026": COMMON | {"xl": (2560, 10240, 32, 32), "10B": (4608, 12288, 50, 36), "8B": (4096, 11008, 34, 32)},
}
"""Table 1 of both handouts of CS336's assignment 2: d_model, d_ff, layers, heads. 8B is 2026's leaderboard's."""


def shape(name):
    config = resolve_size(name)
    return config.d_model, config.d_ff, config.num_layers, config.num_heads


@pytest.mark.parametrize("year", HANDOUTS)
def test_a_size_with_its_year_is_that_of_the_handout(year):
    other = HANDOUTS["2026" if year == "2025" else "2025"]
    for name, expected in HANDOUTS[year].items():
        assert shape(f"{year}/{name}") == expected
        if other.get(name, expected) == expected:
            assert shape(name) == expected, "the same in both years, or in one alone"
    assert {name for name in SIZES if name.startswith(year)} == {f"{year}/{name}" for name in HANDOUTS[year]}
    assert {SIZES[name].vocab_size for name in ("2026/8B", "8B")} == {151_936}
    assert (StepConfig().batch, StepConfig().context) == (4, 512)


def test_settings_carry_their_roles():
    assert settings_with(FORM) == ("precision", "compile", "graph", "attention", "loss", "fused", "optimizer")
    assert settings_with(FIXED, without=("loss", "fused")) == ("batch", "context", "learning_rate")
    assert {*settings_with(CASE), *settings_with(RESUMABLE)} == {*vars(StepConfig())} - {"learning_rate"}
    own = {each.name for each in dataclasses.fields(StepSettings)} - {each.name for each in dataclasses.fields(Row)}
    assert own == {"workload", *settings_with(CASE)}, "a result has every setting of its case"


def test_a_name_that_differs_between_the_years_asks_which(tmp_path):
    """Everywhere that a size is named: flags of every command, [model] of a file, a sweep's axes."""
    model, sweep = tmp_path / "model.toml", tmp_path / "sweep.toml"
    model.write_text('[model]\nsize = "xl"\n')
    sweep.write_text('command = "plan"\n[axes]\nsize = ["small", "xl"]\n')
    asks = r"'xl' is another model in each year: 2025/xl \(1600×6400×48×25\) or 2026/xl \(2560×10240×32×32\)"
    for call in (
        lambda: resolve_size("xl"),
        lambda: load_toml(model),
        lambda: load_grid(sweep, parse),
        *(lambda words=words: parse([*words.split(), "--out", str(tmp_path / "out")]).run() for words in COMMANDS),
    ):
        with pytest.raises(UsageError, match=asks):
            call()


COMMANDS = [
    *(f"{name} --size xl" for name in ("analyze", "profile", "dtypes", "memory", "plan", "train", "bench ladder")),
    *(f"bench {name} --size small,xl" for name in ("step", "ab")),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2025/xl", "1600×6400×48×25"),
        ("tiny", "128×512×4×4"),
        ("small d_ff=2048 vocab_size=300", "768×2048×12×12"),
        ("my own d_model=64 d_ff=128 num_layers=2 num_heads=4", "64×128×2×4"),
        ("my_project.train:workload", None),
        ("xl", None),
    ],
)
def test_the_shape_that_a_name_in_a_row_stands_for(name, expected):
    assert shape_of(name) == expected


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
    with pytest.raises(UsageError, match=r"unknown size 'huge'; expected one of tiny, .*10B.*2025/xl"):
        resolve_size("huge")
    with pytest.raises(UsageError, match=r"unknown size '2026/2\.7B'"):
        resolve_size("2026/2.7B")


def test_toml_starts_from_a_size(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nsize = "small"\nnum_layers = 6\n[step]\nprecision = "bf16"\nlearning_rate = 1\n')
    loaded = load_toml(path)
    assert loaded.model == ModelConfig(d_model=768, d_ff=3072, num_layers=6, num_heads=12)
    assert loaded.step == StepConfig(precision="bf16", learning_rate=1)
    assert resolve_size(str(path)) == loaded.model


BAD = tomllib.loads(Path(__file__).with_name("bad.toml").read_text("utf-8"))["bad"]


@pytest.mark.parametrize("text", BAD)
def test_bad_toml(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=BAD[text]):
        load_toml(path)


def test_absent_toml():
    with pytest.raises(UsageError, match="cannot read the configuration"):
        resolve_size("absent.toml")
