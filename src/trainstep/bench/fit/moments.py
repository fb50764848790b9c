"""The peaks of a step in which every block is computed again, moment by moment.

Moments are told apart by what the choices of a block change: what follows the last block's forward, which is the loss,
wherever a model computes it; backward before it comes to the last block; the backward of each block, from when its
output's gradient is there to when its input's is; and all else (forward, the optimizer), whose peaks no choice raises
above those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainstep.bench.step import WARMUP
from trainstep.measure.memory import LiveStorages
from trainstep.step.batches import tensors_of
from trainstep.step.blocks import find_blocks
from trainstep.step.training_step import TrainingStep, uncompiled
from trainstep.step.weights import optimizer_state_tensors

LOSS, HEAD, OTHER = "loss", "head", "other"


def measure_moments(step: TrainingStep) -> dict[str | int, int]:
    """Peaks in bytes, after `WARMUP` steps: of `LOSS`, `HEAD`, `OTHER` and of each block's backward by its index."""
    for _ in range(WARMUP):
        step(step.next_batch())
    batch = step.next_batch()
    kept = [*step.module.parameters(), *step.module.buffers(), *optimizer_state_tensors(step.optimizer)]
    live = None if step.device.type == "cuda" else LiveStorages([*kept, *tensors_of(batch)])
    meter = _Meter(step.device, live)
    with _watched(find_blocks(step.module), meter), live or nullcontext(), uncompiled() if live else nullcontext():
        meter.begin(OTHER)
        step(batch, phase=meter.phase)
        meter.begin(OTHER)
    found = 0 if live is None else live.found_bytes
    return {moment: peak + found for moment, peak in meter.peaks.items()}


class _Meter:
    """Notes the most bytes between one moment's beginning and the next's."""

    def __init__(self, device: torch.device, live: LiveStorages | None) -> None:
        self.peaks: dict[str | int, int] = defaultdict(int)
        self._device, self._live = device, live
        self._moment: str | int | None = None

    def begin(self, moment: str | int) -> None:
        peak = torch.cuda.max_memory_allocated(self._device) if self._live is None else self._live.peak
        if self._moment is not None:
            self.peaks[self._moment] = max(self.peaks[self._moment], peak)
        if self._live is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._live.peak = self._live.bytes
        self._moment = moment

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin({"loss": LOSS, "backward": HEAD}.get(name, OTHER))
        yield


@contextmanager
def _watched(blocks: list[nn.Module], meter: _Meter) -> Iterator[None]:
    """Inside, the end of the last block's forward is told, and when backward comes to each of them; outside of what is
    compiled."""
    undo = []
    for index, block in enumerate(blocks):
        place = "forward" if block._compiled_call_impl is None else "_compiled_call_impl"
        undo.append((block, place, block.__dict__.get(place)))
        is_last = index == len(blocks) - 1
        block.__dict__[place] = partial(_call, index, is_last, meter, getattr(block, place))
    try:
        yield
    finally:
        for block, place, before in undo:
            if before is None:
                del block.__dict__[place]
            else:
                block.__dict__[place] = before


def _call(index: int, is_last: bool, meter: _Meter, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    if is_last:
        meter.begin(LOSS)
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda gradient: meter.begin(index))
    return result
