"""The operators, one entry for each: benches, checks, profiles, flags and the plan read them here. Imports no torch.

To add an implementation of attention: its function of q, k, v and a `Scoring` in a file of `attention/`, and its entry
in `ATTENTION`. To add a fused operator: its oracle and its inputs in `fused/eager.py`, the operator with its kernels in
a file of `fused/`, and its entry in `FUSED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal


@dataclass(frozen=True)
class Sizes:
    """Sizes that a fused operator's inputs are made from."""

    tokens: int
    d_model: int
    heads: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Entry of an operator, ours or a peer's."""

    kernels: Mapping[str, str] = field(default_factory=dict)
    """Kernel of ours → the family that profiles give it (`measure.profile.kernels.Family`)."""


@dataclass(frozen=True)
class Attention(Operator):
    """An implementation of attention."""

    home: str
    """Function of q, k, v and a `Scoring`, as `file:name` in `trainstep.attention`."""
    only_plain: bool = False
    """True if it takes neither a window nor documents nor a softcap."""
    is_compiled: bool = False
    """True if torch.compile makes it, so that its allocations on a CPU cannot be followed."""
    memory: Literal["scores", "linear", "unknown"] = "unknown"
    """Numbers kept for backward: scores; or q, k, v, the result and the log-sum-exp, as the plan counts them."""


@dataclass(frozen=True)
class Fused(Operator):
    """A fused operator: how benches make its inputs, what it is checked against, and every form of it."""

    inputs: str
    """Function of `trainstep.fused.eager` that makes inputs from sizes, a number of tokens and a function that draws
    normal numbers of a shape."""
    oracle: str
    """Function of `trainstep.fused.eager`."""
    names: tuple[str, ...]
    """Names of the results, then of the gradients."""
    by_token: Mapping[int, int]
    """Input → its dimension that tokens are along, where results of a token depend on that token's inputs alone."""
    forms: Mapping[str, str]
    """Implementation → its function of the inputs, as `file:name` in `trainstep`; nothing for a form of the oracle."""
    mean_of_tokens: bool = False
    """True if the result is a mean over tokens, rather than a result for each."""


def function_at(home: str) -> Any:
    """The function at `file:name` in this package."""
    return resolve_name(f"trainstep.{home}")


_FLASH_KERNELS = ("forward", "delta", "dq", "dkdv", "backward", "prepare_dq", "finish_dq")

ATTENTION: Mapping[str, Attention] = {
    "eager": Attention("eager:attention_eager", memory="scores"),
    "eager-compiled": Attention("sdpa:attention_eager_compiled", is_compiled=True, memory="scores"),
    "flash-reference": Attention("reference:attention_reference", memory="linear"),
    "flash-triton": Attention(
        "api:attention_triton",
        memory="linear",
        kernels={f"{each}_kernel": "fused attention" for each in _FLASH_KERNELS},
    ),
    "sdpa": Attention("sdpa:attention_sdpa", only_plain=True, memory="linear"),
    "sdpa-flash": Attention("sdpa:attention_sdpa_flash", memory="linear"),
    "sdpa-cudnn": Attention("sdpa:attention_sdpa_cudnn", only_plain=True, memory="linear"),
    "sdpa-efficient": Attention("sdpa:attention_sdpa_efficient", only_plain=True, memory="linear"),
    "sdpa-math": Attention("sdpa:attention_sdpa_math", only_plain=True, memory="scores"),
    "flex": Attention("flex:attention_flex", is_compiled=True),
    "flex-max-autotune": Attention("flex:attention_flex_max_autotune", is_compiled=True),
    "flash-attn": Attention("flash_attn:attention_flash_attn"),
}

_ROPE: Mapping[str, Any] = {
    "inputs": "rope_inputs",
    "oracle": "rope",
    "names": ("q", "k", "dq", "dk"),
    "by_token": {0: 2, 1: 2, 2: 0, 3: 0},
}
FUSED: Mapping[str, Fused] = {
    "rope": Fused(
        **_ROPE,
        forms={"eager": "", "compiled": "", "liger": "fused.liger:rope", "ours": "fused.rotary:rope"},
        kernels={"rope_kernel": "elementwise"},
    ),
    "rope-in-place": Fused(**_ROPE, forms={"liger": "fused.liger:rope", "ours": "fused.rotary:rope_over_views"}),
    "linear-cross-entropy": Fused(
        "linear_cross_entropy_inputs",
        "linear_cross_entropy",
        ("loss", "dhidden", "dweight"),
        {0: 0, 2: 0},
        {
            "eager": "",
            "compiled": "",
            "chunked": "step.model.transformer:chunked_weight_cross_entropy",
            "liger": "fused.liger:linear_cross_entropy_of_16_bits",
            "liger-float32": "fused.liger:linear_cross_entropy",
            "ours": "fused.cross_entropy:weight_cross_entropy",
        },
        mean_of_tokens=True,
        kernels={
            "cross_entropy_kernel": "softmax",
            "whole_row_cross_entropy_kernel": "softmax",
            "count_targets_kernel": "reduction",
            "scale_kernel": "elementwise",
        },
    ),
}
"""Forms: eager is plain torch; chunked our model's loss, which computes a chunk's logits twice; liger-float32 adds the
weight's gradient up in float32, as ours does. Liger's RoPE is in place in both."""

if TYPE_CHECKING:
    AttentionImpl = str
    FusedOperator = str
    FusedImpl = str
else:  # a type checker reads no names out of a table; flags and files do
    AttentionImpl = Literal[("auto", *ATTENTION)]
    FusedOperator = Literal[tuple(FUSED)]
    FusedImpl = Literal[tuple(dict.fromkeys(form for each in FUSED.values() for form in each.forms))]
