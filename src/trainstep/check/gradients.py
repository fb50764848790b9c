"""Distance of a loss and gradients from a reference, and how far rounding may take them: per parameter and per row.

Three things are held against the reference, each by what the plain computation in the same precision is off by
(`Rounding`): every parameter's gradient, and every row of it, by ‖x − ref‖; all gradients together also by their scale,
⟨x, ref⟩ / ⟨ref, ref⟩. Norms find what is wrong somewhere, rows what is wrong in one place of a large matrix. Rounding
hits the elements independently, so it leaves the scale alone, and a factor that norms would allow shows there. A row
may be as far off as the worst row of its parameter was in the plain computation: which row that is, chance decides.

On top come `headroom` and the rule of every check, twice the plain error plus one rounding (`base.tolerance`).

Buffers that the pass changes are held against the reference's in the same way (`check.buffers`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from trainstep.base.errors import UsageError
from trainstep.base.tolerance import FLOAT32_ROUNDOFF, ROWS, headroom, larger
from trainstep.check.buffers import NO_BUFFERS, Buffers, apart
from trainstep.check.parts import as_rows, in_parts, norm
from trainstep.check.verdict import Deviation
from trainstep.step.weights import copied_to_host


@dataclass(frozen=True)
class Gradients:
    """Loss and gradients of one batch, in float32, and what its pass made of buffers."""

    loss: float
    by_name: Mapping[str, Tensor]
    buffers: Buffers = NO_BUFFERS
    """Buffers of the module after the pass, where they are compared."""
    drew: bool = False
    """True if the pass drew from torch's generators."""

    @staticmethod
    def of(loss: Tensor | float, module: nn.Module, buffers: Buffers = NO_BUFFERS, drew: bool = False) -> Gradients:
        """Take the gradients that backward left in the module's `.grad`; they are taken off it, not copied."""
        by_name = {}
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                by_name[name], parameter.grad = dense(parameter.grad).float(), None
        return Gradients(float(loss), by_name, buffers, drew)

    def on_host(self) -> Gradients:
        """The same in the host's memory."""
        moved = replace(self, by_name=copied_to_host(self.by_name))
        vars(moved).update(squares=self.squares, rows=self.rows)  # taken where that is fast
        return moved

    def on(self, device: torch.device) -> Gradients:
        """The same on this device; what is there already is not copied."""
        return replace(self, by_name={name: each.to(device) for name, each in self.by_name.items()})

    @cached_property
    def rows(self) -> Mapping[str, Tensor]:
        """‖row‖ of each slice along the first dimension."""
        return {name: torch.linalg.vector_norm(as_rows(each), dim=1).cpu() for name, each in self.by_name.items()}

    @cached_property
    def squares(self) -> Mapping[str, float]:
        """‖g‖² of each."""
        return {name: norm(each) ** 2 for name, each in self.by_name.items()}

    def sketched(self) -> Gradients:
        """The same, on the host, each row of a matrix by one number: its product with random signs, the same for all
        rows. Of rows that differ by E that is off by ‖E‖ in the root mean square."""
        products = {
            name: as_rows(each) @ _signs(each) if each.dim() > 1 else each for name, each in self.by_name.items()
        }
        return replace(self, by_name=copied_to_host(products))

    def check_finite(self, precision: str, *, trained: bool = False) -> None:
        """Raise UsageError where the loss or a gradient, computed in `precision`, is not finite.

        Args:
            trained: they are not of the initial weights.
        """
        broken = [name for name, gradient in self.by_name.items() if not gradient.isfinite().all()]
        if not math.isfinite(self.loss) or broken:
            where = f", the gradient of {broken[0]} is not finite" if broken else ""
            which = "a batch after some training" if trained else "the first batch"
            look = "the optimizer and its learning rate" if trained else "the batch, the loss and the initial weights"
            raise UsageError(
                f"in {precision}, the loss of {which} is {self.loss:.4g}{where}: there is nothing to hold other "
                f"settings against; look at {look}"
            )


