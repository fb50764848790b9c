"""The fastest implementation of forward + backward, measured: written by `measure_choice.measure`, not by hand.

(architecture, dtype, head_dim, causal) → (from this length on, implementation), ascending.
"""

FASTEST: dict[tuple[str, str, int, bool], tuple[tuple[int, str], ...]] = {
    ("sm_90", "bfloat16", 64, False): ((0, "sdpa-cudnn"),),
    ("sm_90", "bfloat16", 64, True): ((0, "sdpa-cudnn"),),
    ("sm_90", "float16", 64, False): ((0, "sdpa-cudnn"),),
    ("sm_90", "float16", 64, True): ((0, "sdpa-cudnn"),),
    ("sm_90", "float32", 64, False): ((0, "flash-triton"),),
    ("sm_90", "float32", 64, True): ((0, "flash-triton"),),
    ("sm_90", "bfloat16", 128, False): ((0, "sdpa-cudnn"),),
    ("sm_90", "bfloat16", 128, True): ((0, "sdpa-cudnn"),),
    ("sm_90", "float16", 128, False): ((0, "sdpa-cudnn"),),
    ("sm_90", "float16", 128, True): ((0, "sdpa-cudnn"),),
    ("sm_90", "float32", 128, False): ((0, "sdpa-efficient"),),
    ("sm_90", "float32", 128, True): ((0, "sdpa-efficient"),),
    ("sm_90", "bfloat16", 256, False): ((0, "flash-triton"),),
    ("sm_90", "bfloat16", 256, True): ((0, "flash-triton"), (4096, "sdpa-cudnn")),
    ("sm_90", "float32", 16, False): ((0, "flash-triton"),),
    ("sm_90", "float32", 16, True): ((0, "flash-triton"),),
    ("sm_90", "float32", 32, False): ((0, "flash-triton"),),
    ("sm_90", "float32", 32, True): ((0, "flash-triton"),),
    ("sm_90", "float32", 256, False): ((0, "sdpa-efficient"),),
    ("sm_90", "bfloat16", 16, False): ((0, "flash-triton"),),
    ("sm_90", "bfloat16", 16, True): ((0, "flash-triton"),),
    ("sm_90", "float16", 16, False): ((0, "flash-triton"),),
    ("sm_90", "float16", 16, True): ((0, "flash-triton"),),
    ("sm_90", "bfloat16", 32, False): ((0, "flash-triton"),),
    ("sm_90", "bfloat16", 32, True): ((0, "flash-triton"),),
    ("sm_90", "float16", 32, False): ((0, "flash-triton"),),
    ("sm_90", "float16", 32, True): ((0, "flash-triton"),),
    ("sm_90", "float32", 256, True): ((0, "sdpa-efficient"),),
}
