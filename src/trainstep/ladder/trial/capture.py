"""Captures by which a run of a script is checked, written to its folder: the gradients of the first update as the
optimizer sees them, what models made of their buffers until then, the loss of every update, how far the weights
have moved at the end, and what models made of their buffers by then.

Copies are made in each optimizer's first two updates and after the last, in steps that are not timed; in between a loss
is kept on its device. A run that nobody judges copies nothing: hashing, moving and writing several times the weights
takes as long as the rest.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from trainstep.check.buffers import NO_BUFFERS, Buffers, Watched, joined
from trainstep.check.gradients import Gradients, dense
from trainstep.check.parts import norm
from trainstep.ladder.trial.in_memory import make_room
from trainstep.ladder.trial.shown import Shown
from trainstep.step.batches import tensors_of

FILE = "captured"
GRADIENTS, MOVED, FIRST_MOVED = GROUPS = "gradients", "moved", "first_moved"
BEFORE, AFTER = "shown before", "shown after"
LARGEST_BUFFER = 2**20
"""Elements of the largest that is looked at: masks and tables may be larger than weights, and do not change."""
DIGEST = 16
"""Bytes of a checksum."""


@dataclass(frozen=True)
class Captured:
    """Captures that one run left."""

    gradients: Gradients  # of every optimizer's first step, with the loss of the first update
    weights: str  # a checksum of what the optimizers were given to train, before their first step
    losses: tuple[float, ...]  # of each update: summed where gradients are accumulated
    moved: dict[str, Tensor]  # how far each parameter was moved in all
    first_moved: dict[str, Tensor]  # and in the first update of its optimizer
    sizes: dict[str, float]  # ‖W‖ of each before
    updates: int
    peak_gib: float | None  # on a GPU
    shown: Buffers = NO_BUFFERS  # buffers at the first update and at the end, and what `shown.Shown` has
    said: Mapping[str, str] = field(default_factory=dict)  # what must be equal, in words: the modes of calls, dropout
    files: frozenset[str] = frozenset()  # names of those that it wrote into its copy of the folder

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
        self._watched: list[Watched] = []
        self._losses: list[list[Tensor]] = []
        self._closed = True  # whether the next loss begins an update
        self._seen: list[Optimizer] = []
        self._updates: list[int] = []  # of each of these
        self._names: dict[int, str] = {}  # of parameters
        self._file: TensorFile | None = None
        self._buffers: list[Buffers] = []  # what became of them until the first step
        self._initial: dict[str, tuple[Tensor, Tensor]] = {}  # the parameter, and what it was, in the place of `MOVED`
        self._first_moved: dict[str, Tensor] = {}
        self._by_optimizer: dict[int, list[str]] = {}  # optimizer's place → names whose first update is not over
        self._checksum = hashlib.blake2b(digest_size=DIGEST)
        self._is_finished = False
        self.shown = Shown()
        self.took_s = 0.0
        """Seconds of copying and writing so far."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that have begun to step."""
        return self._seen

    def see_model(self, root: nn.Module) -> None:
        """A model is about to be called in training for the first time."""
        self.roots.append(root)
        if self._folder is None or os.getpid() != self._process:
            return
        start = time.monotonic()
        prefix = f"model {len(self.roots)}." if len(self.roots) > 1 else ""
        self._watched.append(
            Watched(root, LARGEST_BUFFER, on_host=True, called=lambda name: prefix + _without_wrappers(name))
        )
        self.took_s += time.monotonic() - start

    def see_loss(self, tensors: Any) -> None:
        """See the loss that a backward pass begins at."""
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
            start = time.monotonic()
            self._see_first_step(optimizer, self._folder)
            self.took_s += time.monotonic() - start
        return 1

    def _see_first_step(self, optimizer: Optimizer, folder: Path) -> None:
        named = {
            self._name_of(parameter, f"{len(self._seen)}.{place}.{number}"): parameter
            for place, group in enumerate(optimizer.param_groups)
            for number, parameter in enumerate(group["params"])
        }
        values = {name: _own(parameter.detach()) for name, parameter in named.items()}
        gradients = {name: dense(_own(each.grad.detach())) for name, each in named.items() if each.grad is not None}
        shapes = {name: value.shape for name, value in values.items()}
        if self._file is None:
            known = {id(each): each for root in self.roots for each in root.parameters()}
            known |= {id(each): each for each in named.values()}
            numbers = sum(_own(each.detach()).numel() for each in known.values())  # other optimizers may come
            make_room(folder / FILE, (len(GROUPS) + 2) * torch.float32.itemsize * numbers)
            self._file = TensorFile(folder / FILE)
            self._buffers = [each.changes(" in the first update") for each in self._watched]
        scale = getattr(optimizer, "grad_scale", None)  # fused ones take it off themselves
        factor = 1.0 if scale is None else 1.0 / float(scale)
        for name, place in self._file.add(GRADIENTS, {name: each.shape for name, each in gradients.items()}).items():
            place.copy_(gradients[name]).mul_(factor)
        before = self._file.add(MOVED, shapes)
        for name, place in before.items():
            place.copy_(values[name])
            self._initial[name] = named[name], place
        with ThreadPoolExecutor() as pool:
            for digest in pool.map(_digest, before.values()):
                self._checksum.update(digest)
        self._first_moved |= self._file.add(FIRST_MOVED, shapes)
        self._by_optimizer[len(self._seen) - 1] = list(named)
        self.shown.hold(self.roots, self._initial, self._no_copies())

    def finish(self, updates: int, said: Mapping[str, str] = {}) -> None:
        """The script ends after so many updates; `said` must be equal in other runs."""
        if self._folder is None or self._is_finished or os.getpid() != self._process or not self._seen:
            return
        self._is_finished, start = True, time.monotonic()
        for place in list(self._by_optimizer):
            self._see_first_update(place)
        assert self._file is not None, "an optimizer was seen"
        ended = [each.changes(" at the end") for each in self._watched]
        shown = joined([*self._buffers, *ended, self.shown.found(self.roots, self._initial, self._no_copies())])
        _add(self._file, BEFORE, shown.before)
        _add(self._file, AFTER, shown.after)
        sizes = {name: norm(before) for name, (_, before) in self._initial.items()}
        found = torch.empty(max((before.numel() for _, before in self._initial.values()), default=0))
        for name, (_, before) in self._initial.items():
            before.copy_(self._put_moved(name, found[: before.numel()].view_as(before)))
        losses = [math.fsum(float(each) for each in update) for update in self._losses]
        own = {"loss": losses[0] if losses else math.nan, "weights": self._checksum.hexdigest(), "losses": losses}
        own |= {"unchanged": sorted(shown.unchanged), "modules": sorted(shown.modules)}
        own |= {"sizes": sizes, "updates": updates, "said": {"calls of models": self.shown.modes, **said}}
        device = next((value.device for value, _ in self._initial.values() if value.is_cuda), None)
        own["peak_gib"] = None if device is None else torch.cuda.max_memory_allocated(device) / 2**30
        self._file.finish(own)
        self.took_s += time.monotonic() - start

    def _kept(self) -> Iterator[Tensor]:
        """Tensors that are there between two steps."""
        for root in self.roots:
            yield from (each.detach() for each in (*root.parameters(), *root.buffers()))
        for value, _ in self._initial.values():
            yield value.detach()
            if value.grad is not None:
                yield value.grad.detach()
        for optimizer in self._seen:  # most keep a dict for each parameter, some a tensor for all
            yield from tensors_of(list(optimizer.state.values()))

    def _no_copies(self) -> list[Tensor]:
        """Tensors that are no copies of the weights: of training, and of this."""
        own = [*self._first_moved.values(), *(before for _, before in self._initial.values())]
        return [*self._kept(), *own, *(value for each in self._watched for value in each.before.values())]

    def _see_first_update(self, place: int) -> None:
        """An optimizer steps again, or will no more."""
        for name in self._by_optimizer.pop(place, []):
            self._put_moved(name, self._first_moved[name])

    def _put_moved(self, name: str, out: Tensor) -> Tensor:
        """Put the distance of a parameter from what it was."""
        value, before = self._initial[name]
        return out.copy_(_own(value.detach())).sub_(before)

    def _name_of(self, parameter: Tensor, place: str) -> str:
        """Name of a parameter in its model, the same in every run; else its place in the optimizer."""
        if not self._names:
            for number, root in enumerate(self.roots):
                for name, each in root.named_parameters():
                    short = _without_wrappers(name)
                    self._names.setdefault(id(each), short if number == 0 else f"{short} of model {number + 1}")
        return self._names.get(id(parameter), f"parameter {place}")


