"""Operators of a decoder's step that are bound by memory, each by a Triton kernel, beside its oracle.

`rope` and `linear_cross_entropy`: those that were measured to be worth it, in time or in memory. The same in plain
PyTorch are the functions of `eager`, in whatever floating-point dtype comes. Every name is imported on first use, so
the oracles work where Triton is not installed.
"""

from typing import TYPE_CHECKING

from trainstep.base.lazy import on_first_use

if TYPE_CHECKING:
    from trainstep.fused.cross_entropy import linear_cross_entropy
    from trainstep.fused.rotary import rope

__all__ = ["linear_cross_entropy", "rope"]

_HOME = {"linear_cross_entropy": "cross_entropy", "rope": "rotary"}
__getattr__, __dir__ = on_first_use(__name__, _HOME)
