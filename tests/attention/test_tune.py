"""What tuning makes of its measurements. Measuring itself needs a GPU."""

import pytest
import torch

from trainstep.attention.tune import Measurement, fastest, tune_choice, tune_tiles
from trainstep.attention.tuned import HopperTile, Tile
from trainstep.errors import UsageError


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
