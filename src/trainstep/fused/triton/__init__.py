"""The kernels of the fused operators, for GPUs since Ampere. Sums are in float32, results are rounded once.

Each is launched through `attention.triton.Launcher`, which spares the host's work of a launch seen before.
"""

from typing import Any

from torch import Tensor

from trainstep.attention.triton import INTERPRETED as INTERPRETED
from trainstep.attention.triton import Launch


def named_arguments(kernel: Any, tensors: dict[str, Tensor], *programs: int, **named: Any) -> Launch:
    """`named`, and of every tensor called "x": x_ptr, and stride_x where the kernel has it, its first stride."""
    found: dict[str, Any] = {f"{name}_ptr": tensor for name, tensor in tensors.items()}
    found |= {f"stride_{name}": tensor.stride(0) for name, tensor in tensors.items() if tensor.ndim}
    return programs, named | {name: value for name, value in found.items() if name in kernel.arg_names}


def warps_for(elements: int) -> int:
    """Warps for a program that holds so many numbers in each of its tensors: 16 a thread, where that makes 1 to 16."""
    warps = max(1, min(16, elements // 512))
    return 1 << (warps.bit_length() - 1)  # Triton takes powers of two
