"""Our FlashAttention-2 as PyTorch sees it: two custom operators, their gradient, and the functions people call.

The operators carry shapes for tracing (`register_fake`) and the gradient (their implementation for autograd), which is
what torch.compile, activation checkpointing and CUDA graphs need. Saved are q, k, v, o and the log-sum-exp only.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from trainstep.attention import documents
from trainstep.attention.inputs import describe
from trainstep.attention.scoring import Scoring, checked, with_positive_scale
from trainstep.attention.triton import INTERPRETED as INTERPRETED
from trainstep.attention.triton import backward, forward
from trainstep.attention.tuned import hopper_tile_for, tile_for
from trainstep.base.errors import UnsupportedError, refuse_create_graph


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale · QKᵀ + mask) V by our Triton kernels, with no fallback; shapes, window, cu_seqlens
    and softcap as for `trainstep.attention.attention`.

    float32, float16 or bfloat16 on an NVIDIA GPU of compute capability 8.0 or newer; head_dim from 8 to 256; any
    lengths and strides. Copied first are a last dimension that is not contiguous, leading dimensions beyond (batch,
    heads) that do not merge and, for the kernels that Hopper runs on 16-bit inputs, rows that are not 16-byte aligned
    or that share memory (expanded tensors). float32 is multiplied as `torch.set_float32_matmul_precision` says.

    The same inputs give the same bits, under `torch.use_deterministic_algorithms(True)` always. Otherwise the backward
    that Hopper runs on 16-bit inputs up to head_dim 128 adds up dq in whatever order its programs finish: the last bits
    of dq may then differ from run to run. With documents, a softcap, or a window above head_dim 128 or over two
    lengths, Hopper runs the portable kernels, whose bits never differ; so it does for a window's backward where dq's
    must not.

    Raises TypeError or UsageError, before anything is launched, for inputs outside of this.
    """
    return attention_flash(
        *checked(q, k, v, is_causal=is_causal, scale=scale, window=window, cu_seqlens=cu_seqlens, softcap=softcap)
    )


