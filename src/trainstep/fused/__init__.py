"""Operators of a decoder's step that are bound by memory, each as one or two Triton kernels, beside its oracle.

`rms_norm`, `add_rms_norm`, `rope`, `swiglu`, `swiglu_of`, `linear_cross_entropy` and the optimizer `AdamW`; the same in
plain PyTorch are the functions of `eager`, in whatever floating-point dtype comes. Every name is imported on first use,
so the oracles work where Triton is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep.fused.adamw import AdamW
    from trainstep.fused.cross_entropy import linear_cross_entropy
    from trainstep.fused.gating import swiglu, swiglu_of
    from trainstep.fused.norm import add_rms_norm, rms_norm
    from trainstep.fused.rotary import rope

__all__ = ["AdamW", "add_rms_norm", "linear_cross_entropy", "rms_norm", "rope", "swiglu", "swiglu_of"]

_HOME = {
    **dict.fromkeys(("rms_norm", "add_rms_norm"), "norm"),
    **dict.fromkeys(("swiglu", "swiglu_of"), "gating"),
    "rope": "rotary",
    "linear_cross_entropy": "cross_entropy",
    "AdamW": "adamw",
}
"""Name → its file."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
