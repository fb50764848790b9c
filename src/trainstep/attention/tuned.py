"""Results of `trainstep tune attention`, looked up and never searched for at run time.

Three tables are shipped as JSON: the tiles of the portable kernels (`triton/tiles.json`), those of the Hopper kernels
(`hopper/tiles.json`) and the fastest implementations (`choice.json`). Files of the same names in the user's cache
folder override them entry by entry. Each is read once, when it is first asked for.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from trainstep.base.config import check_value
from trainstep.base.errors import UsageError
from trainstep.base.files import aside, read_json
from trainstep.base.operators import ATTENTION

if TYPE_CHECKING:
    FASTEST: dict[tuple[str, str, int, bool], tuple[tuple[int, str], ...]]

Kernel = Literal["forward", "dq", "dkdv"]
TilePrecision = Literal["16-bit", "tf32", "tf32x3"]


class TileCase(NamedTuple):
    """Properties of a case that decide a portable kernel's tile."""

    gpu: str  # "sm_90", or "other" for those without an entry, whose tiles fit the least shared memory since 8.0
    kernel: Kernel
    precision: TilePrecision  # "16-bit", or `multiply_precision` of float32
    head_dim: int  # its `block_of`
    is_causal: bool


@dataclass(frozen=True)
class Tile:
    """A configuration of a portable kernel: queries × keys per tile, warps per program, stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


class HopperTileCase(NamedTuple):
    kernel: Kernel
    head_dim: int  # its `hopper_block_of`
    is_causal: bool


@dataclass(frozen=True)
class HopperTile:
    """A configuration of a Hopper kernel."""

    consumers: int  # warpgroups that compute, each on 64 rows of its own
    block: int  # rows per tile that streams past them
    stages: int  # slots of the ring those tiles pass through
    own_in_registers: bool = False  # a consumer's own rows: spares shared memory's bandwidth, costs registers

    @property
    def registers(self) -> int:
        """Registers per consumer thread: what 65,536 leave when the producer's warpgroup keeps 24 each."""
        return 240 if self.consumers == 2 else 160


class ChoiceCase(NamedTuple):
    gpu: str
    dtype: str
    head_dim: int
    is_causal: bool


@dataclass(frozen=True)
class Choice:
    """The fastest implementations of forward + backward: (from this length on, implementation), ascending from 0."""

    by_length: tuple[tuple[int, str], ...]

    def __post_init__(self) -> None:
        lengths = [length for length, _ in self.by_length]
        known = all(impl in ATTENTION for _, impl in self.by_length)
        if lengths[:1] != [0] or lengths != sorted(set(lengths)) or not known:
            raise ValueError(f"by_length must hold [length, implementation] ascending from 0, got {self.by_length}")


Case = TypeVar("Case", bound=TileCase | HopperTileCase | ChoiceCase)
Value = TypeVar("Value", bound=Tile | HopperTile | Choice)