def attention_flash(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """`flash_attention` of what `checked` returns."""
    _require_supported(q, k, v)
    return cast(Tensor, forward_op(q, k, v, *_settings(q, scoring))[0])


def _settings(q: Tensor, scoring: Scoring) -> tuple[bool, float, int | None, Tensor | None, float | None]:
    """The arguments that the operators take of a scoring. Bounds are made outside of them, so that compiled code makes
    them once for all layers."""
    offsets = scoring.cu_seqlens
    bounds = None if offsets is None else documents.bounds(offsets, q.shape[-2])
    return scoring.is_causal, scoring.scale, scoring.window, bounds, scoring.softcap


def _save(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool, scale: float,
    window: int | None, bounds: Tensor | None, softcap: float | None,
) -> None:  # fmt: skip
    ctx.is_causal, ctx.scale, ctx.window, ctx.softcap = is_causal, scale, window, softcap
    ctx.save_for_backward(q, k, v, o, lse, *(() if bounds is None else (bounds,)))
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    refuse_create_graph("our FlashAttention", "impl='eager'")
    q, k, v, o, lse, *bounds = ctx.saved_tensors  # read once: activation checkpointing computes them again for this
    gradients = backward_op(
        q, k, v, o, lse, grads[0], ctx.is_causal, ctx.scale, ctx.window, bounds[0] if bounds else None, ctx.softcap
    )
    return (*gradients, None, None, None, None, None)


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal=False, scale=None, window=None, cu_seqlens=None, softcap=None)`:
    `flash_attention` as an autograd.Function.

    Its node's saved tensors are q, k, v, o and the log-sum-exp (float32, shape q.shape[:-1]); with documents, their
    bounds too (int32, (2, length)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
        cu_seqlens: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        q, k, v, scoring = checked(
            q, k, v, is_causal=is_causal, scale=scale, window=window, cu_seqlens=cu_seqlens, softcap=softcap,
            as_autocast=False,
        )  # fmt: skip
        _require_supported(q, k, v)
        settings = _settings(q, scoring)
        o, lse = forward_op(q, k, v, *settings)
        _save(ctx, q, k, v, o, lse, *settings)
        return cast(Tensor, o)

    backward = staticmethod(_backward)


def _require_supported(q: Tensor, k: Tensor, v: Tensor) -> None:
    if error := unsupported(q, k, v):
        raise error


def unsupported(q: Tensor, k: Tensor, v: Tensor) -> Exception | None:
    """Return the error that says why the kernels do not take these inputs here, None if they do."""
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return TypeError(f"the Triton kernels take float32, float16 or bfloat16: got {describe(q, k, v)}")
    if not 8 <= q.shape[-1] <= 256:
        return UnsupportedError(f"the Triton kernels take a head_dim from 8 to 256: got {describe(q, k, v)}")
    if q.device.type == "cpu" and INTERPRETED:
        return None
    if q.device.type != "cuda" or torch.version.hip is not None:
        return UnsupportedError(
            f"the Triton kernels run on NVIDIA GPUs: got {describe(q, k, v)}. "
            "Set TRITON_INTERPRET=1 to check tiny sizes on a CPU, move the tensors to a GPU, or use impl='sdpa' or "
            "impl='flash-reference'"
        )
    if (capability := torch.cuda.get_device_capability(q.device)) < (8, 0):
        return UnsupportedError(
            f"the Triton kernels need compute capability 8.0 (Ampere) or newer, {q.device} has {capability}; "
            "use impl='sdpa' there"
        )
    return None


def four_dims(t: Tensor) -> Tensor:
    """View (..., heads, length, head_dim) as (batch, heads, length, head_dim), a 3-D tensor with one head.

    Copies only what the kernels cannot address: a last dimension that is not contiguous, leading dimensions that do not
    merge, or rows so far apart that offsets inside one tile would leave 32 bits.
    """
    if t.ndim > 4:
        t = t.flatten(0, -4)
    elif t.ndim < 4:
        t = t[None, None] if t.ndim == 2 else t[:, None]
    return t.contiguous() if t.stride(-1) != 1 or t.stride(-2) >= 2**22 else t


def _forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, window: int | None = None,
    bounds: Tensor | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Checked inputs of any number of dimensions → o in q's shape and dtype, lse (float32, q.shape[:-1]).

    bounds: of documents, as `documents.bounds` makes them.
    """
    band, hopper_knows = () if bounds is None else (bounds,), _hopper_knows(q, k, window, bounds, softcap)
    shape, (q, scale) = q.shape, with_positive_scale(q, scale)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        q, k, v = four_dims(q), four_dims(k), four_dims(v)
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        if hopper_knows and runs_hopper_kernels(q):
            from trainstep.attention.hopper import forward as hopper_forward

            q, k, v = map(for_copy_engine, (q, k, v))
            tile = hopper_tile_for("forward", q.shape[-1], is_causal)
            hopper_forward.launch_forward((q, k, v, o, lse), is_causal, scale, tile, window)
        else:
            tensors, portable = (q, k, v, o, lse, *band), tile_for("forward", q, is_causal)
            forward.launch_forward(tensors, is_causal, scale, portable, window, softcap)
    return o.reshape(shape), lse.reshape(shape[:-1])


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, is_causal: bool, scale: float,
    window: int | None = None, bounds: Tensor | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Inputs and results of `_forward`, and do (q's shape) → dq, dk, dv in the inputs' shapes and dtype."""
    q_shape, k_shape, given = q.shape, k.shape, scale
    q, scale = with_positive_scale(q, given)
    with torch.cuda.device_of(q):
        q, k, v, o, do = (four_dims(t) for t in (q, k, v, o, do))
        lse = lse.reshape(q.shape[:-1]).contiguous()
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        tensors = (q, k, v, o, do, lse, d_q, d_k, d_v)
        _launch_backward(tensors, is_causal, scale, window, bounds, softcap)
        d_q, _ = with_positive_scale(d_q, given)  # of the q that was given, by the same factor
        return d_q.reshape(q_shape), d_k.reshape(k_shape), d_v.reshape(k_shape)


def _launch_backward(
    tensors: Sequence[Tensor], is_causal: bool, scale: float, window: int | None, bounds: Tensor | None,
    softcap: float | None,
) -> None:  # fmt: skip
    """Fill dq, dk and dv, the last of the tensors, from q, k, v, o, do and lse. All have four dimensions; scale > 0."""
    q, k, v, o, do, lse, d_q, d_k, d_v = tensors
    hopper_knows = _hopper_knows(q, k, window, bounds, softcap)
    if hopper_knows and sums_dq_in_any_order(q):
        from trainstep.attention.hopper import backward as hopper_backward

        q, k, v, do = map(for_copy_engine, (q, k, v, do))
        hopper_backward.launch_backward((q, k, v, o, do, lse, d_q, d_k, d_v), is_causal, scale, window)
    elif hopper_knows and window is None and runs_hopper_kernels(q):
        from trainstep.attention.hopper import dkdv as hopper_dkdv
        from trainstep.attention.hopper import dq as hopper_dq

        q, k, v, do = map(for_copy_engine, (q, k, v, do))
        dq_tile, dkdv_tile = (hopper_tile_for(kernel, q.shape[-1], is_causal) for kernel in ("dq", "dkdv"))
        stat = hopper_dq.empty_statistics(d_q, dq_tile)
        hopper_dq.launch_dq((q, k, v, do, o, lse, stat, d_q), is_causal, scale, dq_tile)
        hopper_dkdv.launch_dkdv((q, k, v, do, stat, d_k, d_v), is_causal, scale, dkdv_tile)
    else:
        dq_portable, dkdv_portable = (tile_for(kernel, q, is_causal) for kernel in ("dq", "dkdv"))
        delta, band = torch.empty_like(lse), () if bounds is None else (bounds,)
        ours, theirs = (q, k, v, o, do, lse, delta, d_q, *band), (q, k, v, do, lse, delta, d_k, d_v, *band)
        backward.launch_dq(ours, is_causal, scale, dq_portable, window, softcap)
        backward.launch_dkdv(theirs, is_causal, scale, dkdv_portable, window, softcap)


def _hopper_knows(q: Tensor, k: Tensor, window: int | None, bounds: Tensor | None, softcap: float | None) -> bool:
    """True if the Hopper kernels know these scores: plain ones, and up to head_dim 128 those of a window over as many
    keys as queries."""
    windowed = q.shape[-1] <= 128 and q.shape[-2] == k.shape[-2]
    return bounds is None and softcap is None and (window is None or windowed)


def runs_hopper_kernels(q: Tensor) -> bool:
    """True if the Hopper kernels take these inputs, where they know the scores. Up to head_dim 32 their tiles would be
    mostly padding."""
    is_fit = not INTERPRETED and q.dtype != torch.float32 and q.shape[-1] > 32
    return is_fit and torch.cuda.get_device_capability(q.device) == (9, 0)


def sums_dq_in_any_order(q: Tensor) -> bool:
    """True if the backward for these inputs is Hopper's single kernel, rather than the pair with one owner for dq."""
    return runs_hopper_kernels(q) and q.shape[-1] <= 128 and not torch.are_deterministic_algorithms_enabled()


def for_copy_engine(t: Tensor) -> Tensor:
    """`t`, or a copy with rows that the copy engine can address: 16-byte aligned, none shared by a stride of 0."""
    unit = 16 // t.element_size()
    if t.data_ptr() % 16 == 0 and all(stride % unit == 0 and stride > 0 for stride in t.stride()[:-1]):
        return t
    padded = t.new_empty((*t.shape[:-1], -(-t.shape[-1] // unit) * unit))
    return padded[..., : t.shape[-1]].copy_(t)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(four_dims(q)).reshape(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _gradients_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = (torch.empty_like(four_dims(t)).reshape(t.shape) for t in (q, k, v))
    return d_q, d_k, d_v


def _below_autograd(*arguments: Any) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return cast(tuple[Tensor, Tensor], forward_op(*arguments))


class _Differentiable(torch.autograd.Function):
    """The forward operator recorded for backward, with both of its results."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, window: int | None,
        bounds: Tensor | None, softcap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o, lse = _below_autograd(q, k, v, is_causal, scale, window, bounds, softcap)
        _save(ctx, q, k, v, o, lse, is_causal, scale, window, bounds, softcap)
        return o, lse

    backward = staticmethod(_backward)


def _autograd(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, window: int | None = None,
    bounds: Tensor | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the forward operator where gradients may be wanted."""
    arguments = q, k, v, is_causal, scale, window, bounds, softcap
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return cast(tuple[Tensor, Tensor], _Differentiable.apply(*arguments))  # type: ignore[no-untyped-call]
    return _below_autograd(*arguments)


# Defined piece by piece: `torch.library.custom_op` and `register_autograd` do the same, but the one checks every call
# for aliased outputs and the other wraps every backward, which took longer than both kernels on short sequences.
_FORWARD, _BACKWARD = "trainstep::flash_attention_forward", "trainstep::flash_attention_backward"
for _name, _computed, _traced in (_FORWARD, _forward, _forward_fake), (_BACKWARD, _gradients, _gradients_fake):
    _schema = torch.library.infer_schema(_computed, mutates_args=())
    torch.library.define(_name, _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_name, "cpu" if INTERPRETED else "cuda", _computed)
    torch.library.register_fake(_name, _traced)
torch.library.impl(_FORWARD, "Autograd", _autograd)
forward_op = torch.ops.trainstep.flash_attention_forward.default
backward_op = torch.ops.trainstep.flash_attention_backward.default
