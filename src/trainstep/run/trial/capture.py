"""What a run of a script is judged by, written to its folder: the gradients of the first update as the optimizer sees
them, the loss of every update, and how far the weights have moved at the end.

Copies are made in each optimizer's first two updates and after the last, in steps that are not timed; in between a loss
is kept on its device. A run that nobody judges copies nothing: hashing, moving and writing several times the weights
takes as long as the rest.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from trainstep.batches import tensors_of
from trainstep.bench.check.gradients import Gradients, dense
from trainstep.run.trial.in_memory import save

FIRST, END = "first.pt", "end.pt"
DIGEST = 16
"""Bytes of a checksum."""


@dataclass(frozen=True)
class Captured:
    """What one run left."""

    gradients: Gradients  # of every optimizer's first step, with the loss of the first update
    weights: str  # a checksum of what the optimizers were given to train, before their first step
    losses: tuple[float, ...]  # of each update: summed where gradients are accumulated
    moved: dict[str, Tensor]  # how far each parameter was moved in all
    first_moved: dict[str, Tensor]  # and in the first update of its optimizer
    sizes: dict[str, float]  # ‖W‖ of each before
    updates: int
    peak_gib: float | None  # on a GPU
    fixed_gib: float | None = None  # of it, what no batch changes: weights, their gradients, optimizers' states
    limit_gib: float | None = None  # what the process could have of the GPU's memory

    @property
    def what_is_not_finite(self) -> str:
        """The first loss that is no number, in words; empty where all are."""
        broken = next((number for number, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)
        return "" if broken is None else f"the loss of update {broken} is {self.losses[broken - 1]}"


class Capture:
    """Collects it in the script's process.

    Args:
        folder: where it is written; None for a run that is only timed.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._process = folder, os.getpid()
        self.roots: list[nn.Module] = []
        self._losses: list[list[Tensor]] = []
        self._closed = True  # whether the next loss begins an update
        self._seen: list[Optimizer] = []
        self._updates: list[int] = []  # of each of these
        self._names: dict[int, str] = {}  # of parameters
        self._gradients: dict[str, Tensor] = {}
        self._initial: dict[str, tuple[Tensor, Tensor]] = {}  # the parameter, and what it was
        self._first_moved: dict[str, Tensor] = {}
        self._by_optimizer: dict[int, list[str]] = {}  # optimizer's place → names whose first update is not over
        self._checksum = hashlib.blake2b(digest_size=DIGEST)
        self._is_finished = False
        self.took_s = 0.0
        """Seconds of copying and writing so far."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that have begun to step."""
        return self._seen

    def see_loss(self, tensors: Any) -> None:
        """What a backward pass begins at."""
        if self._folder is None or os.getpid() != self._process:
            return
        if self._closed:
            self._losses.append([])
            self._closed = False
        for each in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
            if isinstance(each, Tensor):
                self._losses[-1].append(each.detach().clone() if each.numel() == 1 else each.detach().sum())

    def before_optimizer(self, optimizer: Optimizer) -> int:
        """An optimizer is about to step: which of its updates that is, from 1 on; 0 in a process that was forked."""
        self._closed = True
        if os.getpid() != self._process:
            return 0
        for place, each in enumerate(self._seen):
            if each is optimizer:
                self._see_first_update(place)
                self._updates[place] += 1
                return self._updates[place]
        self._seen.append(optimizer)
        self._updates.append(1)
        if self._folder is not None:
            self._see_first_step(optimizer, self._folder)
        return 1

    def _see_first_step(self, optimizer: Optimizer, folder: Path) -> None:
        start, own = time.monotonic(), self._by_optimizer.setdefault(len(self._seen) - 1, [])
        scale = getattr(optimizer, "grad_scale", None)  # fused ones take it off themselves
        factor = 1.0 if scale is None else 1.0 / float(scale)
        for place, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                name = self._name_of(parameter, f"{len(self._seen)}.{place}.{number}")
                own.append(name)
                value = _own(parameter.detach())
                self._initial[name] = parameter, value.to("cpu", torch.float32, copy=True)
                if parameter.grad is not None:
                    gradient = dense(_own(parameter.grad.detach())).to("cpu", torch.float32, copy=True)
                    self._gradients[name] = gradient.mul_(factor)
        with ThreadPoolExecutor() as pool:
            for digest in pool.map(_digest, [self._initial[name][1] for name in own]):
                self._checksum.update(digest)
        weights = self._checksum.hexdigest()
        loss = math.fsum(float(each) for each in self._losses[0]) if self._losses else math.nan
        found = {"loss": loss, "gradients": self._gradients, "weights": weights}
        save(found, folder / FIRST, _size(self._gradients))
        self.took_s += time.monotonic() - start

    def finish(self, updates: int) -> None:
        """The script ends after so many updates."""
        if self._folder is None or self._is_finished or os.getpid() != self._process or not self._seen:
            return
        self._is_finished, start = True, time.monotonic()
        for place in list(self._by_optimizer):
            self._see_first_update(place)
        moved = {name: self._moved(name) for name in self._initial}
        found = {
            "losses": [math.fsum(float(each) for each in update) for update in self._losses],
            "moved": moved,
            "first_moved": self._first_moved,
            "sizes": {name: float(before.norm()) for name, (_, before) in self._initial.items()},
            "updates": updates,
            **self._memory(),
        }
        save(found, self._folder / END, _size(moved) + _size(self._first_moved))
        self.took_s += time.monotonic() - start

    def _memory(self) -> dict[str, float | None]:
        """The last fields of `Captured`."""
        device = next((value.device for value, _ in self._initial.values() if value.is_cuda), None)
        if device is None:
            return {"peak_gib": None, "fixed_gib": None, "limit_gib": None}
        kept = bytes_of(each for each in map(_own, self._kept()) if each.is_cuda)
        free, total = torch.cuda.mem_get_info(device)
        limit = min(
            free + torch.cuda.memory_reserved(device), total * torch.cuda.get_per_process_memory_fraction(device)
        )
        found = torch.cuda.max_memory_allocated(device), kept, limit
        return {name: each / 2**30 for name, each in zip(("peak_gib", "fixed_gib", "limit_gib"), found, strict=True)}

    def _kept(self) -> Iterator[Tensor]:
        """What is there between two steps."""
        for root in self.roots:
            yield from (each.detach() for each in (*root.parameters(), *root.buffers()))
        for value, _ in self._initial.values():
            yield value.detach()
            if value.grad is not None:
                yield value.grad.detach()
        for optimizer in self._seen:  # most keep a dict for each parameter, some a tensor for all
            yield from tensors_of(list(optimizer.state.values()))

    def _see_first_update(self, place: int) -> None:
        """An optimizer steps again, or will no more."""
        for name in self._by_optimizer.pop(place, []):
            self._first_moved[name] = self._moved(name)

    def _moved(self, name: str) -> Tensor:
        """How far a parameter is from what it was."""
        value, before = self._initial[name]
        return _own(value.detach()).to("cpu", torch.float32, copy=True).sub_(before)

    def _name_of(self, parameter: Tensor, place: str) -> str:
        """As its model calls it, the same in every run; else its place in the optimizer."""
        if not self._names:
            for number, root in enumerate(self.roots):
                for name, each in root.named_parameters():
                    short = name.replace("_orig_mod.", "").removeprefix("module.")
                    self._names.setdefault(id(each), short if number == 0 else f"{short} of model {number + 1}")
        return self._names.get(id(parameter), f"parameter {place}")


