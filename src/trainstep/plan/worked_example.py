"""The published exercise (CS336 2025, assignment 2, `communication_accounting`), worked: 126 blocks of two matrices.

A block is d_model × d_ff and d_ff × d_model, nothing else: no attention, embedding, head or activation function.
Master weights, accumulated gradients and AdamW's two moments are float32; activations and what travels are bfloat16;
nothing is checkpointed. Saved for backward is each matrix's input: d_model + d_ff elements per block and token. GB are
1e9 bytes. docs/theory.md tells the answers. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
BYTES_PER_S = 2 * 9e10
"""A TPU v5p, as the exercise gives them: both directions of one axis of its torus."""

FSDP_RANKS, TENSOR_RANKS = 16, 4
FSDP_AXES, TENSOR_AXES = 2, 1
"""The mesh: X = 16 over two axes of the torus, Y = 4 over the third."""


def compute_bound_tokens(*, overlapped: bool) -> float:
    """Tokens per device from which the forward pass of `XXL` on the mesh is limited by computation."""
    alpha = intensity(FLOPS_PER_S, BYTES_PER_S)
    return mesh_tokens(
        alpha, XXL.d_ff, TENSOR_RANKS, fsdp_axes=FSDP_AXES, tensor_axes=TENSOR_AXES, overlapped=overlapped
    )
