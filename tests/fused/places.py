"""Where the kernels are tested: on a GPU, or on a CPU in Triton's interpreter, which `test_interpreter` starts anew."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainstep.fused.triton import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
"""The interpreter rounds to bfloat16 as no GPU does."""
HERE = [] if INTERPRETED else [pytest.mark.gpu]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = True) -> torch.Tensor:
    """Standard normal numbers."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype).requires_grad_(grad)


class Products(TorchDispatchMode):
    """The shapes of products that are computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **kwargs or {})
        if function.name().startswith(("aten::mm", "aten::addmm")):
            self.shapes.append(tuple(found.shape))
        return found
