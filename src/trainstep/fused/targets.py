"""The targets of the joined loss: whether all are in the vocabulary, and how many count."""

from __future__ import annotations

import torch
from torch import Tensor

from trainstep.base.errors import UsageError
from trainstep.fused.triton.cross_entropy import launch_targets


def require_targets(ids: Tensor, n_vocab: int, ignore_index: int) -> None:
    """Raise a UsageError unless all ids (N,) are rows of the head or ignored. On a GPU the host would wait for it."""
    fits = ((ids >= 0) & (ids < n_vocab)) | (ids == ignore_index)
    if not bool(fits.all()):
        wrong = f"got {int(ids[~fits][0])}, the first of {int((~fits).sum())} others"
        raise UsageError(f"{_wanted(n_vocab, ignore_index)}; {wrong}")


def scales_of(ids: Tensor, n_vocab: int, ignore_index: int, is_mean: bool, dtype: torch.dtype) -> Tensor:
    """`count_targets_kernel`'s scales (3,) of ids (N,), for logits of a dtype.

    Gradients in float16 are divided by the number of targets in backward: before, small ones would have few digits. Ids
    that are out of range fail an assertion on the device, without making the host wait.
    """
    scales = torch.empty(3, dtype=torch.float32, device=ids.device)
    fits = torch.empty((), dtype=torch.int32, device=ids.device)
    launch_targets((ids, scales, fits), n_vocab, ignore_index, is_mean, dtype == torch.float16)
    torch._assert_async(fits, f"{_wanted(n_vocab, ignore_index)}; at least one is another")
    return scales


def _wanted(n_vocab: int, ignore_index: int) -> str:
    return f"the fused loss takes targets from 0 to {n_vocab - 1} (the head's rows), or {ignore_index} to ignore"
