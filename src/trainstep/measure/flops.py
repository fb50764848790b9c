"""FLOPs, counted in two ways: those of a step's mathematics, and those (with bytes) that each operator call executes.

`counted_flops` counts the mathematics while a step of any module runs. torch's `FlopCounterMode` counts matrix products
and convolutions. It leaves out grouped products, recurrent layers, which run as one operator, and attention on a CPU;
it takes causal attention for whole, its backward for 2.5 times forward, and the backward of a grouped convolution for
that of one without groups. Here a product of groups is 2 for each row, column and term; attention is 4·B·H·Sq·Sk·D,
half of it when causal, and a recurrent layer two per weight and token; backward is twice forward. Causal is what says
so, what has a mask without weights above the diagonal, and where attention is written out, products of scores whose
softmax has zeros there. An operator that looks like a product and is in no table is named. Eager code only.

`operator_cost` counts what one call executes, from the shapes and dtypes that a profiler recorded. A product of (m × k)
with (k × n) is 2·m·k·n; a convolution is that of each result with the weights it is made from, and its backward as much
for each of the gradients asked for; fused attention is 4·B·H·Sq·Sk·D forward and 2.5 times that backward (it computes
the scores again), half of it when causal; softmax is 5 per element forward (maximum, difference, exponential, sum,
quotient) and 4 backward; other operators on elements are 1 per element. Bytes are the least that must move between
memory and the device: every tensor argument read once, every result written once, no score matrix for fused attention.
Lists of tensors whose shapes the profiler leaves out are taken for the optimizer's, as long as all of its parameters
are in one list. What is not in these tables is not counted, and the share of time that is counted is told.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_FUSED = {"flash_attention": 0, "flash_attention_for_cpu": 0, "efficient_attention": 1, "cudnn_attention": 1}
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
    """What scores have in common wherever they appear, transposed or flattened to one dimension of batches."""
    return tensor.numel(), frozenset(tensor.shape[-2:])


def _is_lower(used: torch.Tensor) -> bool:
    """Whether nothing above the diagonal is used, which ends in the last corner; and something below."""
    above = used.triu(1 + used.shape[-1] - used.shape[-2])
    return not bool(above.any()) and bool(used.any())


def _is_square(used: torch.Tensor) -> bool:
    """The same where no element is known: as many queries as keys, as in a decoder that is trained."""
    return used.shape[-1] == used.shape[-2]


@contextmanager
def counted_flops(*, masks_are_known: bool = True) -> Iterator[FlopCount]:
    """Count what runs inside.

    Args:
        masks_are_known: whether a mask can be looked at. If not, as with tensors that have no data, attention of as
            many queries as keys is taken for causal where it has a mask, or is written out.
    """
    is_lower = _is_lower if masks_are_known else _is_square
    written_out = _WrittenOut(is_lower)
    with _Counter(_formulas(written_out, is_lower)) as counter:
        yield FlopCount(counter, written_out)


def _formulas(written_out: _WrittenOut, is_lower: Callable[[torch.Tensor], bool]) -> dict[Any, Callable[..., int]]:
    aten = torch.ops.aten
    attention = partial(_attention_flops, is_lower)
    formulas: dict[Any, Callable[..., int]] = {}
    for suffix, times in (("", 1), ("_backward", 2)):
        for name in _FUSED:
            packet = getattr(aten, f"_scaled_dot_product_{name}{suffix}")
            formulas[packet] = _of_arguments(packet, attention, times)
        for name in ("mkldnn_rnn_layer", "_cudnn_rnn"):
            packet = getattr(aten, f"{name}{suffix}")
            formulas[packet] = _of_arguments(packet, _recurrent_flops, times)
        ours = getattr(torch.ops.trainstep, f"flash_attention{suffix or '_forward'}", None)
        if ours is not None:  # there once our kernels were used
            formulas[ours] = _of_arguments(ours, attention, times)
    for name in ("linear_cross_entropy", "linear_cross_entropy_errors"):
        if (loss := getattr(torch.ops.trainstep, name, None)) is not None:  # likewise
            formulas[loss] = _of_arguments(loss, _loss_flops)
    formulas[aten.convolution_backward] = _of_arguments(aten.convolution_backward, _convolution_backward_flops)
    if hasattr(aten, "_grouped_mm"):
        formulas[aten._grouped_mm] = _of_arguments(
            aten._grouped_mm, lambda given: _grouped_flops(given["self"].shape, given["mat2"].shape)
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
    return flops // 2 if given.get("is_causal") else flops


def _loss_flops(given: Mapping[str, Any]) -> int:
    """Of the head joined with its loss: the product, and one more for each gradient that is asked for of it."""
    products = 1 + given.get("of_states", 0) + given.get("of_weight", 0)
    return products * 2 * math.prod(given["states"].shape) * len(given["weight"])


_MASKED = -1e4
"""Scores below this have no weight in a softmax, in whatever type; masks are often the least number of one."""


def _grouped_flops(left: Sequence[int], right: Sequence[int]) -> int:
    """Rows or columns of one side belong to groups; the other has a matrix for each, or the sum runs over a group's."""
    if len(left) == 3 and len(right) == 2:  # each column has the matrix of its group
        return 2 * math.prod(left[1:]) * right[-1]
    return 2 * math.prod(left) * right[-1]


