"""Buffers that training changes, such as a batch norm's running statistics: are they after a pass what they should be?

Gradients do not show them: a batch norm in training reads its batch alone. So the buffers that the reference's forward
and backward changed are held against what those made of them, each by itself. ‖b − b_ref‖ is the error, relative to how
far the reference's pass moved the buffer, ‖b_ref − b_before‖. Both sides start from the same buffers, so this is the
error of the change, and shows what the norm of the value would hide: a batch norm with momentum m moves its statistics
by m of the way, and ‖b_ref‖ may be a hundred times that. One that stands still is off by 1, one that moves twice by
1 − m, one with momentum k · m by |k − 1|. The values are what is compared, not a difference of each side's own, so that
a side that began elsewhere is off, too.

What roundings do is measured, as it is for gradients. They add to that the rounding of the value in which it is stored,
which a small change of a large value is lost in, and what sums in another order make of it (`SUMS`): random roundings
average out over a batch, and the mean of inputs that are zero on average is nothing but the order of their sum. Whole
numbers, such as the count of batches, must be equal, unless the drawn roundings change them, as they do to counts of
tokens that are sent to an expert.

Not compared are buffers that the reference's pass leaves alone, that it gives another shape (a cache that grows), that
it does not make twice alike (`unlike`), those of modules that the other side does not have, and what is no plain
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trainstep.base.tolerance import SUMS
from trainstep.step.weights import copied_to_host


@dataclass(frozen=True)
class Buffers:
    """Buffers of a module after one pass; tensors are on the host."""

    before: Mapping[str, Tensor]
    """Buffers that the pass changed, as they were, by name."""
    after: Mapping[str, Tensor]
    """The same afterwards."""
    unchanged: frozenset[str]
    """Names of those that it left alone."""
    modules: frozenset[str]
    """Names of the modules that have any."""

    def without(self, names: Container[str]) -> Buffers:
        """The same, as if the pass had left these alone."""
        before, after = (
            {name: value for name, value in each.items() if name not in names} for each in (self.before, self.after)
        )
        return Buffers(before, after, self.unchanged | (self.after.keys() - after.keys()), self.modules)


NO_BUFFERS = Buffers({}, {}, frozenset(), frozenset())
"""Buffers of a module without any."""


class Watched:
    """A module's buffers as they are now.

    Args:
        module: whose.
        most: elements; larger buffers are left out.
        on_host: whether copies lie in the host's memory, not where the buffers do.
        called: by its name in the module, what a buffer is called.
    """

    def __init__(
        self,
        module: nn.Module,
        most: float = math.inf,
        *,
        on_host: bool,
        called: Callable[[str], str] = lambda name: name,
    ) -> None:
        self._module, self._most, self._on_host, self._called = module, most, on_host, called
        self.before = {name: value.to(value.device, copy=True) for name, value in self._now()}

    def _now(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self._module.named_buffers():
            if _is_plain(value) and value.numel() <= self._most:
                own = value.detach().resolve_conj()
                yield self._called(name), own.cpu() if self._on_host else own

    def changes(self, when: str = "") -> Buffers:
        """Buffers that changed since, as they are; those that were not there, or have another shape or type by now, are
        left out. `when` is added to their names."""
        now = {
            name: value
            for name, value in self._now()
            if name in self.before and _form(value) == _form(self.before[name])
        }
        changed = [name for name, value in now.items() if not _is_same(value, self.before[name])]
        before, after = (copied_to_host({name: each[name] for name in changed}) for each in (self.before, now))
        still = frozenset(f"{name}{when}" for name in now.keys() - after.keys())
        before, after = ({f"{name}{when}": value for name, value in each.items()} for each in (before, after))
        return Buffers(before, after, still, frozenset(map(_owner, self.before)))


def joined(several: Iterable[Buffers]) -> Buffers:
    """Join the buffers of several modules, which are called by different names."""
    found = NO_BUFFERS
    for each in several:
        found = Buffers(
            {**found.before, **each.before},
            {**found.after, **each.after},
            found.unchanged | each.unchanged,
            found.modules | each.modules,
        )
    return found


@dataclass(frozen=True)
class Apart:
    """Distance of one buffer from the reference's. Norms are over what is finite in the reference."""

    error: float
    """‖b − b_ref‖; infinite where there is none to compare."""
    change: float
    """‖b_ref − b_before‖."""
    count: int
    """Number of its elements."""
    stored: float | None
    """Error that one rounding of the value makes in the format in which it is stored; None for whole numbers."""
    typical: float = 0.0
    """A norm of as many elements as large as those of the module's largest buffer."""

    def rounded(self, rounding: float) -> float:
        """Error that one rounding of a precision, relative, that of the value, and sums in another order make; nothing
        for whole numbers."""
        return 0.0 if self.stored is None else rounding * self.change + self.stored + SUMS * self.typical


def apart(found: Buffers, reference: Buffers) -> Iterator[tuple[str, Apart]]:
    """Each buffer that the reference's pass changed and that the other side has, or should have, by name."""
    largest: dict[str, float] = {}
    for name, expected in reference.after.items():
        if not _is_whole(expected):
            largest[_owner(name)] = max(largest.get(_owner(name), 0.0), _norm(expected) / math.sqrt(expected.numel()))
    for name, expected in reference.after.items():
        if name in found.after:
            own = found.after[name]
        elif name in found.unchanged:
            own = reference.before[name]
        elif _owner(name) in found.modules:
            own = None
        else:
            continue
        typical = largest.get(_owner(name), 0.0) * math.sqrt(expected.numel())
        yield name, replace(_apart(own, expected, reference.before[name]), typical=typical)


def unlike(first: Buffers, second: Buffers, tolerance: float) -> frozenset[str]:
    """Names of buffers that two passes of the same step, from the same state, do not make alike.

    Args:
        tolerance: sums in another order may move them by this, relative to their change.
    """
    return frozenset(name for name, each in apart(second, first) if not each.error <= each.rounded(tolerance))


def _apart(own: Tensor | None, expected: Tensor, before: Tensor) -> Apart:
    reference, found = _wide(expected), None if own is None else _wide(own)
    is_there = reference.isfinite()
    error = math.inf
    if found is not None and found.shape == reference.shape:
        error = float(torch.where(is_there, found - reference, 0.0).norm())
    start = _wide(before).nan_to_num(posinf=0.0, neginf=0.0)  # as of a smallest number so far
    change = float(torch.where(is_there, reference - start, 0.0).norm())
    eps = [torch.finfo(each.dtype).eps for each in (own, expected) if each is not None and not _is_whole(each)]
    stored = max(eps) * _norm(expected) if eps else None
    return Apart(error, change, expected.numel(), stored)


def _norm(tensor: Tensor) -> float:
    """Over what is finite."""
    values = _wide(tensor)
    return float(torch.where(values.isfinite(), values, 0.0).norm())


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_meta)


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """To the bit: NaN is NaN."""
    a, b = (each.flatten().contiguous().view(torch.uint8) for each in (one, other))
    return torch.equal(a, b)


def _wide(tensor: Tensor) -> Tensor:
    """In float64, complex numbers as two."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()