def _signs(gradient: Tensor) -> Tensor:
    count = as_rows(gradient).shape[1]
    return (torch.randint(2, (count,), generator=torch.Generator().manual_seed(count)) * 2.0 - 1).to(gradient.device)


@dataclass(frozen=True)
class Error:
    """Error of one gradient: absolute, as norms."""

    norm: float
    rows: Tensor
    """Errors of each slice along the first dimension; one element for a vector, whose elements are too few to check
    alone."""
    product: float = 0.0
    """⟨x − ref, ref⟩."""

    @staticmethod
    def between(found: Tensor, reference: Tensor) -> Error:
        """Error of one tensor, held against another of its shape, which is moved to its device."""
        product = 0.0
        squares = torch.zeros(len(as_rows(found)), dtype=torch.float64, device=found.device)
        for rows, (own, expected) in in_parts(found, reference.to(found.device)):
            difference = own - expected
            product += float((difference * expected).sum(dtype=torch.float64))
            squares[rows] += torch.linalg.vector_norm(difference, dim=1, dtype=torch.float64).square()
        return Error(math.sqrt(squares.sum()), squares.sqrt().float().cpu(), product)


@dataclass
class Rounding:
    """The most that rounding did to a loss, gradients and buffers, over everything it was measured on."""

    loss: float = 0.0
    scale: float = 0.0
    by_name: dict[str, Error] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)
    """Errors of the buffers, as `Apart.error`."""

    @staticmethod
    def between(a: Gradients, b: Gradients) -> Rounding:
        """Difference between `a` and `b`; a gradient that only one of them has is left out."""
        errors = {name: Error.between(a.by_name[name], each) for name, each in b.by_name.items() if name in a.by_name}
        product, square = sum(each.product for each in errors.values()), sum(b.squares.values())
        buffers = {name: each.error for name, each in apart(a.buffers, b.buffers)}
        return Rounding(abs(a.loss - b.loss), abs(product / square) if square else 0.0, errors, buffers)

    @staticmethod
    def most(several: Iterable[Rounding]) -> Rounding:
        """The largest of each; what is no number is infinite."""
        found = Rounding()
        for one in several:
            found.loss, found.scale = larger(found.loss, one.loss), larger(found.scale, one.scale)
            for name, error in one.by_name.items():
                known = found.by_name.get(name, error)
                rows = torch.maximum(known.rows, error.rows).nan_to_num(nan=math.inf, posinf=math.inf)
                found.by_name[name] = Error(larger(known.norm, error.norm), rows)
            for name, off in one.buffers.items():
                found.buffers[name] = larger(found.buffers.get(name, 0.0), off)
        return found

    def plus(self, other: Rounding) -> Rounding:
        """Rounding of both, one after the other, at most."""
        errors = dict(self.by_name)
        for name, error in other.by_name.items():
            known = errors.get(name)
            errors[name] = error if known is None else Error(known.norm + error.norm, known.rows + error.rows)
        names = self.buffers.keys() | other.buffers.keys()
        buffers = {name: self.buffers.get(name, 0.0) + other.buffers.get(name, 0.0) for name in names}
        return Rounding(self.loss + other.loss, self.scale + other.scale, errors, buffers)

    def relative(self, to: Gradients) -> float:
        """Rounding of all gradients together, as a part of these."""
        size = math.sqrt(sum(to.squares.values()))
        return math.sqrt(sum(each.norm**2 for each in self.by_name.values())) / (size or 1.0)

    def times(self, factor: float) -> Rounding:
        """All of it, larger."""
        errors = {name: Error(factor * each.norm, factor * each.rows) for name, each in self.by_name.items()}
        buffers = {name: factor * off for name, off in self.buffers.items()}
        return Rounding(factor * self.loss, factor * self.scale, errors, buffers)


