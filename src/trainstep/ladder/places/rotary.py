"""Rotary positions that a script writes out, q · cos + rotate_half(q) · sin, computed by our kernel in one pass.

They are found as functions of (q, k, cos, sin) in the modules that a model's classes come from, as transformers' and
most models written after it have them, and known by what they compute: one that makes anything else of small tensors
is left alone. Where tables repeat their first half in the second, feature i is paired with i + K/2, as by our kernel.
Whether they do is read until the first update; later the device checks it itself, and ends a run in which they differ.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.base.errors import UnsupportedError
from trainstep.fused import eager
from trainstep.ladder.places.uncomputed import is_transformed
from trainstep.observe.lines import line_of_call

Note = Callable[[str, str], object]
HOW = "by our kernel"


class Rotary:
    """Finds rotary positions, from `see_model` on.

    Args:
        note: called with the line of a call that was replaced, and with how.
    """

    def __init__(self, note: Note) -> None:
        self.note = note
        self.is_first = True  # whether the first update is still to come
        self._homes: set[str] = set()

    def updated(self, *_: object) -> None:
        """An optimizer has stepped."""
        self.is_first = False

    def see_model(self, module: nn.Module) -> None:
        """A model that is about to be called in training; the functions of its classes' modules are looked at."""
        for name in {type(part).__module__ for part in module.modules()} - self._homes:
            self._homes.add(name)
            home = sys.modules.get(name)
            for own, function in list(vars(home).items()) if home else []:
                if isinstance(function, FunctionType) and _turns(function):
                    setattr(home, own, _Replaced(self, function).function())


class _Replaced:
    """A function that is replaced."""

    def __init__(self, finder: Rotary, original: Callable[..., Any]) -> None:
        self._finder, self._original = finder, original
        self._is_left = False  # it was given tables that do not repeat
        self._last: list[tuple[weakref.ref[Tensor], int | None]] = []  # tables that were looked at, and their versions

    def function(self) -> Callable[..., Any]:
        """Function that takes its place."""
        original = self._original

        @functools.wraps(original)
        def turned(q: Any, k: Any, cos: Any, sin: Any, *more: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_left or more or named or not _kernel_takes(q, k, cos, sin):
                return original(q, k, cos, sin, *more, **named)
            if not self._repeat(cos, sin):
                self._is_left = True
                return original(q, k, cos, sin)
            from trainstep.fused import rope

            half, dtype = q.shape[-1] // 2, torch.promote_types(q.dtype, cos.dtype)  # of the script's own products
            return rope(q.to(dtype), k.to(dtype), cos[0, :, :half], sin[0, :, :half])

        return turned

    def _repeat(self, cos: Tensor, sin: Tensor) -> bool:
        """True if tables repeat; looked at once for all layers that are given the same ones."""
        now = [(each, _version(each)) for each in (cos, sin)]
        if self._last and all(
            known() is each and version == before and version is not None
            for (known, before), (each, version) in zip(self._last, now, strict=True)
        ):
            return True
        half = cos.shape[-1] // 2
        repeats = torch.stack([(each[..., :half] == each[..., half:]).all() for each in (cos, sin)]).all()
        if cos.is_cuda and not self._finder.is_first:
            torch._assert_async(repeats)
        elif not bool(repeats):
            return False
        self._last = [(weakref.ref(each), version) for each, version in now]
        self._finder.note(line_of_call(), HOW)
        return True


def _version(table: Tensor) -> int | None:
    """Number of times that it was changed in place; None of inference mode's tensors, of which nobody knows."""
    return None if table.is_inference() else table._version


def _turns(function: Callable[..., Any]) -> bool:
    """True if a function computes rotary positions of feature i with i + K/2, by a call of it with small tensors."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    if names[:4] != ["q", "k", "cos", "sin"]:
        return False
    return all(_turns_dtypes(function, *dtypes) for dtypes in _DTYPES)


_DTYPES = ((torch.float64, torch.float64), (torch.float32, torch.float64), (torch.float64, torch.float32))
"""Dtypes of (q, k) and of tables. Where they differ, ours come in the wider one, as products do, and some cast theirs
back."""


def _turns_dtypes(function: Callable[..., Any], dtype: torch.dtype, of_tables: torch.dtype) -> bool:
    q, k = (torch.linspace(-1, 2, heads * 48, dtype=dtype).cos().view(2, heads, 3, 8) for heads in (4, 2))
    angles = torch.linspace(0, 3, 3 * 4, dtype=of_tables).view(3, 4)
    cos, sin = angles.cos(), 1.5 * angles.sin()
    try:
        with torch.no_grad():
            found = function(q, k, *(torch.cat((each, each), -1)[None] for each in (cos, sin)))
    except Exception:  # of somebody else's: whatever it does not take, it is not this
        return False
    expected = eager.rope(*(each.double() for each in (q, k, cos, sin)))
    return (
        isinstance(found, tuple)
        and len(found) == 2
        and all(
            isinstance(own, Tensor)
            and (own.shape, own.dtype) == (other.shape, torch.float64)
            and torch.allclose(own, other, rtol=1e-9, atol=1e-12)
            for own, other in zip(found, expected, strict=True)
        )
    )


def _kernel_takes(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    given = q, k, cos, sin
    if any(type(each) is not Tensor for each in given) or is_transformed(*given):
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or not (q.numel() and k.numel()):
        return False
    alike = q.dtype == k.dtype and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:] and q.shape[3] % 2 == 0
    if not alike or cos.shape != sin.shape or cos.shape != (1, *q.shape[2:]) or cos.requires_grad or sin.requires_grad:
        return False
    try:
        from trainstep.fused.operators import require
        from trainstep.fused.rotary import MOST_SEQUENCES

        require("fused RoPE", q=q, k=k, cos=cos, sin=sin)
    except (ImportError, TypeError, UnsupportedError):  # no Triton here; float64; a CPU
        return False
    return q.shape[0] <= MOST_SEQUENCES
