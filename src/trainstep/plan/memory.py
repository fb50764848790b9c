"""Bytes that a training step of the built-in Transformer needs: at rest, per block, and at its peak per checkpointing.

Derived from what autograd saves and what backward holds beside it; tests compare every figure with measured bytes.
Sizes: B sequences of S tokens, N = B·S; D d_model, F d_ff, H heads, V vocabulary; T = N·D, A = N·F, C = B·H·S² scores.
Bytes per element: e of matrix products (4, or 2 in half precision), r of the residual stream and w of the weights (4,
or 2 in bf16-pure).

At rest. Weights w·P, AdamW's two moments 2·w·P, rotary tables. Gradients add w·P during backward.

One block keeps
    each of 2 norms      4T (its input, float32) + 4N (1/rms), and another 4T where the norm is not fused (CPU)
    projections' inputs  eT for query, key, value; eT for gate, up; eT for output. Under autocast every projection of a
                         float32 input has its own cast: 3eT and 2eT
    attention            q, k, v: 3eT; eager: the probabilities eC and the mask S² (CUDA autocast: softmax in float32,
                         4C, and its cast, 2C); fused: the result eT and the log-sum-exp 4·B·H·S
    SwiGLU               gate, silu(gate), up and their product: 4eA
    weights' casts       2 bytes for each element of the seven matrices, under autocast

Backward of a block holds besides, at worst, either three gradients of SwiGLU's size where its product was freed (+2eA),
or, when the feed-forward's residuals are gone, the gradients before and after the softmax: two more score matrices, and
on CUDA a third, their product with the probabilities.

The peak is the largest of these moments:
    loss            all residuals, the logits, their float32 copy in half precision, and their log-softmax
    log-softmax     in backward: the same residuals, 12·N·V (the log-softmax and the gradients on both sides of it)
    head            the logits' gradient and the head's
    block i         gradients of everything after it, residuals of everything before it, and its own worst, as above.
                    Checkpointing every K blocks keeps r·T for each earlier group in place of residuals, and all that
                    the blocks of i's own group keep, up to i
    embedding       the end of backward: all gradients, and that of the residual stream
    optimizer       weights, gradients, state, and for the foreach AdamW another w·P (the denominators)

Without gradients nothing is kept, and every cast of a weight stays until forward ends. The peak is in the last block,
or at the head:
    rotation        the block's input and its norm's result 2rT; q, k, v and the turned q 4eT; the turned k in float32
                    beside its halves 8T, and k in float32 4T where it is in half precision
    scores          2rT, 3eT and two score matrices 2eC with two masks 2S² (CUDA autocast: 2C, and in float32 8C)
    weighted sum    2rT, 3eT, the probabilities, v in order and the result 2eT
    output          2rT, 3eT, the result twice and its projection 3eT
    feed-forward    the block's input, its middle and its norm's result 3rT; silu(gate), up and their product 3eA
    head            rT, its cast, and the logits e·N·V

Left out, as it is below one percent: step counters, token ids, the CUDA libraries' workspaces (some tens of MiB).
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainstep.base.config import ModelConfig, OptimizerImpl, StepConfig, StepMode, keeps_whole_blocks
from trainstep.base.errors import UnsupportedError
from trainstep.base.operators import ATTENTION
from trainstep.base.precision import PRECISIONS, PrecisionName

FUSED_ATTENTION = ("auto", *(name for name, each in ATTENTION.items() if each.memory == "linear"))
"""Implementations that keep q, k, v, the result and the log-sum-exp."""

BEFORE_BACKWARD = ("loss", "log-softmax")
"""The moments at which forward is through and no gradient of a parameter is there."""


@dataclass(frozen=True)
class StaticBytes:
    """Bytes that do not depend on the batch."""

    weights: int
    gradients: int
    optimizer_state: int

    @property
    def at_rest(self) -> int:
        """Before the step: there are no gradients."""
        return self.weights + self.optimizer_state


def static_bytes(num_parameters: int, precision: PrecisionName, optimizer: OptimizerImpl) -> StaticBytes:
    """Bytes of weights, gradients and optimizer state; autocast keeps all of them in float32."""
    weights = num_parameters * PRECISIONS[precision].stored_bytes
    return StaticBytes(weights, weights, 0 if optimizer == "sgd" else 2 * weights)


@dataclass(frozen=True)
class BlockBytes:
    """Bytes that one block saves for backward, and what its backward needs besides."""

    attention_half: int  # kept by the attention and its norm, weights' casts included
    feed_forward_half: int  # kept by the feed-forward and its norm, weights' casts included
    feed_forward_worst: int  # beyond what is kept, at the worst moment of the feed-forward's backward
    attention_worst: int  # beyond what the attention half keeps, at the worst moment of its backward

    @property
    def kept(self) -> int:
        """Residuals of the whole block."""
        return self.attention_half + self.feed_forward_half


def block_bytes(model: ModelConfig, step: StepConfig, *, on_cuda: bool) -> BlockBytes:
    """Residuals of one block, uncompiled.

    Raises:
        UnsupportedError: an attention implementation that is neither eager nor fused.
    """
    sizes = _Sizes(model, step, on_cuda)
    e, tokens, stream, wide, scores = sizes.element, sizes.tokens, sizes.stream, sizes.wide, sizes.scores
    copies, casts = (1, 2) if sizes.autocast else (0, 0)  # further casts of the same input, bytes of a weight's
    per_query = 4 * tokens * model.num_heads
    if step.attention == "eager":
        in_float32 = sizes.autocast and on_cuda
        attention = 3 * e * stream + step.context**2 + (6 if in_float32 else e) * scores
        beside = (3 if on_cuda else 2) * (4 if in_float32 else e)  # CUDA's softmax backward also writes dP ∘ P
        worst = (beside - 2 if in_float32 else beside) * scores - e * stream
    elif step.attention in FUSED_ATTENTION:
        attention = 4 * e * stream + per_query
        worst = 3 * e * stream + per_query
    else:
        raise UnsupportedError(
            f"no memory formula for attention={step.attention}; there is one for eager, {', '.join(FUSED_ATTENTION)}"
        )
    d, f = model.d_model, model.d_ff
    return BlockBytes(
        attention_half=sizes.norm + (1 + 2 * copies) * e * stream + attention + e * stream + casts * 4 * d * d,
        feed_forward_half=sizes.norm + (1 + copies) * e * stream + 4 * e * wide + casts * 3 * d * f,
        feed_forward_worst=2 * e * wide + sizes.residual * stream + e * d * f,
        attention_worst=worst + sizes.residual * stream,
    )


class _Sizes:
    """Elements and bytes per element, as the module's docstring names them."""

    def __init__(self, model: ModelConfig, step: StepConfig, on_cuda: bool) -> None:
        precision = PRECISIONS[step.precision]
        self.autocast, self.element = precision.is_autocast, precision.computed_bytes
        self.residual = self.weight = precision.stored_bytes
        self.tokens = step.batch * step.context
        self.stream = self.tokens * model.d_model
        self.wide = self.tokens * model.d_ff
        self.scores = step.batch * model.num_heads * step.context**2
        self.logits = self.tokens * model.vocab_size
        gain = 4 * model.d_model if precision.is_stored_half else 0
        self.norm = (4 if on_cuda else 8) * self.stream + 4 * self.tokens + gain