def compare(found: Gradients, reference: Gradients, plain: Rounding, rounding: float) -> Deviation:
    """Hold loss, gradients and buffers against the reference's; a gradient that one side lacks is off by its norm.

    Args:
        plain: what the plain computation in the same precision is off by.
        rounding: one rounding of that precision, relative. Gradients that the mathematics makes zero, such as that of
            a key projection's bias, are nothing but rounding, so that no gradient counts as smaller than `rounding`
            times as many typical elements.
    """
    elements = sum(gradient.numel() for gradient in reference.by_name.values())
    square = sum(reference.squares.values())
    typical = math.sqrt(square / elements) if elements else 0.0
    error_square = allowed_square = product = 0.0
    worst = (0.0, 0.0, 1.0, "")  # share of what is allowed, error, allowed, name
    for name in sorted(reference.by_name.keys() | found.by_name.keys()):
        expected, own = reference.by_name.get(name), found.by_name.get(name)
        if expected is None or own is None:
            alone = own if expected is None else expected
            assert alone is not None
            error_square += norm(alone) ** 2
            product -= reference.squares.get(name, 0.0)
            worst = max(worst, (math.inf, 1.0, 0.0, name))
            continue
        error, known = Error.between(own, expected), plain.by_name.get(name)
        length, count = math.sqrt(reference.squares[name]), expected.numel()
        product += error.product
        floor = rounding * typical
        size = max(length, floor * math.sqrt(count))
        usual = known.norm if known else 0.0
        allowed = 2 * headroom(count) * usual + rounding * size
        error_square, allowed_square = error_square + error.norm**2, allowed_square + usual**2
        worst = max(worst, _share(error.norm, allowed, size, name), key=_nan_first)
        if known is not None and error.rows.numel() > 1:
            sizes = reference.rows[name].clamp(
                min=max(length / math.sqrt(len(error.rows)), floor * math.sqrt(count / len(error.rows)))
            )
            usual_rows = max(usual / size if size else 0.0, float((known.rows / sizes).nan_to_num().max())) * sizes
            most = ROWS * 2 * headroom(count / len(error.rows)) * usual_rows + rounding * sizes
            row = int((error.rows / most).argmax())  # NaN counts as the largest
            place = f"row {row} of {name}"
            worst = max(
                worst, _share(float(error.rows[row]), float(most[row]), float(sizes[row]), place), key=_nan_first
            )
    for name, buffer in apart(found.buffers, reference.buffers):
        allowed = 2 * headroom(buffer.count) * plain.buffers.get(name, 0.0) + buffer.rounded(rounding)
        worst = max(worst, _share(buffer.error, allowed, buffer.change or 1.0, f"buffer {name}"), key=_nan_first)
    size, loss_size = math.sqrt(square), abs(reference.loss) or 1.0
    # What rounding does to a loss is not known more exactly than its last place.
    usual_loss = max(plain.loss / loss_size, FLOAT32_ROUNDOFF)
    _, worst_error, worst_allowed, worst_name = worst
    return Deviation(
        loss=abs(found.loss - reference.loss) / loss_size,
        loss_allowed=2 * headroom(1) * usual_loss + rounding,
        gradient=math.sqrt(error_square) / size if size else math.inf,
        gradient_allowed=2 * math.sqrt(allowed_square) / size + rounding if size else 0.0,
        scale=abs(product / square) if square else 0.0,
        scale_allowed=2 * headroom(1) * plain.scale + rounding / 2,
        worst=worst_error,
        worst_allowed=worst_allowed,
        worst_name=worst_name,
    )


def _share(error: float, allowed: float, size: float, name: str) -> tuple[float, float, float, str]:
    if not allowed:
        return (math.inf, math.inf, 0.0, name) if error else (0.0, 0.0, 0.0, name)
    return error / allowed, error / size, allowed / size, name


def _nan_first(share: tuple[float, float, float, str]) -> float:
    return math.inf if math.isnan(share[0]) else share[0]


def dense(gradient: Tensor) -> Tensor:
    """An embedding's gradient may be sparse."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
