"""FlashAttention-2 in Triton, for GPUs since Ampere: `forward`, and the backward in two kernels, `dq` and `dkdv`."""