@dataclass(frozen=True)
class PeakBytes:
    """A step's memory, moment by moment."""

    static: StaticBytes
    moments: dict[str, int]  # bytes alive at each moment that may be the peak
    gradients: dict[str, int]  # how many of them are gradients of parameters

    @property
    def peak(self) -> int:
        return max(self.moments.values())

    @property
    def moment(self) -> str:
        """The one of the peak."""
        return max(self.moments, key=self.moments.__getitem__)


def peak_bytes(model: ModelConfig, step: StepConfig, *, on_cuda: bool, mode: StepMode = "step") -> PeakBytes:
    """The peak of a step: of a whole one its optimizer's state is in place, of others there is none.

    Raises:
        UnsupportedError: compiled code, another loss than the dense, fused operators, checkpointing other than none and
            every-1, or an attention without a formula.
    """
    is_plain = (step.compile, step.loss, step.fused) == ("off", "dense", "none")
    if not is_plain or not keeps_whole_blocks(step.checkpointing):
        fused = "" if step.fused == "none" else f"fused={step.fused}, "
        raise UnsupportedError(
            f"no memory formula for compile={step.compile}, loss={step.loss}, {fused}"
            f"checkpointing={step.checkpointing}; there is one for uncompiled code, the dense loss, "
            "and checkpointing none or every-1"
        )
    sizes, block = _Sizes(model, step, on_cuda), block_bytes(model, step, on_cuda=on_cuda)
    static = static_bytes(model.num_parameters, step.precision, step.optimizer if mode == "step" else "sgd")
    rest = static.at_rest + 4 * step.context * model.head_dim
    if mode == "forward":
        moments = {name: rest + size for name, size in _without_gradients(model, step, on_cuda=on_cuda).items()}
        return PeakBytes(static, moments, dict.fromkeys(moments, 0))
    layers, e, logits = model.num_layers, sizes.element, sizes.logits
    head = model.vocab_size * model.d_model
    casts = 2 * (layers * (4 * model.d_model**2 + 3 * model.d_model * model.d_ff)) if sizes.autocast else 0
    is_kept, inputs = step.checkpointing == "none", sizes.residual * sizes.stream
    if is_kept:
        kept, loss_casts = layers * block.kept, 0  # what is kept includes the casts
    else:
        # Autocast's cache holds every weight's cast until the loss is there, whoever needs it.
        kept, loss_casts = layers * inputs, casts
    tail = sizes.norm + e * sizes.stream + (2 * head if sizes.autocast else 0)
    before = rest + kept + tail
    moments = {
        "loss": before + loss_casts + (8 if e == 4 else 10) * logits,
        "log-softmax": before + 12 * logits,
        "head": before + e * (logits + sizes.stream + head) + (sizes.weight * head if sizes.autocast else 0),
    }
    gradients = {"loss": 0, "log-softmax": 0, "head": sizes.weight * head}
    d, f = model.d_model, model.d_ff
    attention_gradients, feed_forward_gradients = sizes.weight * (4 * d * d + d), sizes.weight * (3 * d * f + d)
    made = sizes.weight * (head + d)  # gradients of what comes after the block
    for index in reversed(range(layers)):
        own = 1 if sizes.residual == 2 else 0  # else the first norm keeps the block's own input
        earlier = index * block.kept if is_kept else (index + own) * inputs
        feed_forward = block.kept + block.feed_forward_worst
        attention = block.attention_half + block.attention_worst + feed_forward_gradients
        moments[f"block {index}"] = rest + earlier + made + max(feed_forward, attention)
        gradients[f"block {index}"] = made + (feed_forward_gradients if attention > feed_forward else 0)
        made += attention_gradients + feed_forward_gradients
    gradients |= {"embedding": static.gradients, "optimizer": static.gradients}
    moments["embedding"] = rest + static.gradients + sizes.residual * sizes.stream
    if mode == "step":
        moments["optimizer"] = rest + static.gradients + (static.weights if step.optimizer == "adamw-foreach" else 0)
    return PeakBytes(static, moments, gradients)


