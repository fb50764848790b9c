"""What every implementation demands of q, k and v (shapes: see `api.attention`), checked once, before anything runs."""

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


def prepare(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, *, as_autocast: bool = True
) -> tuple[Tensor, Tensor, Tensor, float]:
    """The inputs, as autocast casts them if `as_autocast`, and the factor on QKᵀ: the caller's, or 1/√head_dim.

    Raises TypeError for what are not floating-point tensors of one dtype, UsageError for devices or shapes that do not
    fit together and for a scale that is not finite.
    """
    _require_tensors(q, k, v)
    if as_autocast:
        q, k, v = _as_autocast(q, k, v)
    _check_dtypes_and_shapes(q, k, v)
    if scale is not None and not math.isfinite(scale):
        raise UsageError(f"scale must be a finite number, got {scale}")
    return q, k, v, 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def check_softcap(softcap: float | None) -> float | None:
    """The softcap as a float, or None. Raises UsageError for what is no finite number above 0."""
    if softcap is None:
        return None
    if not isinstance(softcap, (int, float)) or not 0 < softcap < math.inf:
        raise UsageError(f"softcap is {softcap!r}; expected a finite number above 0, or None for scores as they are")
    return float(softcap)


def check_window(q: Tensor, k: Tensor, is_causal: bool, window: int | None) -> int | None:
    """The window, or None where it hides nothing: where there is none, or it holds every key up to a query's own.

    Raises UsageError for what is no positive number of keys, without is_causal, or where a query would see no key.
    """
    if window is None:
        return None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise UsageError(f"window is {window!r}; expected how many keys a query sees, its own among them, at least 1")
    if not is_causal:
        raise UsageError(
            f"window={window} counts the keys up to a query's own, and is_causal is False; pass is_causal=True"
        )
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    if n_queries >= n_keys + window:
        raise UsageError(
            f"query {n_queries - 1} sees none of {n_keys} keys through window={window}, which ends at a query's own "
            f"position; pass as many keys as queries, or a window of at least {n_queries - n_keys + 1}"
        )
    return None if window >= n_queries else window


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
