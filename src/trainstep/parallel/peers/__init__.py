"""Peers of ours, as their authors would run them: torch's data parallel training, Liger-Kernel's operators.

A file is one peer: each setting with its value, who says so, and why. A peer gets as many settings to choose from as
ours gets (`trainstep.base.schemes`), and its settings that depend on the workload are taken from what one process found
of it. Peers of attention stand in `trainstep.attention`, beside ours: `sdpa`, `flex`, `flash_attn`.
"""
