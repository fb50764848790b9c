"""What tuning makes of its measurements. Measuring itself needs a GPU."""

from pathlib import Path

import pytest
import torch

from trainstep.attention.triton import tables, tune
from trainstep.attention.triton.tune import Measurement
from trainstep.attention.triton.tuning import HopperTile, Tile


def test_the_shipped_tables_are_as_tuning_writes_them(tmp_path: Path) -> None:
    tune.write_tables(tables.PORTABLE, tables.HOPPER, tmp_path / "tables.py")
    assert (tmp_path / "tables.py").read_text() == tune.TABLES.read_text()


def test_the_fastest_tile_of_each_case_is_kept_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    portable, hopper = tune._updated(
        [
            Measurement("dq", "fp32", 20, True, Tile(1, 1, 4, 1), 3.0),
            Measurement("dq", "fp32", 20, True, Tile(2, 2, 4, 1), 2.0),
            Measurement("dq", "fp32", 20, True, Tile(3, 3, 4, 1), None, error="out of shared memory"),
            Measurement("dq", "tf32", 20, True, Tile(4, 4, 4, 1), 9.0),
            Measurement("dq", "fp16", 20, True, Tile(5, 5, 4, 1), 9.0),
            Measurement("dq", "bf16", 128, True, HopperTile(2, 6, 2), 9.0),
        ]
    )
    changed = {row: tile for row, tile in portable["sm_90"].items() if tile != tables.PORTABLE["sm_90"][row]}
    assert changed == {
        ("dq", "tf32x3", 32, True): (2, 2, 4, 1),
        ("dq", "tf32", 32, True): (4, 4, 4, 1),
        ("dq", "16-bit", 32, True): (5, 5, 4, 1),
    }
    assert {row: tile for row, tile in hopper.items() if tile != tables.HOPPER[row]} == {
        ("dq", 128, True): (2, 6, 2, False)
    }
    assert all(portable[arch] == tables.PORTABLE[arch] for arch in tables.PORTABLE if arch != "sm_90")


@pytest.mark.parametrize(("spilled_ms", "kept"), [(1.0, Tile(1, 1, 4, 1)), (0.9, Tile(2, 2, 4, 1))])
def test_a_tile_that_spills_must_be_a_tenth_faster(
    spilled_ms: float, kept: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    clean = Measurement("forward", "fp32", 64, False, Tile(1, 1, 4, 1), 1.05, spills=0)
    spilled = Measurement("forward", "fp32", 64, False, Tile(2, 2, 4, 1), spilled_ms, spills=8)
    for results in ([clean, spilled], [spilled, clean]):
        portable, _ = tune._updated(results)
        assert Tile(*portable["sm_90"]["forward", "tf32x3", 64, False]) == kept
