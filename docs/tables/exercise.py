"""Two worked examples of docs/theory.md: a published exercise, and all-reduces that do not cut the tensor.

The exercise (CS336 2025, assignment 2, `communication_accounting`), worked: 126 blocks of two matrices.

A block is d_model × d_ff and d_ff × d_model, nothing else: no attention, embedding, head or activation function.
Master weights, accumulated gradients and AdamW's two moments are float32; activations and what travels are bfloat16;
nothing is checkpointed. Saved for backward is each matrix's input: d_model + d_ff elements per block and token. GB are
1e9 bytes.

All-reduce over a ring without cutting the tensor into chunks, for contrast: why everyone cuts.

P bytes on each of n ranks in a ring, W bytes/s on a link.

    way                       passes      bytes on the busiest link   seconds
    chunks (the ring)         2(n − 1)    2(n − 1)/n · P              2(n − 1)/n · P/W
    all to all                n − 1       (n − 1) · P                 (n − 1) · P/W
    reduce, then broadcast    2(n − 1)    P, on one link 2P           2(n − 1) · P/W

All to all: every rank's full tensor goes once around, and each rank adds up all it sees. All links work all the time,
at n/2 times the bytes. Reduce, then broadcast: a running sum goes from rank to rank to the last, and the result around
again. No link carries more than twice the tensor, but only one works at a time, so it takes n times as long as the
ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainstep.errors import UsageError
from trainstep.plan.limits import intensity, mesh_tokens


@dataclass(frozen=True)
class FeedForwardStack:
    """A model of nothing but feed-forward blocks."""

    d_model: int
    d_ff: int
    num_blocks: int

    @property
    def parameters(self) -> int:
        """Both matrices of all blocks."""
        return 2 * self.d_model * self.d_ff * self.num_blocks

    @property
    def static_bytes(self) -> int:
        """Weights, gradients and two moments, four bytes each."""
        return 4 * 4 * self.parameters

    @property
    def activation_bytes_per_token(self) -> int:
        """Saved for backward, in bfloat16."""
        return 2 * self.num_blocks * (self.d_model + self.d_ff)

    def devices(self, device_bytes: float, tokens: int = 0) -> int:
        """How many devices' memory all of it is worth."""
        return math.ceil((self.static_bytes + tokens * self.activation_bytes_per_token) / device_bytes)

    def bytes_per_device(self, shards: int, tokens: int = 0) -> float:
        """Weights, gradients, moments and half of the activations sharded; the other half on every device."""
        activations = tokens * self.activation_bytes_per_token
        return (self.static_bytes + activations / 2) / shards + activations / 2

    def shards_to_fit(self, device_bytes: float, tokens: int = 0) -> int:
        """The fewest shards with less than `device_bytes` on a device.

        Raises:
            UsageError: the half of the activations that is not sharded does not fit alone.
        """
        activations = tokens * self.activation_bytes_per_token
        room = device_bytes - activations / 2
        if room <= 0:
            raise UsageError(
                f"{tokens} tokens leave {activations / 2:.3g} bytes of activations on every device, which has "
                f"{device_bytes:.3g}: no number of shards is enough"
            )
        return math.floor((self.static_bytes + activations / 2) / room) + 1


XXL = FeedForwardStack(d_model=16_384, d_ff=53_248, num_blocks=126)

FLOPS_PER_S = 4.6e14
BYTES_PER_S = 2 * 9e10  # A TPU v5p, as the exercise gives them: both directions of one axis of its torus

FSDP_RANKS, TENSOR_RANKS = 16, 4
FSDP_AXES, TENSOR_AXES = 2, 1  # The mesh: X = 16 over two axes of the torus, Y = 4 over the third


def compute_bound_tokens(*, overlapped: bool) -> float:
    """Tokens per device from which the forward pass of `XXL` on the mesh is limited by computation."""
    alpha = intensity(FLOPS_PER_S, BYTES_PER_S)
    return mesh_tokens(
        alpha, XXL.d_ff, TENSOR_RANKS, fsdp_axes=FSDP_AXES, tensor_axes=TENSOR_AXES, overlapped=overlapped
    )


AlternateRing = Literal["all to all", "reduce, then broadcast"]


def alternate_passes(way: AlternateRing, world_size: int) -> int:
    """Hand-overs of the full tensor that follow one another.

    Raises:
        UsageError: no ranks.
    """
    if world_size < 1:
        raise UsageError(f"world_size is {world_size}; expected at least 1")
    return (1 if way == "all to all" else 2) * (world_size - 1)


def alternate_bytes_sent(way: AlternateRing, payload: int, world_size: int) -> int:
    """Bytes sent by all ranks together."""
    senders = world_size if way == "all to all" else 1  # in each pass
    return alternate_passes(way, world_size) * senders * payload


def alternate_seconds(way: AlternateRing, payload: float, world_size: int, bytes_per_s: float) -> float:
    """Time of one all-reduce, calls and hand-overs costing nothing."""
    return alternate_passes(way, world_size) * payload / bytes_per_s