def _digest(value: Tensor) -> bytes:
    return hashlib.blake2b(value.reshape(-1).view(torch.uint8).numpy().data, digest_size=DIGEST).digest()


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(each.nbytes for each in tensors.values())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of all together, each place in memory once; what has no storage of its own is left out."""
    return sum(dict(filter(None, map(_memory_of, tensors))).values())


def _memory_of(value: Tensor) -> tuple[int, int] | None:
    """Where it lies, and its bytes; None of what has no storage of its own, such as a sparse tensor."""
    try:
        return value.data_ptr(), value.numel() * value.element_size()
    except RuntimeError:  # also NotImplementedError, of wrappers around other tensors
        return None


def _own(value: Tensor) -> Tensor:
    """This rank's part of what is spread over ranks."""
    return value.to_local() if hasattr(value, "to_local") else value


def of_all_ranks(found: Sequence[Captured]) -> Captured:
    """What the ranks of one run left, in the order of their numbers, as one.

    Where all have the same weights and gradients, as data parallel training has them, the first rank's stand for all.
    Else each rank's count by themselves: parts of the same parameters, or what went wrong.
    """
    first, *others = found
    moved = [(each.weights, each.gradients.by_name, each.moved, each.first_moved) for each in found]
    alike = all(_same(each, moved[0]) for each in moved[1:])

    def every(of: Callable[[Captured], Mapping[str, Any]]) -> dict[str, Any]:
        extra = {} if alike else {f"{name} on rank {rank}": value for rank, each in enumerate(others, 1)
                                  for name, value in of(each).items()}  # fmt: skip
        return {**of(first), **extra}

    def known(name: str) -> list[float]:
        return [value for each in found if (value := getattr(each, name)) is not None]

    return Captured(
        Gradients(
            math.fsum(each.gradients.loss for each in found) / len(found), every(lambda each: each.gradients.by_name)
        ),
        " ".join(each.weights for each in found),
        tuple(math.fsum(losses) / len(found) for losses in zip(*(each.losses for each in found), strict=False)),
        every(lambda each: each.moved),
        every(lambda each: each.first_moved),
        every(lambda each: each.sizes),
        sum(each.updates for each in found),
        max(known("peak_gib"), default=None),
        min(known("fixed_gib"), default=None),
        min(known("limit_gib"), default=None),
    )


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    (weights, *own), (expected, *theirs) = one, other
    return weights == expected and all(
        a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
        for a, b in zip(own, theirs, strict=True)
    )


def read_captured(folder: Path) -> Captured | None:
    """What a run left in its folder; None where it ended before its first update, or did not end in peace.

    Tensors are not read yet but mapped: they stay where they are, also once their files are removed.
    """
    try:
        first = torch.load(folder / FIRST, weights_only=True, mmap=True)
        end = torch.load(folder / END, weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError):
        return None
    return Captured(
        Gradients(first["loss"], first["gradients"]),
        first["weights"],
        tuple(end["losses"]),
        end["moved"],
        end["first_moved"],
        end["sizes"],
        end["updates"],
        end["peak_gib"],
        end["fixed_gib"],
        end["limit_gib"],
    )
