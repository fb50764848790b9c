"""A feed-forward layer on N GPUs: FLOPs, bytes, seconds, and the most GPUs before communication takes longer.

    python -m examples.feed_forward --layer 524288 4096 11008 989e12 450e9 --gpus 64    # B, D, F, C and W

The layer has m matrices: m − 1 of D × F, whose results are multiplied, and one of F × D. SwiGLU has three, a plain
feed-forward two. B tokens, everything in two bytes per element, C FLOP/s of a GPU, W bytes/s that it sends, α = C / W.

    axis             FLOPs of a GPU, forward   sends, forward                     sends, backward
    data             2·m·B·D·F / N             nothing                            all-reduce of 2·m·D·F bytes
    fsdp             2·m·B·D·F / N             all-gather of 2·m·D·F              the same, and a reduce-scatter
    tensor           2·m·B·D·F / N             all-reduce of 2·B·D                all-reduce of 2·B·D
    fsdp × tensor    2·m·B·D·F / (X·Y)         fsdp of 2·m·D·F / Y, tensor of 2·(B/X)·D

Backward computes twice the FLOPs. notebook/theory.md derives the limits and has the equations of backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import tyro

from trainstep.base.errors import UsageError
from trainstep.plan.limits import data_axis_tokens, intensity, tensor_axis_ranks
from trainstep.report.formats import to_markdown
from trainstep.report.numbers import number
from trainstep.report.tables import Table, text_table

OVERLAPPED, IN_TURN = "fsdp × tensor, overlapped", "fsdp × tensor, one after the other"
AXES = ("data", "fsdp", "tensor", OVERLAPPED, IN_TURN)
Phase = Literal["forward", "backward"]
PRODUCTS: dict[Phase, int] = {"forward": 1, "backward": 2}
"""Products of each matrix: backward has one for its gradient and one for that of its input."""
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class FeedForward:
    """The layer and the rates of a GPU.

    Raises:
        UsageError: a number that is not between 0 and 1e20, or fewer than two matrices.
    """

    tokens: float  # B, of all GPUs
    d_model: float  # D
    d_ff: float  # F
    flops_per_s: float  # C
    bytes_per_s: float  # W
    matrices: int = 3  # m

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < 1e20:
                raise UsageError(f"{name} is {value:g}; expected a positive number, below 1e20")
        if self.matrices < 2:
            raise UsageError(f"matrices is {self.matrices}; expected 2 or more: one in and one out")

    def flops(self, phase: Phase, gpus: float) -> float:
        """FLOPs of each GPU."""
        return PRODUCTS[phase] * 2 * self.matrices * self.tokens * self.d_model * self.d_ff / gpus

    def sent(self, axis: str, phase: Phase, data: float, tensor: float) -> tuple[float, float]:
        """Bytes that each GPU of a mesh sends: (weights and their gradients, activations and theirs)."""
        weights = ELEMENT_BYTES * self.matrices * self.d_model * self.d_ff / tensor
        activations = ELEMENT_BYTES * self.tokens / data * self.d_model
        forward = 0 if axis == "data" else 1  # an all-gather. Backward: an all-reduce, or a gather and a reduce-scatter
        rounds = forward if phase == "forward" else 2
        return rounds * (data - 1) * weights / data, 2 * (tensor - 1) * activations / tensor

    def compute_s(self, phase: Phase, gpus: float) -> float:
        """Seconds of the products alone."""
        return self.flops(phase, gpus) / self.flops_per_s

    def communication_s(self, axis: str, phase: Phase, data: float, tensor: float) -> float:
        """Seconds of communication. The two kinds run at once, or one after the other, as the axis says."""
        together = max if axis == OVERLAPPED else sum
        return together(self.sent(axis, phase, data, tensor)) / self.bytes_per_s

    def limit(self, axis: str, phase: Phase) -> float | None:
        """N of long rings, (N − 1)/N = 1, at which communication takes as long; None where nothing is sent."""
        d, t = self._alone(phase)
        whole = {"data": None if phase == "forward" else d, "fsdp": d, "tensor": t, OVERLAPPED: d * t}
        return whole.get(axis, d * t / 4)

    def formula(self, axis: str, phase: Phase) -> str | None:
        """The limit as a formula, such as 3F/2α."""
        if self.limit(axis, phase) is None:
            return None
        if axis in ("data", "fsdp"):
            return "B/α"
        share = Fraction(PRODUCTS[phase] * self.matrices, 8 if axis == IN_TURN else 2)
        above, below = (str(each) if each > 1 else "" for each in (share.numerator, share.denominator))
        return f"{above}F/{below}α" if axis == "tensor" else f"{above}BF/{below}α²"

    def most_gpus(self, axis: str, phase: Phase) -> float | None:
        """N of rings as long as they are. Axes of the mesh are not rounded.

        A ring of n sends (n − 1)/n, so each axis goes to 1 + its limit. One after the other the limit is
        (X − 1)/d + (Y − 1)/t = 1 for d and t of each axis alone, and X·Y is largest at X = (d + 1 + d/t)/2.
        """
        (d, t), limit = self._alone(phase), self.limit(axis, phase)
        if axis == OVERLAPPED:
            return (1 + d) * (1 + t)
        if axis == IN_TURN:
            x = min(max(1.0, (d + 1 + d / t) / 2), 1 + d)
            return x * (1 + t * (1 - (x - 1) / d))
        return None if limit is None else 1 + limit

    def mesh(self, axis: str, gpus: int, tensor: int | None) -> tuple[int, int]:
        """(X, Y) of so many GPUs. In a mesh Y is `tensor`, by default the one with the least communication in forward.

        Raises:
            UsageError: the GPUs do not divide by `tensor`.
        """
        if axis not in (OVERLAPPED, IN_TURN):
            return (1, gpus) if axis == "tensor" else (gpus, 1)
        if tensor is not None and (tensor < 1 or gpus % tensor):
            raise UsageError(f"{gpus} GPUs do not divide into a mesh with tensor parallelism of {tensor}")
        sizes = [each for each in range(1, gpus + 1) if gpus % each == 0] if tensor is None else [tensor]
        return min(
            ((gpus // each, each) for each in sizes), key=lambda mesh: self.communication_s(axis, "forward", *mesh)
        )

    def _alone(self, phase: Phase) -> tuple[float, float]:
        """(d, t): the limits of fsdp and of tensor parallelism, from those that `plan.limits` has for two matrices."""
        alpha = intensity(self.flops_per_s, self.bytes_per_s)
        as_two = PRODUCTS[phase] * self.matrices / 2 * self.d_ff
        return self.tokens / data_axis_tokens(alpha), tensor_axis_ranks(alpha, as_two)


COLUMNS = (
    *("axis", "pass", "mesh", "TFLOP", "sent (MB)", "computing (ms)", "communicating (ms)", "limited by"),
    *("compute-bound while", "that is", "with rings of N"),
)


def table(layer: FeedForward, gpus: int, tensor: int | None = None) -> Table:
    """A row for each axis and pass on so many GPUs, `tensor` of which share a matrix in a mesh."""
    rows = []
    for axis in AXES:
        data, split = layer.mesh(axis, gpus, tensor)
        for phase in PRODUCTS:
            computing, communicating = layer.compute_s(phase, gpus), layer.communication_s(axis, phase, data, split)
            sent, formula = sum(layer.sent(axis, phase, data, split)), layer.formula(axis, phase)
            figures = (layer.flops(phase, gpus) / 1e12, sent / 1e6, 1e3 * computing, 1e3 * communicating)
            limit = (number(each(axis, phase)) for each in (layer.limit, layer.most_gpus))
            bound = "communication" if communicating > computing else "computing"
            mesh = axis, phase, f"{data} × {split}"
            rows.append((*mesh, *map(number, figures), bound, number(formula and f"N < {formula}"), *limit))
    given = ", ".join(f"{name} {value:,g}" for name, value in zip("BDFCWm", vars(layer).values(), strict=True))
    caption = (
        "Computed: what each of N GPUs computes and sends for one feed-forward layer, and up to which N it is "
        "compute-bound (α = C/W; a ring of N sends (N − 1)/N of what the formula counts, so its N is larger)"
    )
    return text_table("plan-feed-forward", f"{caption} ({given}, N {number(gpus)})", COLUMNS, rows)


def main(
    layer: tuple[float, float, float, float, float] = (524_288, 4096, 11_008, 989e12, 450e9),
    gpus: int = 64,
    tensor_parallel: int | None = None,
    matrices: int = 3,
) -> None:
    """FLOPs, bytes and seconds of one feed-forward layer on N GPUs, and the most GPUs that are compute-bound.

    Args:
        layer: B tokens of all GPUs, D d_model, F d_ff, C FLOP/s of a GPU, W bytes/s that it sends.
        gpus: N.
        tensor_parallel: GPUs that share a matrix in a mesh; by default those with the least communication.
        matrices: 3, as SwiGLU has; a feed-forward without a gate has 2.
    """
    print(to_markdown(table(FeedForward(*layer, matrices), gpus, tensor_parallel)))


if __name__ == "__main__":
    tyro.cli(main)
