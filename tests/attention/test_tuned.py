"""The tuned tables: what is shipped, what the user's cache changes of it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainstep.attention import IMPLEMENTATIONS, tuned
from trainstep.attention.tune import candidates
from trainstep.attention.tuned import (
    CHOICES,
    HOPPER_TILES,
    TILES,
    Choice,
    ChoiceCase,
    HopperTile,
    HopperTileCase,
    Table,
    Tile,
    TileCase,
    hopper_tile_for,
    multiply_precision,
    tile_for,
)
from trainstep.base.errors import UsageError
from trainstep.step.casting import matmul_precision

KERNELS, CAUSAL = ("forward", "dq", "dkdv"), (False, True)


class _On:
    """What look-ups read of a tensor, for a GPU that is not here."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device("cuda")


def on_gpu(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def test_the_shipped_tables_are_complete() -> None:
    assert set(TILES.shipped()) == {
        (g, k, p, d, c)
        for g in ("sm_80", "sm_90", "sm_100", "other")
        for k in KERNELS
        for d in (16, 32, 64, 128, 256)
        for p in ("16-bit", "tf32", "tf32x3")
        for c in CAUSAL
    }
    assert set(HOPPER_TILES.shipped()) == {(k, d, c) for k in KERNELS for d in (64, 128, 256) for c in CAUSAL}
    assert len(CHOICES.shipped()) == 30


def test_the_shipped_choices_are_measured_ones_in_ascending_lengths() -> None:
    for choice in CHOICES.shipped().values():
        assert choice.by_length[0][0] == 0
        assert [length for length, _ in choice.by_length] == sorted({length for length, _ in choice.by_length})
        assert all(impl in IMPLEMENTATIONS and impl != "auto" for _, impl in choice.by_length)


def test_no_case_is_shipped_twice() -> None:
    for table in (TILES, HOPPER_TILES, CHOICES):
        rows = json.loads((Path(tuned.__file__).parent / table._file).read_text())
        assert len(rows) == len(table.shipped())


def test_tuning_float32_tries_what_is_shipped_for_hopper() -> None:
    shipped = [(case, tile) for case, tile in TILES.shipped().items() if case.gpu == "sm_90"]
    assert shipped
    for case, tile in shipped:
        if case.precision != "16-bit":
            assert tile in candidates(case.kernel, False, "fp32", case.head_dim)


@pytest.mark.usefixtures("cache")
def test_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    q = _On(1, 2, 100, 40)
    for capability, gpu in (
        ((8, 0), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((8, 6), "other"),
        ((12, 0), "other"),
    ):
        on_gpu(monkeypatch, *capability)
        assert tile_for("dq", q, True) == TILES.shipped()[TileCase(gpu, "dq", "16-bit", 64, True)]
    assert hopper_tile_for("dq", 40, True) == hopper_tile_for("dq", 64, True)
    with pytest.raises(UsageError, match="512"):
        hopper_tile_for("dq", 512, True)


@pytest.mark.usefixtures("cache")
def test_float32_has_tiles_by_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 9, 0)
    q = _On(1, 2, 100, 256, dtype=torch.float32)
    for precision, multiplied in (("fp32", "tf32x3"), ("tf32", "tf32")):
        with matmul_precision(precision):
            assert multiply_precision(torch.float32) == multiplied
            assert (
                tile_for("forward", q, False) == TILES.shipped()[TileCase("sm_90", "forward", multiplied, 256, False)]
            )


def test_the_users_entries_override_those_that_are_shipped_one_by_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(monkeypatch, 9, 0)
    case = TileCase("sm_90", "dq", "16-bit", 32, True)
    before = tile_for("dq", _On(1, 2, 100, 32), True)
    TILES.save({case: Tile(16, 16, 4, 1)})
    assert before != Tile(16, 16, 4, 1) == tile_for("dq", _On(1, 2, 100, 32), True)
    assert TILES.entries() == TILES.shipped() | {case: Tile(16, 16, 4, 1)}
    own = TileCase("sm_86", "dq", "16-bit", 32, True)
    TILES.save({own: Tile(32, 16, 4, 1)})
    assert set(json.loads((cache / "triton/tiles.json").read_text())[1].items()) >= {("gpu", "sm_86"), ("queries", 32)}
    assert TILES.entries() == TILES.shipped() | {case: Tile(16, 16, 4, 1), own: Tile(32, 16, 4, 1)}
    on_gpu(monkeypatch, 8, 6)
    assert tile_for("dq", _On(1, 2, 100, 32), True) == Tile(32, 16, 4, 1)
    assert tile_for("dq", _On(1, 2, 100, 32), False) == TILES.shipped()[case._replace(gpu="other", is_causal=False)]

    HOPPER_TILES.save({HopperTileCase("dq", 64, True): HopperTile(2, 32, 2, True)})
    assert hopper_tile_for("dq", 64, True) == HopperTile(2, 32, 2, True)
    assert hopper_tile_for("dq", 64, False) == HOPPER_TILES.shipped()[HopperTileCase("dq", 64, False)]
    CHOICES.save({ChoiceCase("sm_90", "float16", 64, True): Choice(((0, "sdpa-flash"), (1024, "flash-triton")))})
    assert tuned.FASTEST["sm_90", "float16", 64, True] == ((0, "sdpa-flash"), (1024, "flash-triton"))
    assert sorted(path.name for path in cache.rglob("*.json*")) == ["choice.json", "tiles.json", "tiles.json"]


def test_a_table_is_read_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, 9, 0)
    reads = []
    read = Table._read
    monkeypatch.setattr(Table, "_read", lambda self, path: reads.append(path) or read(self, path))
    for _ in range(3):
        for kernel in KERNELS:
            tile_for(kernel, _On(1, 2, 100, 64), True)
            hopper_tile_for(kernel, 64, True)
        _ = tuned.FASTEST
    assert len(reads) == len(set(reads)) == 3  # each table as it is shipped: the user has none


