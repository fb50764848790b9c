"""What the kernels share: which program works on which tile, loads and products of tiles, and launching.

`Launcher` launches a kernel again without examining every argument again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that run at the same time share keys and values (or queries and gradients) through the L2 cache. Heads are
# started in sections whose shared tensors fill about half of it, and within a section the tiles with the most work come
# first, so that the last programs to start are the short ones.
_L2_SHARE = 0.5

# Arguments that change from call to call: compiled once for all their values. Strides are not among them: their
# alignment decides how wide the loads can be.
SIZES = [
    "tiles_per_head", "all_heads", "heads", "all_kv_heads", "kv_heads", "n_queries", "n_keys", "heads_per_section",
]  # fmt: skip

LONGEST_SUM = tl.constexpr(64)
"""Terms in one sum of a matrix unit where float32 is to be exact. Emulated with a rounding after every eight terms,
attention's errors reach 0.9 of float32's budget with sums of 64, 1.2 with 128 and 2.1 with 256. Measured on an H200
with sums of 64, the worst are 0.99 (dQ at head_dim 64), 0.74 (128) and 0.56 (256)."""


@triton.jit
def tile_and_head(program, tiles_per_head, n_heads, heads_per_section, LONGEST_LAST: tl.constexpr):
    """Map a program's id to (tile, head): sections of heads in turn; within one, tile by tile over all its heads."""
    section = program // (heads_per_section * tiles_per_head)
    first_head = section * heads_per_section
    section_heads = tl.minimum(heads_per_section, n_heads - first_head)
    within = program - first_head * tiles_per_head
    tile = within // section_heads
    head = first_head + within % section_heads
    if LONGEST_LAST:
        tile = tiles_per_head - 1 - tile
    return tile, head


@triton.jit
def load_tile(pointers, mask, PARTIAL: tl.constexpr):
    """Load a tile, with zeros where the mask is False; a tile known to be whole (not PARTIAL) needs no mask."""
    if PARTIAL:
        return tl.load(pointers, mask=mask, other=0.0)
    else:  # noqa: RET505 - Triton compiles one of two branches, so the second return must be in one
        return tl.load(pointers)


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, accumulated in float32. PRECISION: "tf32" or "tf32x3", read for float32 operands only.

    "tf32x3": each float32 is a sum of two TF32 numbers, big + small, and big·big + big·small + small·big leaves out
    less than float32 rounds off (Ootomo & Yokota 2022, after Markidis et al. 2018). What is left is that matrix units
    round their sums toward zero, so a sum over many terms drifts: longer ones are taken in parts, which are added in
    float32.
    """
    if a.dtype == tl.float32:
        if PRECISION == "tf32x3" and a.shape[1] > LONGEST_SUM:
            a_even, a_odd = _halves(a)
            b_even, b_odd = _halves(tl.trans(b))
            acc = multiply(a_even, tl.trans(b_even), acc, PRECISION)
            return multiply(a_odd, tl.trans(b_odd), acc, PRECISION)
        if PRECISION == "tf32":
            a = _round_to_tf32(a)
            b = _round_to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _halves(x):
    """The even and the odd columns of x, which lie in one thread's registers as neighbours: nothing moves."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def _round_to_tf32(x):
    """The nearest number with ten bits of mantissa. The matrix unit only drops the other thirteen, which doubles the
    error and gives it a direction."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # adding to the bits of a NaN may make a zero of it


def section_heads(device: torch.device, heads: int, bytes_per_head: int) -> int:
    """How many heads to run side by side when each keeps re-reading `bytes_per_head` bytes."""
    return max(1, min(heads, int(_L2_SHARE * _l2_bytes(device)) // bytes_per_head))


@cache
def _l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 20  # Triton's interpreter, which has no cache: any size will do
    return torch.cuda.get_device_properties(device).L2_cache_size


def four_dims(t: Tensor) -> Tensor:
    """View (..., heads, length, head_dim) as (batch, heads, length, head_dim), a 3-D tensor with one head.

    Copies only what the kernels cannot address: a last dimension that is not contiguous, leading dimensions that do not
    merge, or rows so far apart that offsets inside one tile would leave 32 bits.
    """
    if t.ndim == 2:
        t = t[None, None]
    elif t.ndim == 3:
        t = t[:, None]
    elif t.ndim > 4:
        t = t.flatten(0, -4)
    if t.stride(-1) != 1 or t.stride(-2) >= 2**22:
        t = t.contiguous()
    return t


_REMEMBERED = 1024  # launches per kernel; beyond it, all are forgotten and prepared again


class Arguments:
    """What a kernel is launched with: `programs` of them, its leading arguments in order, the compile-time ones and the
    compiler's options by name."""

    def __init__(self, programs: int, *leading: Any, **named: Any) -> None:
        self.programs, self.leading, self.named = programs, leading, named


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A compiled kernel and the arguments of one launch, with places where tensors go."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    tensors: tuple[tuple[int, int], ...]  # (position among the arguments, which tensor)
    descriptors: tuple[tuple[int, int], ...]  # the same, for descriptors of tensors


