"""Demands of every implementation on q, k and v (shapes: see `api.attention`), checked once, before anything runs."""

import torch
from torch import Tensor

from trainstep.base.errors import UsageError


def describe(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Shape, dtype and device of each input, for error messages."""
    return ", ".join(
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
        for name, t in (("q", q), ("k", k), ("v", v))
    )


def prepare(q: Tensor, k: Tensor, v: Tensor, *, as_autocast: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs, as autocast casts them if `as_autocast`.

    Raises TypeError for what are not floating-point tensors of one dtype, UsageError for devices or shapes that do not
    fit together.
    """
    _require_tensors(q, k, v)
    if as_autocast:
        q, k, v = _as_autocast(q, k, v)
    _check_dtypes_and_shapes(q, k, v)
    return q, k, v


def _require_tensors(*inputs: Tensor) -> None:
    for name, t in zip("qkv", inputs, strict=True):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")


def _as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta tensors know no autocast
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in (q, k, v))
    return q, k, v


def _check_dtypes_and_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise TypeError(f"q, k and v must share one floating-point dtype: got {describe(q, k, v)}")
    if misfit := _misfit(q, k, v):
        raise UsageError(f"{misfit}: got {describe(q, k, v)}")
    if q.ndim >= 4 and q.shape[-3] % k.shape[-3]:
        raise UsageError(
            f"q's heads must be a multiple of k's (grouped-query attention), got {q.shape[-3]} and {k.shape[-3]}: "
            f"{describe(q, k, v)}"
        )


def _misfit(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if not q.device == k.device == v.device:
        return "q, k and v must be on one device"
    if not (q.ndim == k.ndim == v.ndim and q.ndim >= 2):
        return "q, k and v need the same number of dimensions, at least 2, as (..., heads, length, head_dim)"
    if k.shape != v.shape:
        return "k and v must have one shape"
    if q.shape[-1] != k.shape[-1]:
        return "q and k must have one head_dim (the last dimension)"
    if 0 in q.shape or 0 in k.shape:
        return "every dimension must be at least 1"
    batch = slice(None, -3 if q.ndim >= 4 else -2)  # a 3-D tensor's first dimension is its batch, which is not shared
    return None if q.shape[batch] == k.shape[batch] else "q and k must have the same leading (batch) dimensions"


def four_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """All as (batch, heads, length, head_dim), with 1 for what is missing, and whether key heads are shared."""
    q, k, v = (t.flatten(0, -4) if t.ndim > 4 else t[(None,) * (4 - t.ndim)] for t in (q, k, v))
    return q, k, v, q.shape[1] != k.shape[1]