TILE = {"gpu": "sm_90", "kernel": "dq", "precision": "tf32", "head_dim": 64, "is_causal": True} | {
    "queries": 64, "keys": 64, "warps": 4, "stages": 2,
}  # fmt: skip
CHOICE = {"gpu": "sm_90", "dtype": "float16", "head_dim": 64, "is_causal": True, "by_length": [[0, "sdpa"]]}
DAMAGED: dict[str, tuple[Table[Any, Any], str]] = {
    "cut off": (TILES, json.dumps([TILE])[:-9]),
    "empty": (TILES, ""),
    "no text": (TILES, "\udcff"),
    "no list": (TILES, json.dumps(TILE)),
    "a number": (TILES, "3"),
    "no entries": (TILES, "[1, 2]"),
    "of another kind": (TILES, json.dumps([CHOICE])),
    "a field too many": (TILES, json.dumps([TILE | {"comment": ""}])),
    "a field too few": (TILES, json.dumps([{name: TILE[name] for name in list(TILE)[:-1]}])),
    "a word for a number": (TILES, json.dumps([TILE | {"warps": "4"}])),
    "a truth for a number": (TILES, json.dumps([TILE | {"stages": True}])),
    "no warps": (TILES, json.dumps([TILE | {"warps": 0}])),
    "an unknown kernel": (TILES, json.dumps([TILE | {"kernel": "dv"}])),
    "an unknown precision": (TILES, json.dumps([TILE | {"precision": "fp8"}])),
    "an unknown implementation": (CHOICES, json.dumps([CHOICE | {"by_length": [[0, "fast"]]}])),
    "auto itself": (CHOICES, json.dumps([CHOICE | {"by_length": [[0, "auto"]]}])),
    "not from 0": (CHOICES, json.dumps([CHOICE | {"by_length": [[1, "sdpa"]]}])),
    "descending": (CHOICES, json.dumps([CHOICE | {"by_length": [[0, "sdpa"], [9, "flex"], [5, "sdpa"]]}])),
    "no pairs": (CHOICES, json.dumps([CHOICE | {"by_length": [0, "sdpa"]}])),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_users_table_that_is_none_is_refused_with_its_name_and_kept(what: str, cache: Path) -> None:
    table, text = DAMAGED[what]
    path = table.user_file()
    assert path.is_relative_to(cache)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    for use in (table.entries, lambda: table.save({})):
        with pytest.raises(UsageError, match=r"is not a table of .* delete it") as refused:
            use()
        assert str(path) in str(refused.value)
    assert path.read_text(encoding="utf-8", errors="surrogateescape") == text


def test_what_the_damaged_tables_are_made_from_is_sound(cache: Path) -> None:
    for table, row in ((TILES, TILE), (CHOICES, CHOICE)):
        table.user_file().parent.mkdir(parents=True, exist_ok=True)
        table.user_file().write_text(json.dumps([row]))
    assert TILES.entries()[TileCase("sm_90", "dq", "tf32", 64, True)] == Tile(64, 64, 4, 2)
    assert CHOICES.entries()[ChoiceCase("sm_90", "float16", 64, True)] == Choice(((0, "sdpa"),))


def test_a_folder_in_the_tables_place_is_refused(cache: Path) -> None:
    TILES.user_file().mkdir(parents=True)
    with pytest.raises(UsageError, match=r"tiles\.json is not a table"):
        TILES.entries()


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    with pytest.raises(UsageError, match="attention"):
        TILES.save({})


@pytest.mark.usefixtures("cache")
def test_compiled_code_can_look_the_fastest_up() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        found = -1
        for length, _ in tuned.FASTEST.get(("sm_90", "bfloat16", x.shape[-1], True), ()):
            found += x.shape[-2] >= length
        return x + found

    assert "FASTEST" not in vars(tuned)
    compiled = torch.compile(work, fullgraph=True, backend="eager")
    for length, head_dim, expected in ((4096, 256, 0), (8192, 256, 1), (512, 128, 0), (4096, 128, 1), (8, 7, -1)):
        assert compiled(torch.zeros(length, head_dim))[0, 0] == expected
