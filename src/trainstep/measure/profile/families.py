"""Kernels by what they do, told by their names.

Names are those that cuBLAS, cuDNN, CUTLASS, PyTorch's own CUDA code, Triton (our kernels and torch.compile's) and NCCL
give their kernels. Copies from GPU to GPU are communication too. Matrix products are of two kinds that must not be
confused: on tensor cores, and on the ordinary float32 units (`simt`, `sgemm`, `ffma`), which are an order of magnitude
slower. On a CPU operators stand for kernels.
"""

from __future__ import annotations

import re
from typing import Literal

Family = Literal[
    "tensor-core matmul",
    "FP32 SIMT matmul",
    "matmul",
    "fused attention",
    "softmax",
    "normalisation",
    "elementwise",
    "reduction",
    "copy",
    "optimizer",
    "communication",
    "other",
]
MATMULS: tuple[Family, ...] = ("tensor-core matmul", "FP32 SIMT matmul", "matmul")
"""`matmul` is a CPU's, where there is only one kind."""

_ATTENTION_OPERATOR = re.compile(r"(flash|efficient|cudnn)_attention|scaled_dot_product")

# The first pattern found in a name decides, so the order matters: most kernels carry further words in their template
# arguments, and every kernel of PyTorch's that maps elements is an "elementwise_kernel" of something more telling.
_GPU: tuple[tuple[Family, str], ...] = (
    ("communication", r"^nccl|ncclDevKernel|ncclKernel|all_reduce_kernel|allreduce_kernel|all_gather_kernel|nvshmem"),
    ("communication", r"^Memcpy PtoP|^\[CUDA memcpy Peer-to-Peer"),  # from GPU to GPU, by a copy engine
    ("communication", r"symmetric_memory::|^(void )?barrier_kernel|(put|wait)_signal_kernel"),
    ("copy", r"^Memcpy|^Memset|^\[CUDA mem"),
    ("optimizer", r"multi_tensor_apply_kernel|FusedAdam|fused_adam|FusedSgd|FusedAdagrad|adamw_kernel|lamb_kernel"),
    (
        "fused attention",
        r"flash_(fwd|bwd)|flash::|flash_attn|Flash_(fwd|bwd)|FlashAttn|fmha|sdpa_(sm|fprop|bprop|flash)|"
        r"cudnn.*(sdpa|flash)|flex_attention|mem_eff|attention_kernel_backward_batched|"
        r"^(flash_attention_\w+|attn_fwd|_attn_\w+)$",
    ),
    ("FP32 SIMT matmul", r"simt|ffma|f32f32_f32f32|(ampere|volta|turing|maxwell|pascal|hopper)_(s|d)gemm"),
    ("FP32 SIMT matmul", r"(^|[^a-z])(gemv|gemvN|gemv2[NT]|gemvNSP|gemmSN|gemmk1|dot_kernel|reduce_1Block)|sgemm_\d"),
    ("reduction", r"splitK_?reduce|splitKreduce"),
    (
        "tensor-core matmul",
        r"nvjet|wgmma|tensorop|xmma_gemm|[ish]\d{3,5}gemm|bf16gemm|_(h|fp16_s|bf16_s|tf32_?s?)\d*(884|1688|16816)|"
        r"16816gemm|1688gemm|cutlass.*gemm|cutlass_\d+|gemm::|Gemm|GemmUniversal|sm\d+_gemm|cublasLt|"
        r"triton_tem_\w*(mm|conv)|(^|_)gemm",
    ),
    ("softmax", r"soft_?max|SoftMax|triton_\w*softmax"),
    (
        "normalisation",
        r"layer_?norm|LayerNorm|rms_?norm|RMSNorm|batch_norm|BatchNorm|group_norm|GroupNorm|GammaBeta|"
        r"RowwiseMoments|cuComputeGradInput|cuComputePartGrad|bn_(fw|bw)|triton_(red|per)_\w*rsqrt",
    ),
    ("copy", r"copy_kernel|CatArrayBatchedCopy|copy_device_to_device|transpose_kernel"),
    (
        "copy",
        r"triton_poi_fused_(_?(to_copy|copy|clone|unsafe_view|view|transpose|t|permute|expand|cat|slice|unsqueeze|"
        r"squeeze)_)+\d+$",
    ),
    ("reduction", r"reduce_kernel|nll_loss_\w+_reduce|ReduceOp|DeviceReduce|DeviceScan|cub::.*(Reduce|Scan)"),
    ("reduction", r"triton_(red|per)_|segment_reduce"),
    ("elementwise", r"elementwise_kernel|elementwise|FillFunctor|triton_(poi|for)_|dropout|masked_fill|triu_tril"),
)
_CPU: tuple[tuple[Family, str], ...] = (
    ("communication", r"^(c10d::|gloo:|nccl:)|_c10d_functional"),
    ("optimizer", r"^aten::_(fused_(adam|adamw|sgd|adagrad)_?|foreach_)"),
    ("fused attention", r"scaled_dot_product|flash_attention|efficient_attention|flex_attention"),
    ("matmul", r"^(aten|mkldnn|mkl|onednn)::_?(mm|addmm|bmm|baddbmm|matmul|linear|addbmm|mv|addmv|dot|mkl_linear|"
               r"linear_pointwise|mkldnn_convolution|conv\w*|_convolution|convolution\w*)(_out)?$"),
    ("softmax", r"softmax"),
    ("normalisation", r"(layer|rms|batch|group)_norm"),
    ("copy", r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|stack|_reshape_copy|repeat|repeat_interleave)$"),
    ("reduction", r"^aten::(sum|mean|max|min|amax|amin|norm|linalg_vector_norm|logsumexp|argmax|argmin|all|any|var|std|"
                  r"cumsum|prod|nll_loss\w*|cross_entropy_loss)$"),
    ("elementwise", r"^aten::(add|sub|mul|div|pow|exp|log|neg|sqrt|rsqrt|silu|gelu|relu|tanh|sigmoid|sin|cos|abs|where|"
                    r"masked_fill|fill|zero|lerp|addcmul|addcdiv|clamp|reciprocal|tril|triu|bitwise_\w+|logical_\w+|"
                    r"threshold_backward|silu_backward|gelu_backward|sigmoid_backward|tanh_backward|ne|eq|lt|gt|le|ge|"
                    r"maximum|minimum|square|dropout|native_dropout)_?$"),
)  # fmt: skip
_GPU_PATTERNS = [(family, re.compile(pattern)) for family, pattern in _GPU]
_CPU_PATTERNS = [(family, re.compile(pattern)) for family, pattern in _CPU]
_GENERIC_TRITON = re.compile(r"^(forward_kernel|backward_kernel|((prepare_|finish_)?dq|dkdv|delta)_kernel)$")


