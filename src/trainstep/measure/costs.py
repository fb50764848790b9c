"""FLOPs and bytes that one call of an operator executes, from the shapes and dtypes that a profiler recorded.

A product of (m × k) with (k × n) is 2·m·k·n; a convolution is that of each result with the weights it is made from,
and its backward as much for each of the gradients asked for; fused attention is 4·B·H·Sq·Sk·D forward and 2.5 times
that backward (it computes the scores again), half of it when causal, and not counted with a window or documents;
softmax is 5 per element forward (maximum, difference, exponential, sum, quotient) and 4 backward; other operators on
elements are 1 per element. Bytes are the least that must move between memory and the device: every tensor argument
read once, every result written once, no score matrix for fused attention. Lists of tensors whose shapes the profiler
leaves out are taken for the optimizer's, as long as all of its parameters are in one list. What is not in these tables
is not counted, and the share of time that is counted is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from trainstep.measure.flops import FUSED, grouped_flops

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
    """Facts that the profiler does not record of the lists of tensors that optimizers work on."""

    element_bytes: int = 4  # of the parameters
    elements: int | None = None  # of all parameters, where one list holds them all; else None


UNKNOWN_LISTS = Lists()
_ATTENTION = {
    f"aten::_scaled_dot_product_{name}{suffix}": (query, causal)
    for name, causal in FUSED.items()
    for suffix, query in (("", 0), ("_backward", 1))
} | {"trainstep::flash_attention_forward": (0, 0), "trainstep::flash_attention_backward": (0, 0)}
"""Operator → index of the queries among its tensors (keys and values follow), and as in `FUSED`."""
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


@lru_cache(4096)  # most calls of a step are alike
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
        cost = _attention(tensors, sizes, *_ATTENTION[name], is_backward=name.endswith("backward"))
        return Cost(None, cost.bytes) if cost and name.startswith("trainstep") and _is_banded(tensors) else cost
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
    """Cost of a grouped product. Where neither side has a dimension of groups, the result has one: as many as there are
    ends of groups."""
    left, right = tensors.shapes[:2]
    groups = math.prod(tensors.shapes[2]) if len(left) == len(right) == 2 and len(tensors.shapes) > 2 else 1
    result = groups * right[-1] * (math.prod(left[:-1]) if len(right) == 3 else left[-2])
    width = sizes[0] // max(1, math.prod(left))
    return Cost(float(grouped_flops(left, right)), sum(sizes[:2]) + result * width)


def _convolution(tensors: Tensors, sizes: list[int]) -> Cost | None:
    """Cost of a convolution of (batch, channels, *space) with (results, channels per group, *window)."""
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
    """Cost of a convolution's backward, of the result's gradient, the input and the weight; the last argument says
    which of their gradients are made."""
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


def _is_banded(tensors: Tensors) -> bool:
    """True if our attention has a window, two places after whether it is causal, or the bounds of documents."""
    truth = next(place for place, text in enumerate(tensors.scalars) if text in ("True", "False"))
    return bool("".join(tensors.scalars[truth + 2 : truth + 3])) or "int" in tensors.dtypes


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
