"""Limits of each axis of parallelism, before communication limits it: closed forms, derived in notebook/theory.md.

C FLOP/s of one GPU and W bytes/s of its connection make α = C / W: the FLOPs that a GPU can do while one byte travels.
Everything travels in `width` bytes per element (2 by default), and rings are long, so that (n − 1)/n is 1.

    axis                   computes       sends, in bytes                 limited by communication unless
    data, of X ranks       backward 4·P·b   all-reduced gradients  4·P    b > α / M
    fsdp, of X ranks       forward  2·P·b   gathered weights       2·P    b > α / M
    tensor, of Y ranks     forward  4·B·D·F/Y   in and out  4·B·D         Y < M·F / α

P parameters, b tokens per rank, B tokens of a tensor parallel group, D × F and F × D the matrices between an all-gather
and a reduce-scatter, M the connections (axes of a torus) that work for this axis at once. For m matrices of D × d_ff, F
is m·d_ff/2 in forward and twice that in backward (examples/feed_forward.py). With both axes, a mesh of X × Y GPUs and b
tokens per GPU, the two are either hidden behind the same computation at once, or one after the other:

    overlapped         b > α / (Y·M_x),  Y < M_y·F / α             best mesh: b > α² / (M_x·M_y·F)
    not overlapped     b > α / (Y·M_x) / (1 − α·Y / (M_y·F))       best mesh: b > 4·α² / (M_x·M_y·F)

(Austin et al. 2025, "How to Scale Your Model", part 5.) Imports no torch.
"""

from __future__ import annotations

from trainstep.base.config import ModelConfig
from trainstep.base.errors import UsageError


def intensity(flops_per_s: float, bytes_per_s: float, width: int = 2) -> float:
    """α = C / W, for elements of two bytes; where they travel in another `width`, α scales with it.

    Raises:
        UsageError: a rate that is not positive.
    """
    for name, value in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s), ("width", width)):
        if not value > 0:
            raise UsageError(f"{name} is {value}; expected a positive number")
    return flops_per_s / bytes_per_s * width / 2


def data_axis_tokens(alpha: float, axes: float = 1) -> float:
    """The fewest tokens per rank at which DP, or FSDP, computes as long as it communicates."""
    return alpha / axes


def tensor_axis_ranks(alpha: float, d_ff: float, axes: float = 1) -> float:
    """The most ranks of tensor parallelism; the batch does not matter."""
    return axes * d_ff / alpha


def best_mesh_tokens(alpha: float, d_ff: float, *, overlapped: bool = True) -> float:
    """The fewest tokens per GPU for FSDP × TP, with the mesh that needs fewest, one connection for each axis."""
    return (1 if overlapped else 4) * alpha**2 / d_ff


def width_between_collectives(model: ModelConfig) -> float:
    """F of a whole block: its products are as many per byte sent as those of two matrices D × F and F × D.

    A block sends 4 times B·D elements in forward, and multiplies by 4·D² + 3·D·F parameters; two matrices send 2 times
    and multiply by 2·D·F. So F is (4·D + 3·F) / 4.
    """
    return (4 * model.d_model + 3 * model.d_ff) / 4