def _without_wrappers(name: str) -> str:
    """Name in the model that is compiled or wrapped."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _add(file: TensorFile, group: str, tensors: Mapping[str, Tensor]) -> None:
    for dtype in {each.dtype for each in tensors.values()}:
        shapes = {name: each.shape for name, each in tensors.items() if each.dtype == dtype}
        for name, place in file.add(group, shapes, dtype).items():
            place.copy_(tensors[name])


def _digest(value: Tensor) -> bytes:
    return hashlib.blake2b(value.reshape(-1).view(torch.uint8).numpy().data, digest_size=DIGEST).digest()


def _own(value: Tensor) -> Tensor:
    """This rank's part of what is spread over ranks."""
    return value.to_local() if hasattr(value, "to_local") else value


def of_all_ranks(found: Sequence[Captured]) -> Captured:
    """Captures of the ranks of one run, in the order of their numbers, as one.

    Where all have the same weights and gradients, as data parallel training has them, the first rank's stand for all.
    Else each rank's count by themselves: parts of the same parameters, or what went wrong. Buffers are the first
    rank's.
    """
    first, *others = found
    moved = [(each.weights, each.gradients.by_name, each.moved, each.first_moved) for each in found]
    alike = all(_same(each, moved[0]) for each in moved[1:])

    def every(of: Callable[[Captured], Mapping[str, Any]]) -> dict[str, Any]:
        extra = {} if alike else {f"{name} on rank {rank}": value for rank, each in enumerate(others, 1)
                                  for name, value in of(each).items()}  # fmt: skip
        return {**of(first), **extra}

    return Captured(
        Gradients(
            math.fsum(each.gradients.loss for each in found) / len(found),
            every(lambda each: each.gradients.by_name),
        ),
        " ".join(each.weights for each in found),
        tuple(math.fsum(losses) / len(found) for losses in zip(*(each.losses for each in found), strict=False)),
        every(lambda each: each.moved),
        every(lambda each: each.first_moved),
        every(lambda each: each.sizes),
        sum(each.updates for each in found),
        max((each.peak_gib for each in found if each.peak_gib is not None), default=None),
        *(first.shown, first.said),
    )


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    (weights, *own), (expected, *theirs) = one, other
    return weights == expected and all(
        a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
        for a, b in zip(own, theirs, strict=True)
    )


