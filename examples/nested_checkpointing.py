"""Nested activation checkpointing: peak memory and recomputation of L blocks, counted on a CPU.

    python -m examples.nested_checkpointing

All L blocks are one block, so that its weights and gradients weigh the same for every L and what grows is activations.
notebook/theory.md derives what each strategy takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainstep import ModelConfig
from trainstep.measure.memory import MIB, LiveStorages
from trainstep.step.model.transformer import build_transformer

Blocks = Callable[[Tensor], Tensor]
BATCH, CONTEXT = 2, 64
MODEL = ModelConfig(vocab_size=16, d_model=64, d_ff=256, num_layers=1, num_heads=4, max_context=CONTEXT)


def again(function: Blocks, x: Tensor) -> Tensor:
    """Keep `x` alone, and run `function` again in backward."""
    return checkpoint(function, x, use_reentrant=False)


def plain(block: Blocks, blocks: int, x: Tensor) -> Tensor:
    """No checkpointing."""
    for _ in range(blocks):
        x = block(x)
    return x


def segments(size: int, block: Blocks, blocks: int, x: Tensor) -> Tensor:
    """A checkpoint every `size` blocks."""
    for start in range(0, blocks, size):
        x = again(partial(plain, block, min(size, blocks - start)), x)
    return x


def roots(block: Blocks, blocks: int, x: Tensor) -> Tensor:
    """A checkpoint every √L blocks."""
    return segments(math.isqrt(blocks), block, blocks, x)


def halves(block: Blocks, blocks: int, x: Tensor) -> Tensor:
    """A checkpoint for either half, in which each half has the same for its own halves."""
    if blocks == 1:
        return block(x)
    for part in (blocks // 2, blocks - blocks // 2):
        x = again(partial(halves, block, part), x)
    return x


def prefixes(block: Blocks, blocks: int, x: Tensor) -> Tensor:
    """A checkpoint of all blocks, in it one of all but the last, and so on: only the first input is ever kept."""
    return again(lambda x: block(prefixes(block, blocks - 1, x) if blocks > 1 else x), x)


STRATEGIES: Mapping[str, Callable[[Blocks, int, Tensor], Tensor]] = {
    "none": plain,
    "every block": partial(segments, 1),
    "every √L blocks": roots,
    "halves of halves": halves,
    "prefixes": prefixes,
}


def measure(strategy: str, blocks: int) -> tuple[int, int]:
    """(peak bytes beyond weights and input, blocks that ran again) of one forward and backward."""
    model = build_transformer(MODEL)
    x, calls = torch.randn(BATCH, CONTEXT, MODEL.d_model, requires_grad=True), 0

    def block(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return model.blocks[0](x, model.rotary)

    with LiveStorages([x, *model.parameters(), *model.buffers()]) as live:
        at_rest = live.bytes
        STRATEGIES[strategy](block, blocks, x).sum().backward()
    return live.peak - at_rest, calls - blocks


def main() -> None:
    """Print every strategy for several L, with what a block more costs."""
    sizes = (4, 8, 16, 32)
    one = measure("none", 2)[0] - measure("none", 1)[0]
    print(f"A block keeps {one / MIB:.3f} MiB, its input is {BATCH * CONTEXT * MODEL.d_model * 4 / MIB:.3f} MiB of it.")
    print(f"{'peak (MiB)':18}" + "".join(f"L = {size:<8}" for size in sizes) + "blocks run again")
    for strategy in STRATEGIES:
        found = [measure(strategy, size) for size in sizes]
        peaks = "".join(f"{peak / MIB:<12.2f}" for peak, _ in found)
        print(f"{strategy:18}{peaks}{', '.join(str(count) for _, count in found)}")


if __name__ == "__main__":
    main()
