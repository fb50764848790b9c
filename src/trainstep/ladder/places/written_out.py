"""Attention that a script writes out, softmax(scale · q kᵀ + mask) v, computed by `scaled_dot_product_attention`.

It is found from outside, as it is called: a product of two activations, the second transposed, gives `Scores`, a tensor
that is not computed yet. What attention does with scores (a scale, masks, a wider dtype, softmax over the last
dimension, dropout of probabilities) makes further ones, and their product with the values is computed by torch's fused
attention from q, k and v. Whatever else is done with any of them computes it as the script wrote it, at once: the
script gets the numbers that it asks for, and attention whose scores it uses beforehand stays as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainstep.attention.scoring import with_positive_scale
from trainstep.base.errors import UnsupportedError
from trainstep.ladder.places.uncomputed import (
    CASTS,
    KNOWN,
    SELF,
    Call,
    Dtypes,
    State,
    Uncomputed,
    after,
    as_written,
    cast_to,
    is_transformed,
    known,
    state_of,
)
from trainstep.observe.lines import line_of_call

Note = Callable[[str, str], object]


@dataclass(frozen=True)
class _Chain:
    """A chain of calls by which scores, or the probabilities after softmax, come about."""

    query: Tensor  # (…, L, E)
    key: Tensor  # (…, E, S)
    steps: tuple[Call, ...]
    state: State
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()
    has_softmax: bool = False
    dropped: float = 0.0  # share of the probabilities
    versions: tuple[int, ...] = ()

    def sources(self) -> list[Tensor]:
        return [self.query, self.key, *(each.tensor for each in self.masks)]

    def check(self) -> None:
        """Raise `UnsupportedError` where something was changed since, so that it is too late to compute it."""
        if tuple(each._version for each in self.sources()) != self.versions:
            raise UnsupportedError("attention that is written out changes q, k or a mask in place before it ends")


class Scores(Uncomputed):
    """Scores or probabilities of attention that are computed when something else than attention is done with them."""

    chain: _Chain
    computed: Tensor | None
    finder: Finder

    @staticmethod
    def __new__(cls, finder: Finder, chain: _Chain, shape: Sequence[int], dtype: torch.dtype) -> Scores:
        made = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=chain.query.device)
        made.finder, made.computed = finder, None
        known = len(chain.versions)
        made.chain = replace(chain, versions=(*chain.versions, *(each._version for each in chain.sources()[known:])))
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in KNOWN:
            return known(func, args, kwargs)
        own = next((each for each in args if isinstance(each, Scores)), None)
        if own is not None and own.computed is None:
            further = own.finder.further(own, func, args, kwargs)
            if further is not None:
                return further
        return func(*as_written(args), **as_written(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise UnsupportedError(f"{func} is given the scores of attention that is written out, past torch's functions")

    def as_written(self) -> Tensor:
        """Their values, by the script's own calls."""
        if self.computed is None:
            chain = self.chain
            chain.check()
            with chain.state.entered():
                self.computed = after(self.finder.product(chain.query, chain.key), chain.steps)
        return self.computed


_SCALES = {"mul": 1, "multiply": 1, "__mul__": 1, "__rmul__": 1, "mul_": 1, "__imul__": 1} | {
    "div": -1,
    "divide": -1,
    "true_divide": -1,
    "__truediv__": -1,
    "div_": -1,
    "__itruediv__": -1,
}
"""Function → the power of its number by which scores are scaled."""
_IN_PLACE = ("mul_", "__imul__", "div_", "__itruediv__", "add_", "__iadd__", "masked_fill_")
_PRODUCTS = ("matmul", "__matmul__", "bmm")


