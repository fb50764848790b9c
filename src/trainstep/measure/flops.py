"""FLOPs of a step's mathematics, counted while a step of any module runs.

torch's `FlopCounterMode` counts matrix products and convolutions. It leaves out grouped products, recurrent layers,
which run as one operator, and attention on a CPU; it takes causal attention for whole, its backward for 2.5 times
forward, and the backward of a grouped convolution for that of one without groups. Here a product of groups is 2 for
each row, column and term; attention is 4·B·H·Sq·Sk·D, half of it when causal, and the pairs of a window or of packed
documents where ours has them; a recurrent layer is two per weight and token; backward is twice forward. Causal is what
says so, what has a mask without weights above the diagonal, and where attention is written out, products of scores
whose softmax has zeros there. An operator that looks like a product and is in no table is named. Eager code only.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

FUSED = {"flash_attention": 0, "flash_attention_for_cpu": 0, "efficient_attention": 1, "cudnn_attention": 1}
"""torch's fused attention → which of the operator's truth values, from 0, says that it is causal."""


_LIKE_PRODUCTS = re.compile(r"mm(?![a-z])|matmul|(?<!de)conv(?!ert)|attention|gemm|rnn|gru|lstm|linear(?!alg)|bilinear")
_OWN_NAMES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "trainstep", "debugprims")


class FlopCount:
    """FLOPs so far, when called."""

    def __init__(self, counter: _Counter, written_out: _WrittenOut) -> None:
        self._counter, self._written_out = counter, written_out

    def __call__(self) -> int:
        return int(self._counter.get_total_flops()) - self._written_out.beyond_diagonal()

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Operators that ran and may be products, which no table has."""
        return tuple(self._counter.uncounted)


class _Counter(FlopCounterMode):
    """Notes the operators that it does not count."""

    def __init__(self, formulas: dict[Any, Callable[..., int]]) -> None:
        super().__init__(display=False, custom_mapping=formulas)
        self.uncounted: dict[str, None] = {}

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet not in self.flop_registry and _may_be_product(func_packet, args):
            self.uncounted[str(func_packet).replace(".", "::", 1)] = None
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]


def _may_be_product(packet: Any, args: Any) -> bool:
    """By its name where it is torch's; of another library's operators, all that take two matrices."""
    namespace, _, name = str(packet).partition(".")
    if namespace in _OWN_NAMES:
        return namespace == "aten" and _LIKE_PRODUCTS.search(name) is not None
    matrices = [each for each in args if isinstance(each, torch.Tensor) and each.is_floating_point() and each.dim() > 1]
    return len(matrices) > 1


class _WrittenOut:
    """Attention written out as products and a softmax: which of them are of scores that are zero above the diagonal."""

    def __init__(self, is_lower: Callable[[torch.Tensor], bool]) -> None:
        self._is_lower = is_lower
        self._products: Counter[tuple[int, frozenset[int]]] = Counter()
        self._softmaxes: Counter[tuple[int, frozenset[int]]] = Counter()
        self._causal: Counter[tuple[int, frozenset[int]]] = Counter()

    def product(self, flops: int, *tensors: torch.Tensor) -> int:
        """Note a product of matrices in batches, which may make scores or take them."""
        for shape in {_scores(each) for each in tensors}:
            self._products[shape] += flops
        return flops

    def softmax(self, weights: torch.Tensor, dim: int) -> None:
        """Note a softmax, over the last dimension of what may be scores."""
        if weights.dim() < 3 or dim % weights.dim() != weights.dim() - 1 or 1 in weights.shape[-2:]:
            return
        shape = _scores(weights)
        self._softmaxes[shape] += 1
        self._causal[shape] += self._is_lower(weights.detach() != 0)

    def beyond_diagonal(self) -> int:
        """FLOPs of what causal scores leave out: half of their products."""
        shares = {shape: self._causal[shape] / count for shape, count in self._softmaxes.items()}
        return round(sum(share * self._products[shape] / 2 for shape, share in shares.items()))


def _scores(tensor: torch.Tensor) -> tuple[int, frozenset[int]]:
    """Properties that scores have in common wherever they appear, transposed or flattened to one dimension of
    batches."""
    return tensor.numel(), frozenset(tensor.shape[-2:])


def _is_lower(used: torch.Tensor) -> bool:
    """True if nothing above the diagonal is used, which ends in the last corner; and something below."""
    above = used.triu(1 + used.shape[-1] - used.shape[-2])
    return not bool(above.any()) and bool(used.any())


@contextmanager
def counted_flops(*, masks_are_known: bool = True) -> Iterator[FlopCount]:
    """Count what runs inside.

    Args:
        masks_are_known: whether a mask can be looked at. If not, as with tensors that have no data, attention of as
            many queries as keys is taken for causal where it has a mask, or is written out.
    """
    # Where no element is known: as many queries as keys, as in a decoder that is trained.
    is_lower = _is_lower if masks_are_known else lambda used: used.shape[-1] == used.shape[-2]
    written_out = _WrittenOut(is_lower)
    with _Counter(_formulas(written_out, is_lower)) as counter:
        yield FlopCount(counter, written_out)