def _without_gradients(model: ModelConfig, step: StepConfig, *, on_cuda: bool) -> dict[str, int]:
    """Bytes beyond those at rest at each moment of a forward pass that keeps nothing."""
    sizes = _Sizes(model, step, on_cuda)
    e, r, stream, scores = sizes.element, sizes.residual, sizes.stream, sizes.scores
    in_float32 = sizes.autocast and on_cuda
    cast = 2 if sizes.autocast else 0  # bytes of a weight's cast, and of each element of an input's
    square, wide, head = model.d_model**2, model.d_model * model.d_ff, model.vocab_size * model.d_model
    block = cast * (4 * square + 3 * wide)
    inside = 2 * r * stream + 3 * e * stream
    attention = {"rotation": inside + e * stream + 8 * stream + (4 * stream if e == 2 else 0)}
    attention["output"] = inside + 3 * e * stream
    if step.attention == "eager":
        attention["scores"] = inside + (10 * scores if in_float32 else 2 * e * scores + 2 * step.context**2)
        attention["weighted sum"] = inside + (6 if in_float32 else e) * scores + 2 * e * stream
    else:
        attention["fused attention"] = inside + e * stream + 4 * sizes.tokens * model.num_heads
    before = (model.num_layers - 1) * block
    moments = {name: before + cast * 3 * square + size for name, size in attention.items()}
    feed_forward = 3 * r * stream + 3 * e * sizes.wide
    moments["feed-forward"] = before + cast * (4 * square + 2 * wide) + feed_forward
    moments["head"] = before + block + cast * (head + stream) + r * stream + e * sizes.logits
    return moments


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes that one attention call needs, inputs and upstream gradient included.

    Let T = batch · heads · seq · head_dim elements (one of q, k, v, o) and N = batch · heads · seq² scores, e bytes
    each. The inputs q, k, v and the gradient of o are alive throughout: 4T.

    Eager. Forward multiplies, scales, and takes the softmax; each step frees the one before, so two score matrices are
    alive at once, and the probabilities P stay for backward. Backward holds P and dP and writes dS: three, and on a GPU
    four, as CUDA's softmax backward first writes dP ∘ P. With a causal mask the masked scores take the place of the
    scaled ones, and masks of a byte per score of one head are alive too.

    Flash. No score matrix exists. Backward needs o and the log-sum-exp (one float32 per query), and adds the three
    gradients and one more float32 per query (the row sums of dO ∘ O). Our single backward kernel on Hopper sums dQ
    in float32, with head_dim rounded up to 64 or 128, and in the place of that one number has both statistics of a
    query in a form of its own: 64 bytes up to head_dim 64, 8 above.
    """

    before_backward: int  # alive between forward and backward
    peak: int  # the most alive at once
    score_matrices: int  # how many of them are alive at the peak


def eager_memory(
    batch: int, heads: int, seq: int, head_dim: int, element_bytes: int, *, is_causal: bool, on_gpu: bool
) -> AttentionMemory:
    """Memory of the eager oracle, forward and backward, self-attention."""
    tensor = batch * heads * seq * head_dim * element_bytes
    scores = batch * heads * seq**2 * element_bytes
    mask = seq**2 if is_causal else 0  # saved for backward
    before = 5 * tensor + scores + mask  # the inputs, o, and P
    forward = 4 * tensor + 2 * scores + 2 * mask
    in_backward = 4 if on_gpu else 3  # P, dP, dS, and on a GPU dP ∘ P
    backward = 6 * tensor + in_backward * scores + mask  # beside the inputs: o and dv
    return AttentionMemory(before, max(forward, backward), in_backward if backward > forward else 2)


def flash_memory(
    batch: int, heads: int, seq: int, head_dim: int, element_bytes: int, *, sums_dq: bool = False
) -> AttentionMemory:
    """Memory of a flash implementation, forward and backward, self-attention: linear in seq.

    `sums_dq`: backward is the one that adds up dQ in a float32 tensor of its own (head_dim at most 128).
    """
    rows = batch * heads * seq
    tensor = rows * head_dim * element_bytes
    before = 5 * tensor + rows * 4  # the log-sum-exp is float32
    of_row = 4  # delta
    if sums_dq:  # the sum, and both statistics as its kernel reads them
        of_row = 4 * 64 + 64 if head_dim <= 64 else 4 * 128 + 8
    return AttentionMemory(before, before + 3 * tensor + rows * of_row, 0)