def _convolution_backward_flops(given: Mapping[str, Any]) -> int:
    """As much as forward for each of the two gradients that is asked for; a weight has the channels of its group."""
    weight, outputs = given["weight"].shape, given["input" if given["transposed"] else "grad_output"].shape
    return 2 * math.prod(outputs) * math.prod(weight[1:]) * sum(map(bool, given["output_mask"][:2]))


def _recurrent_flops(given: Mapping[str, Any]) -> int:
    """cuDNN takes all layers and directions at once, oneDNN each of them; the matrices are two of each."""
    weights = given["weight"] if "weight" in given else [given[name] for name in given if name.startswith("weight")]
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return 2 * math.prod(given["input"].shape[:-1]) * matrices


_ELEMENT_BYTES = {
    "double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
    "long int": 8, "long": 8, "int": 4, "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1,
}  # fmt: skip

COUNTED = (
    "FLOPs of matrix products, convolutions, fused attention (causal as half, backward as 2.5 forwards), softmax (5 "
    "per element forward, 4 backward) and elementwise operators (1 per element); bytes of every argument read once and "
    "every result written once"
)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensor arguments of one operator call."""

    shapes: tuple[tuple[int, ...], ...]  # one per tensor, lists of tensors flattened; non-tensor arguments are left out
    dtypes: tuple[str, ...]  # as the profiler names them: `float`, `c10::BFloat16`; `TensorList` for those of a list
    counts: tuple[int, ...] = ()  # how many tensors each tensor argument is: 1, or the length of a list
    unknown_lists: int = 0  # arguments that are lists of tensors whose shapes were not recorded (torch 2.11 does not)
    scalars: tuple[str, ...] = ()  # every argument as text, tensors as empty strings; empty where the trace has none


@dataclass(frozen=True, slots=True)
class Cost:
    flops: float | None  # None, as for bytes, if not counted
    bytes: float | None


@dataclass(frozen=True)
class Lists:
    """What the profiler does not record of the lists of tensors that optimizers work on."""

    element_bytes: int = 4  # of the parameters
    elements: int | None = None  # of all parameters, where one list holds them all; else None


UNKNOWN_LISTS = Lists()
_ATTENTION = {
    f"aten::_scaled_dot_product_{name}{suffix}": (query, causal)
    for name, causal in _FUSED.items()
    for suffix, query in (("", 0), ("_backward", 1))
} | {"trainstep::flash_attention_forward": (0, 0), "trainstep::flash_attention_backward": (0, 0)}
"""Operator → index of the queries among its tensors (keys and values follow), and as in `_FUSED`."""
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operator → index of the product's left side."""
_CONVOLUTIONS = ("aten::mkldnn_convolution", "aten::cudnn_convolution")
_SOFTMAX = dict.fromkeys(("aten::_softmax", "aten::_log_softmax"), 5)
_SOFTMAX |= dict.fromkeys(("aten::_softmax_backward_data", "aten::_log_softmax_backward_data"), 4)
_FUSED_ADAM = ("aten::_fused_adamw_", "aten::_fused_adam_")
_ADAM_FLOPS = 12
_REDUCTIONS = ("aten::sum", "aten::mean", "aten::max", "aten::amax", "aten::linalg_vector_norm")
_MAPS = {
    f"aten::{name}"
    for name in (
        *("add", "sub", "mul", "div", "pow", "exp", "log", "neg", "sqrt", "rsqrt", "silu", "gelu", "relu", "tanh"),
        *("sigmoid", "sin", "cos", "where", "masked_fill", "lerp", "addcmul", "addcdiv", "clamp", "reciprocal"),
        *("silu_backward", "gelu_backward", "threshold_backward", "sigmoid_backward", "tanh_backward", "tril", "triu"),
        *("_fused_rms_norm", "_fused_rms_norm_backward", "native_layer_norm", "native_layer_norm_backward"),
    )
}