class Launcher:
    """`launcher(tensors, *settings)` launches `kernel` with `arguments(*tensors, *settings)`.

    Triton finds a compiled kernel by the type, alignment and value of each argument of each call. With the 20 to 35
    arguments of these kernels that takes longer than attention over a short sequence. What those properties follow
    from, the tensors' shapes, strides, dtypes and alignment, is quicker to compare: a call that agrees in it with an
    earlier one is given that one's compiled kernel, and of its arguments only the tensors are replaced.

    What `arguments` returns may depend on the tensors' shapes, strides, dtypes and device and on the settings, which
    are hashable, and on nothing else. Its leading arguments are the tensors, descriptors of them, and numbers.
    """

    def __init__(self, kernel: Any, arguments: Callable[..., Arguments]) -> None:
        self._kernel = kernel
        self._arguments = arguments
        self._prepared: dict[Any, _Prepared] = {}
        self.latest: Any = None
        """The kernel compiled last, with what the compiler said of it (`n_spills`, `n_regs`)."""

    def __call__(self, tensors: Sequence[Tensor], *settings: Any) -> None:
        key = (
            tensors[0].device,
            settings,
            *((t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors),
        )
        prepared = self._prepared.get(key)
        if prepared is None:
            self._first(key, tensors, settings)
            return
        arguments = list(prepared.arguments)
        for position, which in prepared.tensors:
            arguments[position] = tensors[which]
        for position, which in prepared.descriptors:
            arguments[position] = _over(arguments[position], tensors[which])
        prepared.compiled[prepared.grid](*arguments)

    def _first(self, key: Any, tensors: Sequence[Tensor], settings: tuple[Any, ...]) -> None:
        tensors = [t.detach() for t in tensors]  # told apart below, also where a caller passes one tensor twice
        launch = self._arguments(*tensors, *settings)
        grid = (launch.programs, 1, 1)
        compiled = self._kernel[grid](*launch.leading, **launch.named)
        if compiled is None:  # Triton's interpreter has nothing to remember
            return
        self.latest = compiled
        if len(self._prepared) >= _REMEMBERED:
            self._prepared.clear()
        arguments = [*launch.leading, *(launch.named[name] for name in self._kernel.arg_names[len(launch.leading) :])]
        places: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        for position, argument in enumerate(arguments):
            is_descriptor = hasattr(argument, "base")
            tensor = argument.base if is_descriptor else argument
            if isinstance(tensor, Tensor):
                which = next(index for index, candidate in enumerate(tensors) if candidate is tensor)
                places[is_descriptor].append((position, which))
                arguments[position] = _over(argument, None) if is_descriptor else None  # keep no memory alive
        self._prepared[key] = _Prepared(compiled, grid, tuple(arguments), tuple(places[False]), tuple(places[True]))


def _over(descriptor: Any, tensor: Tensor | None) -> Any:
    """`descriptor` with another tensor of the same kind; its checks have passed once and are not repeated."""
    copy = object.__new__(type(descriptor))
    copy.__dict__ = {**descriptor.__dict__, "base": tensor}
    return copy
