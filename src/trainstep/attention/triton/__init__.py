"""FlashAttention-2 in Triton: `forward` and `backward` hold the kernels, `function` joins them to PyTorch."""
