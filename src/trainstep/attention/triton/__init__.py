"""FlashAttention-2 in Triton, for GPUs since Ampere: `forward` and `backward`.

Here is what they share, with each other and with Hopper's kernels: which program works on which tile, loads and
products of tiles, and launching without examining every argument again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.attention.tuned import Tile, block_of, multiply_precision

# Arguments that change from call to call: compiled once for all their values. Strides are not among them: their
# alignment decides how wide the loads can be.
SIZES = [
    "tiles_per_head", "all_heads", "heads", "all_kv_heads", "kv_heads", "n_queries", "n_keys", "heads_per_section",
    "window",
]  # fmt: skip

LONGEST_SUM = tl.constexpr(64)
"""Terms in one sum of a matrix unit where float32 is to be exact. Emulated with a rounding after every eight terms,
attention's errors reach 0.9 of float32's budget with sums of 64, 1.2 with 128 and 2.1 with 256. Measured on an H200
with sums of 64, the worst are 0.99 (dQ at head_dim 64), 0.74 (128) and 0.56 (256)."""


INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if Triton's interpreter was chosen (TRITON_INTERPRET=1 before its import): then kernels run on a CPU."""


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
def soft_capped(scores, cap):
    """cap · tanh(scores / cap) to a few roundings of float32; of small ones 1 - exp(…) would keep few digits."""
    x = scores / cap
    square = x * x
    series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    decay = tl.exp2(tl.abs(x) * -2.8853900817779268)  # -2 log2(e)
    size = (1 - decay) / (1 + decay)
    return cap * tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -size, size))


@triton.jit
def first_key_of(query, window, bounds_ptr):
    """The first key that a query sees, of one or many, where there is a window or documents."""
    first = query * 0
    if window is not None:
        first = tl.maximum(query - window + 1, 0)
    if bounds_ptr is not None:
        first = tl.maximum(first, tl.load(bounds_ptr + query))
    return first


@triton.jit
def queries_of_key(key, n_queries, window, bounds_ptr, IS_CAUSAL: tl.constexpr):
    """The first query that sees a key, and the one past the last, or any past the end; of one key or many."""
    if bounds_ptr is not None:
        first = tl.load(bounds_ptr + key)
        end = tl.load(bounds_ptr + n_queries + key)
        if window is not None:
            end = tl.minimum(end, key + window)
    else:
        first = key
        end = key + window
    if IS_CAUSAL:
        first = key
    return first, end


