"""The targets of the joined loss: which are words, and how many count."""

from __future__ import annotations

import torch
from torch import Tensor

from trainstep.errors import UsageError
from trainstep.fused.triton.cross_entropy import launch_targets


def require_targets(ids: Tensor, n_vocab: int, ignore_index: int) -> None:
    """Raise a UsageError unless all ids (N,) are rows of the head or ignored. On a GPU the host would wait for it."""
    fits = ((ids >= 0) & (ids < n_vocab)) | (ids == ignore_index)
    if not bool(fits.all()):
        wrong = f"got {int(ids[~fits][0])}, the first of {int((~fits).sum())} others"
        raise UsageError(f"{_wanted(n_vocab, ignore_index)}; {wrong}")


def scale_of(ids: Tensor, n_vocab: int, ignore_index: int, is_mean: bool) -> Tensor:
    """What each loss is multiplied by: 1 over the number of ids (N,) that are not ignored; 1 where no mean is wanted.

    Ids that are out of range fail an assertion on the device, without making the host wait.
    """
    scale = torch.empty((), dtype=torch.float32, device=ids.device)
    fits = torch.empty((), dtype=torch.int32, device=ids.device)
    launch_targets((ids, scale, fits), n_vocab, ignore_index, is_mean)
    torch._assert_async(fits, f"{_wanted(n_vocab, ignore_index)}; at least one is another")
    return scale


def _wanted(n_vocab: int, ignore_index: int) -> str:
    return f"the fused loss takes targets from 0 to {n_vocab - 1} (the head's rows), or {ignore_index} to ignore"