def same_training(one: Captured, other: Captured) -> bool:
    """True if two runs computed the same, bit for bit."""
    parts = [(each.weights, each.gradients.by_name, each.moved, each.first_moved) for each in (one, other)]
    return one.losses == other.losses and one.said == other.said and _same(parts[0], parts[1])


def read_captured(folder: Path) -> Captured | None:
    """Captures that a run left in its folder; None where it ended before its first update, or did not end in peace.

    Tensors are not read yet but mapped: they stay where they are, also once their file is removed.
    """
    try:
        groups, facts = read(folder / FILE)
    except (OSError, ValueError):
        return None
    gradients, moved, first_moved = (groups.get(name, {}) for name in GROUPS)
    facts |= {"losses": tuple(facts["losses"]), "moved": moved, "first_moved": first_moved}
    unchanged, modules = (frozenset(facts.pop(name)) for name in ("unchanged", "modules"))
    shown = Buffers(groups.get(BEFORE, {}), groups.get(AFTER, {}), unchanged, modules)
    return Captured(Gradients(facts.pop("loss"), gradients), shown=shown, **facts)


# A file of tensors that are filled where they lie, mapped by whoever writes it and by whoever reads it.
#
# Each group of tensors is a stretch of the file that begins at a page. What is known at the end, and where all tensors
# are, comes last, as JSON; a file without that end is not whole. A copy of several times a model's weights is made once
# so: `torch.save` needs it in other memory first, and new memory takes longer than what is put there.
ENDING = b"trainstep tensors"
_LENGTH = 8  # bytes in which the JSON's length is told


class TensorFile:
    """Written group by group.

    Args:
        path: a file or a link to one; what was there is gone.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("w+b")
        self._end = 0
        self._index: dict[str, dict[str, tuple[int, Sequence[int], str]]] = {}  # group → name → start, shape, dtype

    def add(
        self, group: str, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        """Zeros of these shapes, which are the file's content whatever is written into them. A group may be added to,
        in another dtype too; of equal names in it the last counts.

        Raises:
            OSError: there is no room.
        """
        start = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        counts = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        size = dtype.itemsize * sum(counts.values())
        if size:
            _reserve(self._file.fileno(), start, size)
            whole = torch.from_file(str(self._path), shared=True, size=start + size, dtype=torch.uint8)
            flat = whole[start:].view(dtype)
        else:
            flat = torch.empty(0, dtype=dtype)
        self._end, first, found = start + size, 0, {}
        for name, count in counts.items():
            found[name] = flat[first : first + count].view(tuple(shapes[name]))
            place = start + first * dtype.itemsize, tuple(shapes[name]), str(dtype).removeprefix("torch.")
            self._index.setdefault(group, {})[name] = place
            first += count
        return found

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Write its end, with what JSON can say."""
        said = json.dumps({"facts": facts, "index": self._index}).encode()
        self._file.seek(self._end)
        self._file.write(said + len(said).to_bytes(_LENGTH, "little") + ENDING)
        self._file.close()


def _reserve(descriptor: int, start: int, size: int) -> None:
    """Reserve the space of what is mapped: a full disk would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, size)
    else:
        os.ftruncate(descriptor, start + size)


def read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Groups and facts of a file. Tensors are mapped, not read: they stay when the file is removed.

    Raises:
        OSError: there is none.
        ValueError: it is not whole.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        tail = _LENGTH + len(ENDING)
        file.seek(max(size - tail, 0))
        length, ending = file.read(_LENGTH), file.read()
        if ending != ENDING:
            raise ValueError(f"{path} has no end: whoever wrote it did not come to that")
        file.seek(size - tail - int.from_bytes(length, "little"))
        content = json.loads(file.read(int.from_bytes(length, "little")))
    flat = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    def there(start: int, shape: Sequence[int], name: str) -> Tensor:
        dtype: torch.dtype = getattr(torch, name)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        return flat[start:end].view(dtype).view(tuple(shape)) if end > start else torch.empty(tuple(shape), dtype=dtype)

    groups = {
        group: {name: there(*place) for name, place in every.items()} for group, every in content["index"].items()
    }
    return groups, content["facts"]
