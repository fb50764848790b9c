"""FLOPs of the mathematics that a step of any module does, counted operator by operator.

torch's `FlopCounterMode` counts matrix products and convolutions. It leaves out recurrent layers, which run as one
operator, and attention on a CPU, and takes causal attention for whole and its backward for 2.5 times forward. Here
attention is 4·B·H·Sq·Sk·D, half of it when causal, and a recurrent layer two per weight and token; backward is twice
forward, as everywhere in trainstep. Eager code only: compiled code hides its operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
_LAYERS = ("mkldnn_rnn_layer", "_cudnn_rnn")
_ATEN = torch.ops.aten


@contextmanager
def counted_flops() -> Iterator[Callable[[], int]]:
    """Count what runs inside; the function gives the FLOPs so far."""
    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        yield counter.get_total_flops


def _formulas() -> dict[Any, Callable[..., int]]:
    """Operator → FLOPs of a call."""
    packets: list[tuple[Any, Callable[[Mapping[str, Any]], int], int]] = []
    for suffix, times in (("", 1), ("_backward", 2)):
        packets += [(getattr(_ATEN, f"_scaled_dot_product_{name}{suffix}"), _attention, times) for name in _FUSED]
        packets += [(getattr(_ATEN, f"{name}{suffix}"), _recurrent, times) for name in _LAYERS]
    for suffix, times in (("forward", 1), ("backward", 2)):
        ours = getattr(torch.ops.trainstep, f"flash_attention_{suffix}", None)  # there once our kernels were used
        packets += [(ours, _attention, times)] if ours is not None else []
    return {packet: _of_arguments(packet, formula, times) for packet, formula, times in packets}


def _of_arguments(packet: Any, formula: Callable[[Mapping[str, Any]], int], times: int) -> Callable[..., int]:
    """The formula, given a call's arguments by name."""
    names = [argument.name for argument in packet.default._schema.arguments]

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return times * formula(dict(zip(names, args, strict=False)) | kwargs)

    flops._get_raw = True  # type: ignore[attr-defined] # torch's mark for a formula that takes tensors, not shapes
    return flops


def _attention(given: Mapping[str, Any]) -> int:
    q, k, v = (given[name if name in given else name[0]].shape for name in ("query", "key", "value"))
    flops = 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    return flops // 2 if given.get("is_causal") else flops


def _recurrent(given: Mapping[str, Any]) -> int:
    """cuDNN takes all layers and directions at once, oneDNN each of them; the matrices are two of each."""
    weights = given["weight"] if "weight" in given else [given[name] for name in given if name.startswith("weight")]
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return 2 * math.prod(given["input"].shape[:-1]) * matrices