def operator_cost(name: str, tensors: Tensors | None, lists: Lists = UNKNOWN_LISTS) -> Cost | None:
    """Cost of one call of `aten::mm`, `trainstep::…` or a kernel of torch.compile's; None where it is not counted."""
    if tensors is None:
        return None
    if tensors.unknown_lists:
        return _unknown_lists(name, tensors, lists)
    width_of = _ELEMENT_BYTES | {"TensorList": lists.element_bytes}
    if not tensors.shapes or not width_of.keys() >= set(tensors.dtypes):
        return None
    elements = [math.prod(shape) for shape in tensors.shapes]
    sizes = [count * width_of[dtype] for count, dtype in zip(elements, tensors.dtypes, strict=True)]
    first = tensors.counts[0] if tensors.counts else 1  # tensors in the first list
    if name in _PRODUCTS:
        return _product(tensors, sizes, _PRODUCTS[name])
    if name == "aten::_grouped_mm" and len(tensors.shapes) > 1:
        return _grouped_product(tensors, sizes)
    if name in _ATTENTION:
        return _attention(tensors, sizes, *_ATTENTION[name], is_backward=name.endswith("backward"))
    if name in _CONVOLUTIONS:
        return _convolution(tensors, sizes)
    if name == "aten::convolution_backward":
        return _convolution_backward(tensors, sizes)
    if name in _SOFTMAX:
        return Cost(_SOFTMAX[name] * elements[0], sum(sizes) + sizes[0])
    if name in ("aten::copy_", "aten::cat", "aten::fill_", "aten::zero_"):
        return Cost(None, {"aten::copy_": sum(sizes[:2]), "aten::cat": 2 * sum(sizes)}.get(name, sizes[0]))
    if name in _REDUCTIONS:
        return Cost(elements[0], sizes[0])
    if name in _FUSED_ADAM:  # parameters, gradients and both moments are read; all but the gradients are written
        return Cost(_ADAM_FLOPS * sum(elements[:first]), 2 * sum(sizes[: 4 * first]) - sum(sizes[first : 2 * first]))
    if name.startswith("aten::_foreach_"):
        return Cost(sum(elements[:first]), sum(sizes) + sum(sizes[:first]))
    if name.startswith("triton_"):  # results are among the arguments
        return Cost(None, sum(sizes))
    if name.removesuffix("_") in _MAPS:
        return Cost(max(elements), sum(sizes) + (sizes[0] if name.endswith("_") else max(sizes)))
    return None