class Finder:
    """Finds attention that is written out, from `install` on.

    Args:
        note: called with the line of a product with values that was replaced, and with how, before the first update.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self.masks = Masks()
        self._dtypes = Dtypes()
        self.product = torch.matmul

    def install(self) -> None:
        """Replace torch's products."""
        for owner, names in ((torch, ("matmul", "bmm")), (Tensor, ("matmul", "__matmul__", "bmm"))):
            for name in names:
                setattr(owner, name, self._looking(getattr(owner, name)))

    def updated(self, *_: object) -> None:
        """An optimizer has stepped."""
        self.masks.is_first = False

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def product(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or kwargs or len(args) != 2 or not _may_be_scores(*args):
                return original(*args, **kwargs)
            query, key = args
            dtype = self._dtypes.of(self.product, args, {})
            if dtype is None:
                return original(query, key)
            chain = _Chain(query, key, (), state_of(query.device))
            return Scores(self, chain, (*query.shape[:-1], key.shape[-1]), dtype)

        return product

    def further(self, own: Scores, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of another call, or None where that is none of attention's."""
        chain, name = own.chain, getattr(func, "__name__", "")
        if state_of(own.device) != chain.state:
            return None
        if name == "contiguous":
            return own
        if name in ("dropout", "dropout_"):
            dropped = _dropped(args, kwargs)
            if dropped == 0:
                return own
            if dropped is None or chain.dropped or not chain.has_softmax:
                return None
            return self._then(own, replace(chain, dropped=dropped), func, args, kwargs)
        if name in CASTS:
            dtype = cast_to(name, args, kwargs)
            wider = dtype is not None and (chain.has_softmax or dtype == torch.float32)
            return self._then(own, chain, Tensor.to, (own, dtype), {}) if wider else None
        if chain.has_softmax:
            return self._attention(own, func, args) if name in _PRODUCTS and not kwargs and args[0] is own else None
        if name == "softmax":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            is_last = args[0] is own and dim in (-1, own.dim() - 1)
            return self._then(own, replace(chain, has_softmax=True), func, args, kwargs) if is_last else None
        if name in _SCALES and not kwargs and not chain.masks and args[0] is own and is_number(args[1]) and args[1]:
            return self._then(own, replace(chain, scale=chain.scale * args[1] ** _SCALES[name]), func, args, kwargs)
        mask = mask_of(own, name, args) if not kwargs else None
        return None if mask is None else self._then(own, replace(chain, masks=(*chain.masks, mask)), func, args, kwargs)

    def _then(self, own: Scores, chain: _Chain, func: Any, args: Any, kwargs: dict[str, Any]) -> Scores | None:
        if sum(isinstance(each, Scores) for each in args) != 1:
            return None
        drops = chain.dropped > own.chain.dropped  # found out by a call, its dtype would cost random numbers
        dtype = own.dtype if drops else self._dtypes.of(func, args, kwargs)
        if dtype is None:
            return None
        steps = (*chain.steps, (func, tuple(SELF if each is own else each for each in args), kwargs))
        made = Scores(self, replace(chain, steps=steps), own.shape, dtype)
        if func.__name__ not in _IN_PLACE:
            return made
        own.chain = made.chain
        return own

    def _attention(self, own: Scores, func: Any, args: Any) -> Tensor | None:
        """The product with the values, from q, k and v; None where shapes or dtypes are not attention's."""
        chain, value = own.chain, args[1]
        query, key = chain.query, chain.key.transpose(-2, -1)
        if type(value) is not Tensor or value.dim() != query.dim() or value.device != query.device:
            return None
        fits = value.shape[:-2] == query.shape[:-2] and value.shape[-2] == key.shape[-2]
        autocast = chain.state.has_autocast
        dtype = chain.state.narrow if autocast and query.dtype != torch.float64 else query.dtype
        expected = self._dtypes.of(func, args, {})
        if not fits or expected is None or (not autocast and not query.dtype == key.dtype == value.dtype):
            return None
        chain.check()
        mask, is_causal = self.masks.given(chain.masks, query.shape[-2], key.shape[-2], dtype)
        query, key, value = (each.to(dtype) for each in (query, key, value))
        if is_flat := query.dim() == 3:  # (batch · heads, L, E): fused kernels take four dimensions
            query, key, value = (each.unsqueeze(0) for each in (query, key, value))
        query, scale = with_positive_scale(query, chain.scale)
        more: dict[str, Any] = {"dropout_p": chain.dropped, "is_causal": is_causal, "scale": scale}
        result = F.scaled_dot_product_attention(query, key, value, mask, **more)
        result = result.squeeze(0) if is_flat else result
        if self.masks.is_first:
            how = "is_causal=True" if is_causal else "no mask" if mask is None else "attn_mask"
            self._note(line_of_call(), how + (f", dropout_p={chain.dropped:g}" if chain.dropped else ""))
        return result.to(expected).contiguous()  # as a product's result is: it may be viewed


def _may_be_scores(query: Any, key: Any) -> bool:
    """True if two factors may be queries and transposed keys: activations of equal batch and heads."""
    if type(query) is not Tensor or type(key) is not Tensor:
        return False
    if is_transformed(query, key):
        return False
    return (
        query.dim() in (3, 4)
        and query.is_floating_point()
        and query.dtype == key.dtype
        and query.device == key.device
        and query.device.type in ("cpu", "cuda")
        and query.shape[:-2] == key.shape[:-2]
        and query.shape[-1] == key.shape[-2]
        and query.layout == key.layout == torch.strided
        and not (query.is_inference() or key.is_inference())
        and key.stride(-2) == 1 != key.stride(-1)
        and query.numel() > 0 < key.numel()
    )


def _dropped(args: Any, kwargs: dict[str, Any]) -> float | None:
    """Share of elements that a call of dropout drops; None where that is in place, or all."""
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    p = float(given.get("p", 0.5)) if given.get("train", given.get("training", True)) else 0.0
    return None if p and (given.get("inplace") or p >= 1) else p


# The masks of attention that a script writes out, as fused attention takes them.
#
# A mask is causal if its values say so. On a GPU reading them would stop the host each time, so this is done until the
# first update; afterwards the device itself checks that it still holds, and ends the run where it does not.
MASKED = -1e4
"""Largest value that masks: what is filled in or added where attention must not look is this or less: exp of it is 0
next to any usual score."""
_SUMS = ("add", "__add__", "__radd__", "add_", "__iadd__")


@dataclass(frozen=True)
class Mask:
    """A mask of a script."""

    tensor: Tensor
    fill: float | None  # what scores are where the mask, of bool, is true; None where it is added to them
    shows: bool = False  # whether true means that a score stays, as in torch.where

    def left_out(self) -> Tensor:
        """True where attention does not look; only of a mask with a fill."""
        return ~self.tensor if self.shows else self.tensor


class Masks:
    """Meaning of scripts' masks."""

    def __init__(self) -> None:
        self.is_first = True  # whether the first update is still to come
        self._causal: dict[tuple[Any, ...], bool] = {}

    def given(self, masks: Sequence[Mask], queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
        """`attn_mask` and `is_causal` for as many queries and keys, in the dtype of both."""
        if not masks:
            return None, False
        first, *others = masks
        if not others and self._is_causal(first, queries, keys):
            return None, True
        if not others and first.fill == -math.inf:
            return ~first.left_out(), False
        parts = [each.tensor if each.fill is None else _filled(each.left_out(), each.fill, dtype) for each in masks]
        total = sum(parts[1:], start=parts[0])
        return (total if total.dtype == dtype else total.clamp(min=torch.finfo(dtype).min).to(dtype)), False

    def _is_causal(self, mask: Mask, queries: int, keys: int) -> bool:
        tensor = mask.tensor
        if queries != keys or queries == 1 or (tensor.requires_grad and mask.fill is None):
            return False
        where = (line_of_call(), tuple(tensor.shape), tensor.dtype) if tensor.is_cuda else ()
        if tensor.is_cuda and not self.is_first:
            if not self._causal.get(where):
                return False
            torch._assert_async(_looks_back(mask, queries))
            return True
        found = bool(_looks_back(mask, queries))
        self._causal[where] = found and self._causal.get(where, True)
        return found


def _looks_back(mask: Mask, length: int) -> Tensor:
    """True if a mask leaves out what comes after, in each of its parts, and nothing else: one bool on its device."""
    after = torch.ones(length, length, dtype=torch.bool, device=mask.tensor.device).triu_(1)
    if mask.fill is not None:
        return (mask.left_out() == after).all()
    return torch.where(after, mask.tensor <= MASKED, mask.tensor == 0).all()


def _filled(left_out: Tensor, fill: float, dtype: torch.dtype) -> Tensor:
    least = fill if fill == -math.inf else max(fill, torch.finfo(dtype).min)
    return torch.zeros(left_out.shape, dtype=dtype, device=left_out.device).masked_fill_(left_out, least)


def is_number(value: Any) -> bool:
    """True if a value is a Python number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    """A Python number, or a tensor of one on the host."""
    if type(value) is Tensor and value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad:
        return float(value)
    return float(value) if is_number(value) else None


def mask_of(own: Tensor, name: str, args: Any) -> Mask | None:
    """The mask that a call puts on scores; None where it puts on none."""
    mask: Mask | None = None
    if name in ("masked_fill", "masked_fill_") and len(args) == 3 and args[0] is own:
        mask = Mask(args[1], _number(args[2]))
    elif name == "where" and len(args) == 3:
        shown = args[1] is own  # torch.where(mask, scores, fill), or the other way round
        mask = Mask(args[0], _number(args[2] if shown else args[1]), shows=shown)
    elif name in _SUMS and len(args) == 2:
        mask = Mask(args[1] if args[0] is own else args[0], None)
    if (
        mask is None
        or type(mask.tensor) not in (Tensor, nn.Parameter)
        or mask.tensor.device != own.device
        or not mask.tensor.dim()
    ):
        return None
    if name not in _SUMS and (mask.tensor.dtype != torch.bool or mask.fill is None or mask.fill > MASKED):
        return None
    if name in _SUMS and not mask.tensor.is_floating_point():
        return None
    shape = mask.tensor.shape
    fits = len(shape) <= own.dim() and all(
        one in (1, other) for one, other in zip(reversed(shape), reversed(own.shape), strict=False)
    )
    return mask if fits else None