def kernel_family(name: str, operator: str = "") -> Family:
    """The family of a GPU kernel, copy or fill.

    Args:
        name: as the profiler has it, demangled.
        operator: the operator that launched it, for kernels whose own name says little.
    """
    if _ATTENTION_OPERATOR.search(operator) or _GENERIC_TRITON.match(name):
        return "fused attention"
    return next((family for family, pattern in _GPU_PATTERNS if pattern.search(name)), "other")


def operator_family(name: str) -> Family:
    """The family of an operator on a CPU."""
    return next((family for family, pattern in _CPU_PATTERNS if pattern.search(name)), "other")


def short_name(name: str, limit: int = 90) -> str:
    """A kernel's name for tables: without return type, namespaces and arguments, but with what tells kernels apart.

    `void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>, …>(int, …)` becomes
    `vectorized_elementwise_kernel<4, MulFunctor<float>, …>`. Operators, copies and fills keep their names.
    """
    if re.match(r"Memcpy|Memset|\[CUDA|\w+::\w+$", name):
        return name
    text = re.sub(r"^(void|static|inline) +", "", name.strip())
    text = text.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    text = re.sub(r"::operator\(\)\(\) const|::\{lambda\([^{}]*?\)#\d+\}|\((at::)?TensorIterator[^()<>]*\)", "", text)
    text = _without_arguments(text)
    text = re.sub(r"\b(?:[A-Za-z_]\w*::)+", "", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _without_arguments(text: str) -> str:
    """Cut the list of arguments: the first parenthesis that is outside of all angle brackets."""
    depth = 0
    for index, character in enumerate(text):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= text[index - 1] != "-"
        elif character == "(" and depth == 0 and index > 0:
            return text[:index]
    return text
