"""What tuning makes of its measurements. Measuring itself needs a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainstep.attention import tune
from trainstep.attention.tune import Measurement, fastest, tune_choice, tune_tiles
from trainstep.attention.tuned import CHOICES, TILES, HopperTile, Tile
from trainstep.base.errors import UsageError


def test_the_fastest_tile_of_each_case_is_kept() -> None:
    tiles, hopper_tiles = fastest(
        [
            Measurement("dq", "fp32", 20, True, Tile(1, 1, 4, 1), 3.0),
            Measurement("dq", "fp32", 20, True, Tile(2, 2, 4, 1), 2.0),
            Measurement("dq", "fp32", 20, True, Tile(3, 3, 4, 1), None, error="out of shared memory"),
            Measurement("dq", "tf32", 20, True, Tile(4, 4, 4, 1), 9.0),
            Measurement("dq", "fp16", 20, True, Tile(5, 5, 4, 1), 9.0),
            Measurement("dq", "bf16", 128, True, HopperTile(2, 6, 2), 9.0),
            Measurement("dq", "bf16", 40, True, HopperTile(2, 7, 2), 9.0),
        ],
        "sm_90",
    )
    assert tiles == {
        ("sm_90", "dq", "tf32x3", 32, True): Tile(2, 2, 4, 1),
        ("sm_90", "dq", "tf32", 32, True): Tile(4, 4, 4, 1),
        ("sm_90", "dq", "16-bit", 32, True): Tile(5, 5, 4, 1),
    }
    assert hopper_tiles == {("dq", 128, True): HopperTile(2, 6, 2), ("dq", 64, True): HopperTile(2, 7, 2)}


@pytest.mark.parametrize(("spilled_ms", "kept"), [(1.0, Tile(1, 1, 4, 1)), (0.9, Tile(2, 2, 4, 1))])
def test_a_tile_that_spills_must_be_a_tenth_faster(spilled_ms: float, kept: Tile) -> None:
    clean = Measurement("forward", "fp32", 64, False, Tile(1, 1, 4, 1), 1.05, spills=0)
    spilled = Measurement("forward", "fp32", 64, False, Tile(2, 2, 4, 1), spilled_ms, spills=8)
    for results in ([clean, spilled], [spilled, clean]):
        assert fastest(results, "sm_90")[0] == {("sm_90", "forward", "tf32x3", 64, False): kept}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
@pytest.mark.parametrize("tune", [tune_tiles, tune_choice])
def test_measuring_needs_a_gpu(tune) -> None:
    with pytest.raises(UsageError, match="GPU"):
        tune(save=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An RTX 3090, as far as tuning asks; what it would take is in the tests."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("save", [True, False])
def test_what_is_fastest_at_each_length_goes_into_the_users_table(
    save: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_ms(impl: str, shape: tuple[int, ...], *_: object) -> float:
        return {"flash-triton": 1.0, "sdpa-cudnn": 0.5 if shape[-2] >= 2048 else 2.0}.get(impl, float("inf"))

    monkeypatch.setattr(tune, "_time_ms", time_ms)
    choices = tune_choice(head_dims=(64,), dtypes=(torch.float16,), lengths=(4096, 512, 2048), save=save)
    by_length = ((0, "flash-triton"), (2048, "sdpa-cudnn"))
    assert {case: choice.by_length for case, choice in choices.items()} == {
        ("sm_86", "float16", 64, is_causal): by_length for is_causal in (False, True)
    }
    assert CHOICES.entries() == CHOICES.shipped() | (choices if save else {})
    assert CHOICES.user_file().exists() == save


@pytest.mark.usefixtures("gpu")
def test_one_disturbed_time_decides_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def time_ms(impl: str, *_: object) -> float:
        taken.append(impl)
        disturbed = taken.count(impl) == 1 and impl == "flash-triton"
        return {"flash-triton": 1.15 if disturbed else 1.0, "sdpa-cudnn": 1.1}.get(impl, 1.3)

    monkeypatch.setattr(tune, "_time_ms", time_ms)
    choices = tune_choice(head_dims=(64,), dtypes=(torch.float16,), lengths=(4096,), save=False)
    assert {choice.by_length for choice in choices.values()} == {((0, "flash-triton"),)}
    one = taken[:12]  # of the first mask
    assert {impl: one.count(impl) for impl in one} == {
        "flash-triton": 3, "sdpa-cudnn": 3, "sdpa-flash": 3, "sdpa-efficient": 3,
    }  # fmt: skip
    assert len({tuple(one[start : start + 4]) for start in (0, 4, 8)}) > 1, "an order drawn anew"


@pytest.mark.usefixtures("gpu")
def test_what_is_far_behind_is_not_timed_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    times = {"flash-triton": 1.0, "sdpa-cudnn": 1.25, "sdpa-flash": 1.26}

    def time_ms(impl: str, *_: object) -> float:
        taken.append(impl)
        return times.get(impl, float("inf"))

    monkeypatch.setattr(tune, "_time_ms", time_ms)
    tune_choice(head_dims=(64,), dtypes=(torch.float16,), lengths=(4096,), save=False)
    assert {impl: taken.count(impl) for impl in taken} == {
        "flash-triton": 6, "sdpa-cudnn": 6, "sdpa-flash": 2, "sdpa-efficient": 2,
    }  # fmt: skip


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("save", [True, False])
def test_the_fastest_tiles_go_into_the_users_table(save: bool, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = Tile(32, 64, 4, 2)

    def make(head_dim, dtype, is_causal, seq):
        return SimpleNamespace(
            hopper=False,
            measure=lambda kernel, tile: Measurement(
                kernel, dtype, head_dim, is_causal, tile, 1.0 if tile == best else 2.0
            ),
        )

    monkeypatch.setattr(tune, "_Case", make)
    monkeypatch.setattr(tune, "_compile_ahead", lambda *_: None)
    monkeypatch.setattr(tune, "_check_gpu", lambda latest: None)
    seen = []
    results = tune_tiles(head_dims=(16,), dtypes=("bf16",), progress=seen.append, save=save)
    assert results == seen
    assert len(results) == 3 * 2 * 54
    expected = {("sm_86", kernel, "16-bit", 16, c): best for kernel in ("forward", "dq", "dkdv") for c in (False, True)}
    assert TILES.entries() == TILES.shipped() | (expected if save else {})
    assert TILES.user_file().exists() == save


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("tune_part", [tune_tiles, tune_choice])
def test_a_damaged_table_is_refused_before_anything_is_measured(tune_part, cache: Path) -> None:
    CHOICES.user_file().parent.mkdir(parents=True)
    CHOICES.user_file().write_text(json.dumps({"ours": False}))
    with pytest.raises(UsageError, match=r"choice\.json is not a table of .* delete it"):
        tune_part()


@pytest.mark.gpu
def test_choosing_on_this_gpu(cache: Path) -> None:
    choices = tune_choice(head_dims=(64,), dtypes=(torch.bfloat16,), lengths=(256,), rep_ms=5)
    assert [choice.by_length[0][0] for choice in choices.values()] == [0, 0]
    assert CHOICES.entries() == CHOICES.shipped() | choices
