"""Seconds that one GPU computes in a training step: matrix products, memory traffic, and launches by the host.

A phase takes what its products take at the rate of a large product, and what everything between the products reads and
writes takes at the rate of a large copy; or as long as the host takes to launch it, if that is more.

Products. A result of m × n is cut into tiles, and tiles are dealt out to the multiprocessors in rounds. The last round
is as long as a full one: 160 tiles on 132 multiprocessors take two. Libraries choose among tile sizes; smaller ones
fill the last round better and are slower each (`TILES`). So seconds = rounds · multiprocessors · tile · 2k / (rate ·
speed), least over the tiles.

Traffic. N tokens, T = N·D, A = N·F, C = B·H·S² elements; e bytes of the products' inputs. Forward of a block, in bytes:

                    eager                                          compiled
    norms           16T                                            2(4 + e)T
    rotary q, k     72T; half precision converts around it: 96T    4eT
    residual adds   2(8 + e)T                                      2(8 + e)T
    SwiGLU          5eA                                            3eA
    transposes      2eT, eager attention twice that                2eT
    attention's own 4eT                                            4eT
    scores          32C: product, scale, mask, softmax, product    4eC: product, the rest in one, product
    autocast        30T: a copy for each product's input
                    6 for each weight: a copy in half precision    6 for each weight

Fused attention has no scores: its products take `FUSED_ATTENTION` of the rate, causal ones half the FLOPs, backward 2.5
times forward. Backward's traffic is twice forward's, as each operator reads a gradient beside what it saved; weights'
gradients are converted too. The optimizer's bytes per parameter were counted by `trainstep profile`.

Rounds, tiles' speeds and the traffic per operator are a model; `notebook/theory.md` holds it against measurements.
Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainstep.base.config import ModelConfig, StepConfig, keeps_whole_blocks
from trainstep.base.errors import UnsupportedError
from trainstep.base.precision import PRECISIONS
from trainstep.plan.machine import Machine

TILES = {
    "wide": ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.85), (64, 128, 0.65)),
    "fp32": ((128, 128, 1.0), (128, 64, 0.95), (64, 64, 0.8)),
}
"""(rows, columns, speed against the best) of tensor cores and of ordinary float32 units. The speeds are assumptions."""

FUSED_ATTENTION = 0.5
"""Share of a large product's rate that fused attention reaches: on an H200 0.55 in long sequences, less in short
ones."""

OPTIMIZER_BYTES = {"adamw-foreach": 84, "adamw-fused": 28, "sgd": 20}
"""Read and written per float32 parameter."""


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of one phase."""

    products: float
    traffic: float
    launches: float = 0.0

    @property
    def total(self) -> float:
        """Device and host work side by side."""
        return max(self.products + self.traffic, self.launches)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds that one GPU computes in a step, without any communication."""

    forward: PhaseSeconds  # the loss included
    backward: PhaseSeconds  # what checkpointing computes again included
    optimizer: PhaseSeconds

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total + self.optimizer.total

    @property
    def limit(self) -> str:
        """Part that takes most of the time."""
        phases = (self.forward, self.backward, self.optimizer)
        parts = {
            "matrix products": sum(each.products for each in phases),
            "memory traffic": sum(each.traffic for each in phases),
            "launches": sum(each.launches for each in phases if each.launches > each.products + each.traffic),
        }
        return max(parts, key=parts.__getitem__)


def product_seconds(m: int, n: int, k: int, flops: float, multiprocessors: int, *, fp32: bool, batch: int = 1) -> float:
    """Seconds of `batch` products (m × k)·(k × n) at `flops` FLOP/s of a large one."""

    def with_tile(rows: int, columns: int, speed: float) -> float:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * batch
        rounds = math.ceil(tiles / multiprocessors)
        return rounds * multiprocessors * rows * columns * 2 * k / (flops * speed)

    return min(with_tile(*tile) for tile in TILES["fp32" if fp32 else "wide"])


def step_seconds(
    model: ModelConfig,
    step: StepConfig,
    machine: Machine,
    *,
    tensor_parallel: int = 1,
    casts_weights: bool | None = None,
    optimizer_share: float = 1.0,
) -> StepSeconds:
    """Seconds of each phase on one GPU.

    Args:
        model: the whole model.
        step: batch is that of all `tensor_parallel` GPUs together.
        tensor_parallel: GPUs that share heads, feed-forward and vocabulary; the rest is divided by tokens.
        casts_weights: whether each product's weights are converted first; by default under autocast.
        optimizer_share: the fraction of the GPU's parameters that its optimizer updates.

    Raises:
        UnsupportedError: checkpointing other than none and every-1, whose recomputation is not modelled.
    """
    if not keeps_whole_blocks(step.checkpointing):
        raise UnsupportedError(f"no time model for checkpointing={step.checkpointing}; there is one for none, every-1")
    blocks = _Block(model, step, machine, tensor_parallel, casts_weights)
    layers, copy = model.num_layers, machine.copy_bytes_per_s
    tokens, vocabulary, width = step.batch * step.context, -(-model.vocab_size // tensor_parallel), model.d_model
    logits = tokens * vocabulary
    head = blocks.product(tokens, vocabulary, width)
    head_back = blocks.product(tokens, width, vocabulary) + blocks.product(vocabulary, width, tokens)
    launch_forward, launch_backward = machine.launch_seconds(step.compile, step.attention)
    forward = PhaseSeconds(
        layers * blocks.forward_products + head,
        layers * blocks.forward_traffic + (8 + (6 if blocks.element == 2 else 0)) * logits / copy,
        layers * launch_forward,
    )
    again = 0 if step.checkpointing == "none" else layers
    backward = PhaseSeconds(
        layers * blocks.backward_products + head_back + again * blocks.forward_products,
        layers * blocks.backward_traffic + 16 * logits / copy + again * blocks.forward_traffic,
        layers * launch_backward + again * launch_forward,
    )
    parameters = optimizer_share * model.num_parameters / tensor_parallel
    bytes_per_parameter = OPTIMIZER_BYTES[step.optimizer] * PRECISIONS[step.precision].stored_bytes / 4
    rate = copy * machine.optimizer_fraction[step.optimizer]
    return StepSeconds(forward, backward, PhaseSeconds(0.0, bytes_per_parameter * parameters / rate))


class _Block:
    """Products and traffic of one block on one GPU, forward and backward, in seconds."""

    def __init__(
        self, model: ModelConfig, step: StepConfig, machine: Machine, tensor_parallel: int, casts: bool | None
    ) -> None:
        self._machine, self._precision = machine, step.precision
        t, autocast = tensor_parallel, PRECISIONS[step.precision].is_autocast
        e = self.element = PRECISIONS[step.precision].computed_bytes
        d, f, heads, s, k = model.d_model, model.d_ff, model.num_heads, step.context, model.head_dim
        tokens = step.batch * s
        own, inner = -(-d // t), -(-f // t)  # columns of the attention's and the feed-forward's matrices on this GPU
        weights = 4 * d * own + 3 * d * inner
        stream, wide = tokens * own, tokens * inner  # the rest of the stream is other GPUs'
        groups = step.batch * -(-heads // t)
        scores = groups * s * s
        product = self.product
        attention_in, feed_forward_in = product(tokens, own, d), product(tokens, inner, d)
        attention_out, feed_forward_out = product(tokens, d, own), product(tokens, d, inner)
        self.forward_products = 3 * attention_in + attention_out + 2 * feed_forward_in + feed_forward_out
        attention_back = 3 * (attention_out + product(own, d, tokens)) + attention_in + product(d, own, tokens)
        feed_forward_back = 2 * (feed_forward_out + product(inner, d, tokens)) + feed_forward_in
        feed_forward_back += product(d, inner, tokens)
        self.backward_products = attention_back + feed_forward_back
        is_eager = step.attention == "eager"
        if is_eager:
            pair = product(s, s, k, groups) + product(s, k, s, groups)
            self.forward_products += pair
            self.backward_products += 2 * pair
        else:
            rate = machine.matmul_flops[step.precision] * FUSED_ATTENTION
            attention = 2 * step.batch * s * (s + 1) * own / rate  # 2 products · 2 · S(S + 1)/2 pairs
            self.forward_products += attention
            self.backward_products += 2.5 * attention
        if step.compile == "off":
            traffic = (16 + (72 if e == 4 else 96) + 2 * (8 + e) + 4 * e) * stream + 5 * e * wide
            traffic += (4 if is_eager else 2) * e * stream + (32 * scores if is_eager else 0)
            traffic += 30 * stream if autocast else 0
        else:
            traffic = (2 * (4 + e) + 4 * e + 2 * (8 + e) + 6 * e) * stream + 3 * e * wide
            traffic += 4 * e * scores if is_eager else 0
        cast = 6 * weights if (autocast if casts is None else casts) else 0
        self.forward_traffic = (traffic + cast) / machine.copy_bytes_per_s
        self.backward_traffic = (2 * traffic + cast) / machine.copy_bytes_per_s

    def product(self, m: int, n: int, k: int, batch: int = 1) -> float:
        flops = self._machine.matmul_flops[self._precision]
        fp32 = PRECISIONS[self._precision].rate == "fp32"
        return product_seconds(m, n, k, flops, self._machine.multiprocessors, fp32=fp32, batch=batch)