def _formulas(written_out: _WrittenOut, is_lower: Callable[[torch.Tensor], bool]) -> dict[Any, Callable[..., int]]:
    aten = torch.ops.aten
    attention = partial(_attention_flops, is_lower)
    formulas: dict[Any, Callable[..., int]] = {}
    for suffix, times in (("", 1), ("_backward", 2)):
        for name in FUSED:
            packet = getattr(aten, f"_scaled_dot_product_{name}{suffix}")
            formulas[packet] = _of_arguments(packet, attention, times)
        for name in ("mkldnn_rnn_layer", "_cudnn_rnn"):
            packet = getattr(aten, f"{name}{suffix}")
            formulas[packet] = _of_arguments(packet, _recurrent_flops, times)
        ours = getattr(torch.ops.trainstep, f"flash_attention{suffix or '_forward'}", None)
        if ours is not None:  # there once our kernels were used
            formulas[ours] = _of_arguments(ours, attention, times)
    for name in ("linear_cross_entropy", "linear_cross_entropy_d_logits"):
        if (loss := getattr(torch.ops.trainstep, name, None)) is not None:  # likewise
            formulas[loss] = _of_arguments(loss, _loss_flops)
    formulas[aten.convolution_backward] = _of_arguments(aten.convolution_backward, _convolution_backward_flops)
    if hasattr(aten, "_grouped_mm"):
        formulas[aten._grouped_mm] = _of_arguments(
            aten._grouped_mm, lambda given: grouped_flops(given["self"].shape, given["mat2"].shape)
        )

    def batched(a: Any, b: Any, out_val: Any = None, **_: Any) -> int:
        return written_out.product(2 * math.prod(a.shape) * b.shape[-1], a, b, out_val)

    def added(_: Any, a: Any, b: Any, out_val: Any = None, **__: Any) -> int:
        return batched(a, b, out_val)

    def softmax(_: Any, dim: int, *__: Any, out_val: Any = None, **___: Any) -> int:
        written_out.softmax(out_val, dim)
        return 0

    raw: dict[Any, Any] = {aten.bmm: batched, aten.baddbmm: added, aten._softmax: softmax, aten._safe_softmax: softmax}
    for formula in raw.values():
        formula._get_raw = True
    return formulas | raw


def _of_arguments(packet: Any, formula: Callable[[Mapping[str, Any]], int], times: int = 1) -> Callable[..., int]:
    names = [argument.name for argument in packet.default._schema.arguments]

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return times * formula(dict(zip(names, args, strict=False)) | kwargs)

    flops._get_raw = True  # type: ignore[attr-defined] # torch's mark for a formula that takes tensors, not shapes
    return flops


def _attention_flops(is_lower: Callable[[torch.Tensor], bool], given: Mapping[str, Any]) -> int:
    q, k, v = (given[name if name in given else name[0]].shape for name in ("query", "key", "value"))
    flops = 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    mask = given.get("attn_mask", given.get("attn_bias"))
    if mask is not None and mask.dim() > 1 and 1 not in mask.shape[-2:]:
        weighs = mask if mask.dtype == torch.bool else mask > _MASKED
        return flops // 2 if is_lower(weighs) else flops
    window, bounds = given.get("window"), given.get("bounds")
    if window is None and bounds is None:
        return flops // 2 if given.get("is_causal") else flops
    lengths = torch.full((q[-2],), float(q[-2]), dtype=torch.float64)  # of each token's document
    if bounds is not None and is_lower is _is_lower:  # else nobody knows them: the row counts as one document
        lengths = (bounds[1] - bounds[0]).double().cpu()
    keys = lengths / 2 if given.get("is_causal") else lengths  # that a token sees, on average over its document
    if window is not None:
        keys = torch.where(lengths > window, window - window**2 / 2 / lengths, keys)
    return round(flops * float(keys.mean()) / k[-2])


def _loss_flops(given: Mapping[str, Any]) -> int:
    """FLOPs of the head joined with its loss: the product, and one more for each gradient that is asked for of it."""
    products = 1 + given.get("of_states", 0) + given.get("of_weight", 0)
    return products * 2 * math.prod(given["states"].shape) * len(given["weight"])


_MASKED = -1e4
"""Scores below this have no weight in a softmax, in whatever type; masks are often the least number of one."""


def grouped_flops(left: Sequence[int], right: Sequence[int]) -> int:
    """Rows or columns of one side belong to groups; the other has a matrix for each, or the sum runs over a group's."""
    if len(left) == 3 and len(right) == 2:  # each column has the matrix of its group
        return 2 * math.prod(left[1:]) * right[-1]
    return 2 * math.prod(left) * right[-1]


def _convolution_backward_flops(given: Mapping[str, Any]) -> int:
    """FLOPs of forward for each of the two gradients that is asked for; a weight has the channels of its group."""
    weight, outputs = given["weight"].shape, given["input" if given["transposed"] else "grad_output"].shape
    return 2 * math.prod(outputs) * math.prod(weight[1:]) * sum(map(bool, given["output_mask"][:2]))


def _recurrent_flops(given: Mapping[str, Any]) -> int:
    """cuDNN takes all layers and directions at once, oneDNN each of them; the matrices are two of each."""
    weights = given["weight"] if "weight" in given else [given[name] for name in given if name.startswith("weight")]
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return 2 * math.prod(given["input"].shape[:-1]) * matrices
