"""A user's cache folder of our own for tests of the tuned tables."""

from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

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


def _forget_look_ups() -> None:
    tuned._tile.cache_clear()
    tuned.hopper_tile_for.cache_clear()
    vars(tuned).pop("FASTEST", None)
