"""A user's cache folder of our own for tests of the tuned tables, and PyTorch's switch for deterministic algorithms."""

from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest
import torch

from trainstep.attention import tuned


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder of tables, empty."""
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    for table in (tuned.TILES, tuned.HOPPER_TILES, tuned.CHOICES):
        monkeypatch.setattr(table, "_entries", None)
    _forget_look_ups()
    yield tmp_path / "trainstep" / "attention"
    _forget_look_ups()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """PyTorch asked for deterministic algorithms."""
    before, only_warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before, warn_only=only_warn)


def _forget_look_ups() -> None:
    tuned._tile.cache_clear()
    tuned.hopper_tile_for.cache_clear()
    vars(tuned).pop("FASTEST", None)
