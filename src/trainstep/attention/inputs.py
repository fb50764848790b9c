"""What every implementation demands of q, k and v, checked once, before anything runs.

Shapes
    q: (..., heads, n_queries, head_dim), (batch, n_queries, head_dim) or (n_queries, head_dim)
    k, v: the same with n_keys rows; with four or more dimensions they may have fewer heads, a divisor of q's
    (grouped-query attention: query head h reads key head h // (heads // kv_heads))
"""

import math

import torch
from torch import Tensor

from trainstep.errors import UsageError


def describe(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Shape, dtype and device of each input, for error messages."""
    return ", ".join(
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
        for name, t in (("q", q), ("k", k), ("v", v))
    )


def prepare(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor, float]:
    """The inputs as autocast casts them, checked as `check_inputs` does, and the factor on QKᵀ."""
    _require_tensors(q, k, v)
    q, k, v = _as_autocast(q, k, v)
    _check_dtypes_and_shapes(q, k, v)
    return q, k, v, resolve_scale(scale, q.shape[-1])


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError for what are not floating-point tensors of one dtype, UsageError for devices or shapes that do
    not fit together."""
    _require_tensors(q, k, v)
    _check_dtypes_and_shapes(q, k, v)


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The factor on QKᵀ: the caller's, or 1/√head_dim. Raises UsageError unless it is finite."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not math.isfinite(scale):
        raise UsageError(f"scale must be a finite number, got {scale}")
    return float(scale)


def _require_tensors(*inputs: Tensor) -> None:
    for name, t in zip("qkv", inputs, strict=True):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")


def _as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast to autocast's dtype where autocast is on, as `F.scaled_dot_product_attention` does (float64 stays)."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta tensors know no autocast
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))
    return q, k, v


def _check_dtypes_and_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise TypeError(f"q, k and v must share one floating-point dtype: got {describe(q, k, v)}")
    if not q.device == k.device == v.device:
        raise UsageError(f"q, k and v must be on one device: got {describe(q, k, v)}")
    if not (q.ndim == k.ndim == v.ndim and q.ndim >= 2):
        raise UsageError(
            "q, k and v need the same number of dimensions, at least 2, as (..., heads, length, head_dim): "
            f"got {describe(q, k, v)}"
        )
    if k.shape != v.shape:
        raise UsageError(f"k and v must have one shape: got {describe(q, k, v)}")
    if q.shape[-1] != k.shape[-1]:
        raise UsageError(f"q and k must have one head_dim (the last dimension): got {describe(q, k, v)}")
    if 0 in q.shape or 0 in k.shape:
        raise UsageError(f"every dimension must be at least 1: got {describe(q, k, v)}")

    grouped = q.ndim >= 4  # a 3-D tensor's first dimension is its batch, and batches are not shared
    matched = slice(None, -3 if grouped else -2)
    if q.shape[matched] != k.shape[matched]:
        raise UsageError(f"q and k must have the same leading (batch) dimensions: got {describe(q, k, v)}")
    if grouped and q.shape[-3] % k.shape[-3]:
        raise UsageError(
            f"q's heads must be a multiple of k's (grouped-query attention), got {q.shape[-3]} and {k.shape[-3]}: "
            f"{describe(q, k, v)}"
        )