class Table(Generic[Case, Value]):
    """Case → value, kept as a JSON list of objects with the fields of both."""

    def __init__(self, file: str, case: type[Case], value: type[Value]) -> None:
        self._file, self._case, self._value = file, case, value
        self._entries: dict[Case, Value] | None = None

    def entries(self) -> Mapping[Case, Value]:
        """Shipped entries, with the user's entries over them. Raises UsageError if the user's file cannot be read."""
        if self._entries is None:
            self._entries = self.shipped() | self._users()
        return self._entries

    def shipped(self) -> dict[Case, Value]:
        return self._read(Path(__file__).parent / self._file)

    def user_file(self) -> Path:
        import platformdirs

        return platformdirs.user_cache_path("trainstep") / "attention" / self._file

    def save(self, entries: Mapping[Case, Value]) -> None:
        """Put entries into the user's file, beside those that it has for other cases."""
        merged = self._users() | dict(entries)
        rows = [json.dumps(case._asdict() | dataclasses.asdict(value)) for case, value in merged.items()]
        path = self.user_file()
        with aside(path, "make its folder writable") as draft, draft.open("x", encoding="utf-8") as file:
            file.write("[\n  " + ",\n  ".join(rows) + "\n]\n")
        self._entries = None
        _tile.cache_clear()
        hopper_tile_for.cache_clear()
        globals().pop("FASTEST", None)

    def _users(self) -> dict[Case, Value]:
        path = self.user_file()
        try:
            return self._read(path) if path.exists() else {}
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path} is not a table of `trainstep tune attention` ({type(error).__name__}: {error}); delete it to "
                "have the values that are shipped, and run `trainstep tune attention` to measure this GPU again"
            ) from error

    def _read(self, path: Path) -> dict[Case, Value]:
        names, kinds = typing.get_type_hints(self._case), typing.get_type_hints(self._value)
        entries = {}
        for row in read_json(path, list[dict[str, Any]]):
            _check_types(row, names | kinds)
            case = self._case(*(row[name] for name in names))
            entries[case] = self._value(**{name: _as_tuple(row[name]) for name in kinds})
        return entries


def _check_types(row: dict[str, Any], kinds: dict[str, Any]) -> None:
    if row.keys() != kinds.keys():
        raise ValueError(f"expected {', '.join(kinds)} in every entry, got {', '.join(row)}")
    for name, value in row.items():
        check_value(list if typing.get_origin(kinds[name]) is tuple else kinds[name], value, name)
        if kinds[name] is int and value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


TILES = Table("triton/tiles.json", TileCase, Tile)
HOPPER_TILES = Table("hopper/tiles.json", HopperTileCase, HopperTile)
CHOICES = Table("choice.json", ChoiceCase, Choice)


def block_of(head_dim: int) -> int:
    """The head_dim a portable kernel computes with: the next power of two, at least the 16 that matrix units need."""
    return max(16, 1 << (head_dim - 1).bit_length())


def hopper_block_of(head_dim: int) -> int:
    """The head_dim a Hopper kernel computes with; the copy engine fills what is missing with zeros."""
    return max(64, block_of(head_dim))


def multiply_precision(dtype: torch.dtype) -> Literal["tf32", "tf32x3"]:
    """Precision of the kernels' products: float32 as exact as PyTorch's own matrix products under the current
    setting."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return "tf32x3"
    return "tf32"  # 16-bit operands are multiplied as they are; this names nothing there


def gpu_name(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def tile_for(kernel: Kernel, q: Tensor, is_causal: bool) -> Tile:
    """The portable configuration of `kernel` ("forward", "dq" or "dkdv") for q's device, dtype and head_dim."""
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else (0, 0)  # interpreted
    precision = multiply_precision(q.dtype) if q.dtype == torch.float32 else "16-bit"
    return _tile(capability, kernel, precision, block_of(q.shape[-1]), is_causal)


@cache
def _tile(capability: tuple[int, int], *case: Any) -> Tile:
    tiles = TILES.entries()
    return tiles.get(TileCase(gpu_name(capability), *case)) or tiles[TileCase("other", *case)]


@cache
def hopper_tile_for(kernel: Kernel, head_dim: int, is_causal: bool) -> HopperTile:
    if tile := HOPPER_TILES.entries().get(HopperTileCase(kernel, hopper_block_of(head_dim), is_causal)):
        return tile
    raise UsageError(f"no Hopper configuration of {kernel!r} for head_dim {head_dim}")


def __getattr__(name: str) -> Any:
    """`FASTEST`: `CHOICES` as a dict of tuples, made when it is first asked for.

    torch.compile may trace `choose`. It can follow a look-up in a global dict, and no function that reads a file.
    """
    if name != "FASTEST":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    fastest = globals()[name] = {tuple(case): choice.by_length for case, choice in CHOICES.entries().items()}
    return fastest