def _product(tensors: Tensors, sizes: list[int], left: int) -> Cost | None:
    if len(tensors.shapes) < left + 2 or len(tensors.shapes[left]) < 2 or len(tensors.shapes[left + 1]) < 2:
        return None
    a, b = tensors.shapes[left : left + 2]
    result = math.prod(a[:-1]) * b[-1]
    width = sizes[left] // max(1, math.prod(a))
    return Cost(2.0 * result * a[-1], sum(sizes[: left + 2]) + result * width)


def _grouped_product(tensors: Tensors, sizes: list[int]) -> Cost:
    """Where neither side has a dimension of groups, the result has one: as many as there are ends of groups."""
    left, right = tensors.shapes[:2]
    groups = math.prod(tensors.shapes[2]) if len(left) == len(right) == 2 and len(tensors.shapes) > 2 else 1
    result = groups * right[-1] * (math.prod(left[:-1]) if len(right) == 3 else left[-2])
    width = sizes[0] // max(1, math.prod(left))
    return Cost(float(_grouped_flops(left, right)), sum(sizes[:2]) + result * width)


def _convolution(tensors: Tensors, sizes: list[int]) -> Cost | None:
    """Of (batch, channels, *space) with (results, channels per group, *window)."""
    texts = [text.strip("[]").split(",") for text in tensors.scalars if text.startswith("[")]
    lists = [[int(word) for word in words if word.strip().isdigit()] for words in texts]
    if len(tensors.shapes) < 2 or len(lists) < 3:
        return None
    (batch, _, *space), (channels, *window) = tensors.shapes[:2]
    padding, stride, dilation = ((each * len(space))[: len(space)] for each in lists[:3])
    if len(padding) != len(space) or len(window) != len(space) + 1:
        return None
    result = batch * channels
    for size, pad, step, apart, reach in zip(space, padding, stride, dilation, window[1:], strict=True):
        result *= (size + 2 * pad - apart * (reach - 1) - 1) // step + 1
    width = sizes[0] // max(1, math.prod(tensors.shapes[0]))
    return Cost(2.0 * result * math.prod(window), sum(sizes) + result * width)


def _convolution_backward(tensors: Tensors, sizes: list[int]) -> Cost | None:
    """Of the result's gradient, the input and the weight; the last argument says which of their gradients are made."""
    transposed = "True" in tensors.scalars  # the only truth outside of a list
    if len(tensors.shapes) < 3 or transposed or not tensors.scalars[-1:]:
        return None
    wanted = tensors.scalars[-1].strip("[]").split(", ")[:2]
    gradient, _, weight = tensors.shapes[:3]
    written = sum(size for size, made in zip(sizes[1:3], wanted, strict=False) if made == "True")
    return Cost(2.0 * math.prod(gradient) * math.prod(weight[1:]) * wanted.count("True"), sum(sizes) + written)


def _attention(tensors: Tensors, sizes: list[int], query: int, causal: int, *, is_backward: bool) -> Cost | None:
    truths = [text for text in tensors.scalars if text in ("True", "False")]
    if len(tensors.shapes) < query + 3 or len(tensors.shapes[query]) < 2 or len(truths) <= causal:
        return None
    q, k = tensors.shapes[query : query + 2]
    flops = 4.0 * math.prod(q) * k[-2] * (2.5 if is_backward else 1) / (2 if truths[causal] == "True" else 1)
    return Cost(flops, sum(sizes) + sum(sizes[query : query + 3] if is_backward else sizes[query : query + 1]))


def _unknown_lists(name: str, tensors: Tensors, lists: Lists) -> Cost | None:
    """An optimizer's operator on lists of all parameters' sizes; None if it may be on something else."""
    if lists.elements is None:
        return None
    one = lists.elements * lists.element_bytes
    if name in _FUSED_ADAM:
        return Cost(_ADAM_FLOPS * lists.elements, 7 * one)
    counts_steps = name == "aten::_foreach_add_" and (bool(tensors.shapes) or tensors.scalars[1:2] in (("1",), ("1.",)))
    if not name.startswith("aten::_foreach_") or counts_steps:
        return None
    return Cost(lists.elements, (tensors.unknown_lists + 1) * one)