@triton.jit
def keys_of_tile(
    first_row, n_queries, n_keys, window, bounds_ptr,
    IS_CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The keys that the queries first_row, …, first_row + BLOCK_Q - 1 see, as two walks in steps of BLOCK_K.

    row_first, row_limit [BLOCK_Q]: the first and the last key that each query sees. Every query sees all keys of
    clear, …, whole - 1. The others, which some see, are cut, …, cut_end - 1, from `clear` on moved up by whole - clear.
    """
    rows = first_row + tl.arange(0, BLOCK_Q)
    row_first = tl.zeros([BLOCK_Q], tl.int32)
    row_limit = tl.full([BLOCK_Q], n_keys - 1, tl.int32)
    clear = 0
    whole = n_keys
    cut_end = n_keys
    if IS_CAUSAL:
        row_limit = tl.minimum(row_limit, rows)
        whole = tl.minimum(whole, first_row + 1)
        cut_end = tl.minimum(cut_end, first_row + BLOCK_Q)
    whole = whole // BLOCK_K * BLOCK_K
    cut = whole
    if window is not None or bounds_ptr is not None:
        last_row = tl.minimum(first_row + BLOCK_Q, n_queries) - 1
        rows = tl.minimum(rows, last_row)  # a query past the end sees what the last one does
        row_first = first_key_of(rows, window, bounds_ptr)
        if bounds_ptr is not None and not IS_CAUSAL:
            row_limit = tl.load(bounds_ptr + n_queries + rows) - 1
            whole = tl.load(bounds_ptr + n_queries + first_row) // BLOCK_K * BLOCK_K
            cut_end = tl.load(bounds_ptr + n_queries + last_row)
        cut = first_key_of(first_row, window, bounds_ptr) // BLOCK_K * BLOCK_K
        clear = tl.cdiv(first_key_of(last_row, window, bounds_ptr), BLOCK_K) * BLOCK_K
        whole = tl.maximum(whole, clear)
        cut_end += clear - whole
    return row_first, row_limit, clear, whole, cut, cut_end


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
    less than float32 rounds off (Ootomo & Yokota 2022, after Markidis et al. 2018). Matrix units round their sums
    toward zero, so that long sums drift: those are taken in parts, which are added in float32.
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


Launch = tuple[tuple[int, ...], dict[str, Any]]
"""The number of programs along one to three axes, and by name the kernel's arguments and the compiler's options."""


def tensor_names(kernel: Any) -> list[str]:
    """Tensors that a kernel reads and writes, in its order: "q" for arguments q_ptr or q_desc. The `bounds` of
    documents are last, and left out where there are none."""
    places = (name.rpartition("_") for name in kernel.arg_names)
    return list(dict.fromkeys(tensor for tensor, _, kind in places if kind in ("ptr", "desc")))


def owns_keys(kernel: Any) -> bool:
    """True if a program of `kernel` owns keys of a key head, rather than queries of a query head."""
    return "kv_heads" in kernel.arg_names


def pointers_and_strides(kernel: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Pointer and strides of a tensor called "q": q_ptr, stride_qb, stride_qh and stride_qn, if `kernel` has such
    arguments."""
    values: dict[str, Any] = {}
    for name, t in tensors.items():
        values[f"{name}_ptr"] = t
        values |= {f"stride_{name}{axis}": stride for axis, stride in zip("bhn", t.stride(), strict=False)}
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def kernel_arguments(
    kernel: Any, tensors: dict[str, Tensor], own_rows: int, is_causal: bool, scale: float, *, sum_bytes: int = 0,
    **named: Any,
) -> Launch:  # fmt: skip
    """`named`, and what else `kernel` has arguments for: pointers, strides, sizes and scales.

    A program owns `own_rows` rows of a head, or works on as many at a time (`hopper/schedule.py`). Programs that run at
    the same time share the other side's tensors through the L2 cache: heads are taken in equal sections whose shared
    tensors fill half of it at most, and within a section, with a program for each tile, those with the most work come
    first, so that the last programs to start are the short ones. sum_bytes: of a sum that they share too, for each of
    its rows.
    """
    batch, heads, n_queries, head_dim = tensors["q"].shape
    kv_heads, n_keys = tensors["k"].shape[1:3]
    group = heads // kv_heads
    owners, owned, shared = (kv_heads, n_keys, n_queries * group) if owns_keys(kernel) else (heads, n_queries, n_keys)
    tiles_per_head = triton.cdiv(owned, own_rows)
    bytes_per_head = shared * (2 * head_dim * tensors["q"].element_size() + sum_bytes)
    device = tensors["q"].device  # Triton's interpreter runs on the CPU, for which any size of the cache will do
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 20
    sections = triton.cdiv(batch * owners, max(1, l2_bytes // 2 // bytes_per_head))
    heads_per_section = triton.cdiv(batch * owners, sections)  # the last one is about as long as the others
    values = pointers_and_strides(kernel, tensors)
    values |= {"tiles_per_head": tiles_per_head, "heads": heads, "kv_heads": kv_heads, "group": group}
    values |= {"all_heads": batch * heads, "all_kv_heads": batch * kv_heads, "heads_per_section": heads_per_section}
    values |= {"n_queries": n_queries, "n_keys": n_keys, "scale": scale, "scale_log2": scale * math.log2(math.e)}
    named |= {"IS_CAUSAL": is_causal, "HEAD_DIM": head_dim}
    named |= {name: values[name] for name in kernel.arg_names if name in values}
    return (tiles_per_head * batch * owners,), named


class Launcher:
    """`launcher(tensors, *settings)` launches `kernel`, the tensors given in the order of its `tensor_names`.

    Triton finds a compiled kernel by the type, alignment and value of each argument of each call. With the 20 to 35
    arguments of these kernels that takes longer than attention over a short sequence. What those properties follow
    from, the tensors' shapes, strides, dtypes and alignment, is quicker to compare: a call that agrees in it with an
    earlier one is given that one's compiled kernel, and of its arguments only the tensors are replaced.

    What `arguments(kernel, tensors by name, *settings)` returns may depend on the tensors' shapes, strides, dtypes and
    device, on the settings, which are hashable, on `multiply_precision` of the first tensor, and on nothing else. Its
    arguments are the tensors, descriptors of them, and numbers.
    """

    def __init__(self, kernel: Any, arguments: Callable[..., Launch]) -> None:
        self._kernel, self._arguments = kernel, arguments
        # A compiled kernel, its arguments with None or descriptors of nothing where tensors go, and where those go:
        # (position among the arguments, which tensor).
        self._prepared: dict[Any, tuple[Callable[..., None], list[Any], list[tuple[int, int]]]] = {}
        self.latest: Any = None
        """The kernel compiled last, with what the compiler said of it (`n_spills`, `n_regs`)."""

    def __call__(self, tensors: Sequence[Tensor], *settings: Any) -> None:
        same = (tensors[0].device, multiply_precision(tensors[0].dtype), settings)
        key = (*same, *((t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors))
        prepared = self._prepared.get(key)
        if prepared is None:
            self._first(key, tensors, settings)
            return
        launch, prepared_arguments, places = prepared
        arguments = prepared_arguments.copy()
        for position, which in places:
            descriptor = arguments[position]
            arguments[position] = tensors[which] if descriptor is None else _over(descriptor, tensors[which])
        launch(*arguments)

    def _first(self, key: Any, tensors: Sequence[Tensor], settings: tuple[Any, ...]) -> None:
        tensors = [t.detach() for t in tensors]  # told apart below, also where a caller passes one tensor twice
        names = tensor_names(self._kernel)
        by_name = dict(zip(names[: len(tensors)] if names[-1] == "bounds" else names, tensors, strict=True))
        programs, named = self._arguments(self._kernel, by_name, *settings)
        grid = (*programs, 1, 1)[:3]
        compiled = self._kernel[grid](**named)
        if compiled is None:  # Triton's interpreter has nothing to remember
            return
        self.latest = compiled
        if len(self._prepared) >= 1024:
            self._prepared.clear()  # and all that are still needed are prepared again
        arguments, places = [named[name] for name in self._kernel.arg_names], []
        for position, argument in enumerate(arguments):
            tensor = getattr(argument, "base", argument)  # a descriptor's, or the argument itself
            if isinstance(tensor, Tensor):
                places.append((position, next(which for which, each in enumerate(tensors) if each is tensor)))
                arguments[position] = None if tensor is argument else _over(argument, None)  # keep no memory alive
        self._prepared[key] = (compiled[grid], arguments, places)


def _over(descriptor: Any, tensor: Tensor | None) -> Any:
    """`descriptor` with another tensor of the same kind; its checks have passed once and are not repeated."""
    copy = object.__new__(type(descriptor))
    copy.__dict__ = {**descriptor.__dict__, "base": tensor}
    return copy


def portable(
    kernel: Any, tensors: dict[str, Tensor], is_causal: bool, scale: float, tile: Tile, window: int | None = None,
    softcap: float | None = None,
) -> Launch:  # fmt: skip
    """A launch of a portable kernel, with scale > 0; a window is below n_queries, and causal.

    Without one, documents or a softcap its argument is None, a constant to the compiler: the plain kernel does not know
    of them. Tensors have four dimensions; statistics of rows are contiguous float32 of shape (batch, heads, n_queries);
    bounds of documents are those of `documents.bounds`.
    """
    own_rows, (*_, head_dim) = tile.keys if owns_keys(kernel) else tile.queries, tensors["q"].shape
    return kernel_arguments(
        kernel, tensors, own_rows, is_causal, scale, BLOCK_D=block_of(head_dim), BLOCK_Q=tile.queries,
        BLOCK_K=tile.keys, PRECISION=multiply_precision(tensors["q"].dtype), num_warps=tile.warps,
        num_stages=tile.stages, window=window, bounds_ptr=None,
        cap=None if softcap is None else softcap / scale,
    )  # fmt: skip
