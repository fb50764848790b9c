"""Compares the tensors that a block saves for backward in forward, and those that it saves when it is run again.

A block that is run again may read something that changed since: a generator, a file, memory that nothing here knows of.
Shapes stay and values differ, so gradients are wrong without an error. Two copies of all saved tensors would take the
memory that checkpointing saves, so a tensor is reduced to a sketch: for each million elements, their product with
pseudo-random weights w, their sum and their sum of squares, in float64. Sketches of x and y estimate ‖x - y‖ / ‖x‖:

- the mean of (w·(x - y))² over w is var(w) ‖x - y‖² (Alon, Matias and Szegedy 1999);
- |sum(x - y)| is at most √n ‖x - y‖, and | ‖x‖² - ‖y‖² | about 2 ‖x‖ ‖x - y‖, which see what w misses by chance.

Equal bits give equal sketches. Kernels whose sums depend on the order of threads, as `index_add` on GPUs, give other
last bits each time, which is no fault. So a difference counts if it is larger than such rounding: a random walk over
2²⁰ sums in float32, 2⁻¹⁴, plus four roundings of the coarsest floating-point format among the tensors. Under
`torch.use_deterministic_algorithms(True)`, any difference counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from trainstep.base.errors import UnsupportedError

PART = 2**20
"""Elements that are reduced at a time: their copy in float64 takes 8 MiB."""
SUMS, ROUNDINGS, COARSEST = 2.0**-14, 4, 2.0**-8
"""Errors that rounding explains: of sums in float32, and roundings of a format, at most bfloat16's."""
EXACT = 2.0**-40
"""The same with deterministic algorithms: the rounding of the sketch."""
_IRRATIONAL = 0.7548776662466927


class Comparison:
    """Compares one call of a block with the first time that it is run again.

    Args:
        block: the block's name.
        done: called when they agree.
    """

    def __init__(self, block: str, done: Callable[[], object]) -> None:
        self._block, self._done = block, done
        self._saved: list[_Saved] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Note what is saved, around the first run."""
        with _noting(self._saved):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Note what is saved, and compare it, around another run.

        Raises:
            UnsupportedError: it differs by more than rounding.
        """
        found: list[_Saved] = []
        try:
            with _noting(found):
                yield
        except Exception as error:
            if is_end(error):
                self._compare(found)
            raise
        self._compare(found)

    def _compare(self, found: list[_Saved]) -> None:
        expected, self._saved = self._saved, []
        unwritten = _unwritten(found)
        pairs = [
            (a, b)
            for place, (a, b) in enumerate(zip(expected, found, strict=False))
            if place not in unwritten and _are_comparable(a, b)
        ]
        roundings = [min(torch.finfo(a.dtype).eps / 2, COARSEST) for a, _ in pairs if a.dtype.is_floating_point]
        tolerance = SUMS + ROUNDINGS * max(roundings, default=0.0)
        if torch.are_deterministic_algorithms_enabled():
            tolerance = EXACT
        for a, b in pairs:
            error = _relative_error(a.sketch, b.sketch)
            if error > tolerance:
                raise UnsupportedError(
                    f"checkpointing: {self._block} does not compute in backward what it computed in forward: a saved "
                    f"tensor of shape {a.shape} has a relative error of {error:.1e} (tolerance {tolerance:.1e}), so "
                    "gradients would be wrong. It reads state that changed since and that trainstep does not find; "
                    "keep generators, counters and caches as attributes of the block, pass values in, or leave "
                    "checkpointing off"
                )
        self._done()


class _Saved:
    """A saved tensor's form and sketch."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.is_cuda = tuple(tensor.shape), tensor.dtype, tensor.is_cuda
        self.sketch: Any = sketch(tensor)


def _unwritten(saved: Sequence[_Saved]) -> set[int]:
    """The places of a generator's state in what fused attention on a GPU saves, which it writes for dropout alone.

    The flash form has it in uint64, with which nothing differentiates. The others have a seed and an offset, two
    numbers one after the other, the memory-efficient form's on the host.
    """
    on_gpu = any(each.is_cuda for each in saved)
    words = [on_gpu and (each.shape, each.dtype) == ((), torch.int64) for each in saved]
    pairs = [place for place, both in enumerate(itertools.pairwise(words)) if all(both)]
    states = [place for place, each in enumerate(saved) if each.dtype == torch.uint64]
    return {*states, *pairs, *(place + 1 for place in pairs)}


def _are_comparable(a: _Saved, b: _Saved) -> bool:
    """Return True where both have values and one form. torch itself raises where forms differ."""
    has_values = a.sketch is not None and b.sketch is not None
    return has_values and (a.shape, a.dtype) == (b.shape, b.dtype)


def _relative_error(a: Tensor, b: Tensor) -> float:
    with torch.no_grad(), _disable_current_modes():
        a, b = a.cpu(), b.cpu()
        size = torch.maximum(a[:, 2].sum(), b[:, 2].sum())
        if size == 0:
            return 0.0
        squared = torch.stack(
            [
                12 * (a[:, 0] - b[:, 0]).square().sum() / size,  # var(w) is 1/12
                ((a[:, 1] - b[:, 1]).square() / a[:, 3]).sum() / size,
                ((a[:, 2] - b[:, 2]).sum() / size / 2).square(),
            ]
        )
        return float(squared.max().sqrt())


@contextmanager
def _noting(saved: list[_Saved]) -> Iterator[None]:
    """Note each tensor that is saved, and let torch's checkpoint have it as before."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":  # an instrument's, around a call without it
        yield
        return
    pack, unpack = hooks

    def note(tensor: Tensor) -> Any:
        saved.append(_Saved(tensor))
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(note, unpack):
        yield


def sketch(tensor: Tensor) -> Tensor | None:
    """Reduce a tensor to w·v, sum(v), v·v and the number of elements of each part v, without waiting for its device.

    Returns:
        Shape (parts, 4), float64, on the tensor's device. None for a tensor whose values cannot be read: of a subclass,
        without data, sparse, or in a CUDA graph's capture.
    """
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.is_quantized
    if is_wrapped or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    if tensor.numel() == 0 or tensor.untyped_storage().nbytes() == 0:  # a sharded parameter that is not gathered
        return None
    with torch.no_grad(), _disable_current_modes():
        plain = tensor.detach()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        return torch.stack([_reduced(part) for part in _parts(plain)])


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.numel() <= PART:
        yield tensor.reshape(-1)
        return
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    for half in tensor.chunk(2, longest):
        yield from _parts(half)


def _reduced(part: Tensor) -> Tensor:
    values = torch.nan_to_num(part.to(torch.float64), nan=3.0, posinf=2.0, neginf=-2.0)
    weights = torch.arange(1, len(values) + 1, dtype=torch.float64, device=part.device)
    weights = weights.square_().mul_(_IRRATIONAL).frac_().sub_(0.5)
    count = torch.full_like(weights[0], len(values))
    return torch.stack([(weights * values).sum(), values.sum(), (values * values).sum(), count])


def is_end(error: Exception) -> bool:
    """Return True for torch's announcement that a recomputation has all that it needs."""
    return type(error).__name__ == "_StopRecomputationError"
