"""Run each of our kernels once, on a few small shapes: what a checker of memory or of races watches.

python -m tools.trust.every_kernel            every kernel; it fails where one was not launched
python -m tools.trust.every_kernel --planted  a kernel that writes past the end of its tensor, and nothing else
"""

import importlib
import pkgutil
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from triton.runtime.jit import JITFunction

from trainstep import attention, fused
from trainstep.attention import flash_attention
from trainstep.fused import linear_cross_entropy, rope

TOKENS = 200  # of no tile a multiple


def values() -> list[Any]:
    """What the modules of attention and of the fused operators define, and what their tables hold."""
    modules = [
        importlib.import_module(found.name)
        for package in (attention, fused)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    defined = [value for module in modules for value in vars(module).values()]
    return [*defined, *(each for table in defined if isinstance(table, dict) for each in table.values())]


def ours() -> set[JITFunction]:
    """The kernels of the package: what is launched, not what those call."""
    return {each for each in values() if isinstance(each, JITFunction) and each.__name__.endswith("_kernel")}


def launched() -> set[Any]:
    """What is launched for the first time from here on; the set grows."""
    kernels: set[Any] = set()
    run = JITFunction.run

    def remembered(kernel: JITFunction, *args: Any, **named: Any) -> Any:
        kernels.add(kernel)
        return run(kernel, *args, **named)

    JITFunction.run = remembered
    return kernels


def attend(
    head_dim: int,
    dtype: torch.dtype,
    *,
    tokens: int = TOKENS,
    queries: int | None = None,
    batch: int = 1,
    is_deterministic: bool = False,
    **scoring: Any,
) -> None:
    """Forward and backward of four heads that share two heads of keys and values; queries: as many as keys."""
    torch.use_deterministic_algorithms(is_deterministic)
    q, k, v = (
        torch.randn(batch, heads, length, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for heads, length in ((4, queries or tokens), (2, tokens), (2, tokens))
    )
    flash_attention(q, k, v, **scoring).sum().backward()
    torch.use_deterministic_algorithms(False)


def attend_all() -> None:
    offsets = torch.tensor([0, 70, 71, TOKENS], device="cuda", dtype=torch.int32)
    for head_dim in (64, 128, 256):
        for is_causal in (False, True):
            attend(head_dim, torch.bfloat16, is_causal=is_causal)
            attend(head_dim, torch.float16, is_causal=is_causal, is_deterministic=True)
        attend(head_dim, torch.bfloat16, is_causal=True, window=50)
        attend(head_dim, torch.bfloat16, queries=70)
    for head_dim in (40, 96):  # less than a tile has
        attend(head_dim, torch.bfloat16, is_causal=True)
        attend(head_dim, torch.bfloat16, is_causal=True, is_deterministic=True)
    attend(64, torch.bfloat16, is_causal=True, tokens=700, window=511)  # steps without a mask between masked ones
    attend(64, torch.bfloat16, is_causal=True, batch=100)  # more tiles than multiprocessors
    for head_dim in (32, 128):
        attend(head_dim, torch.float32, is_causal=True)
        attend(head_dim, torch.bfloat16, is_causal=True, window=50, cu_seqlens=offsets)
        attend(head_dim, torch.bfloat16, softcap=20.0)


def rotate() -> None:
    q, k = (torch.randn(1, heads, TOKENS, 64, device="cuda", requires_grad=True) for heads in (4, 2))
    angle = torch.rand(TOKENS, 32, device="cuda")
    for in_place in (False, True):
        turned = rope(q * 1, k * 1, angle.cos(), angle.sin(), in_place=in_place)
        (turned[0].sum() + turned[1].sum()).backward()


def lose() -> None:
    """Rows of logits that are read once and rows that are read twice, in one piece and in chunks."""
    for n_vocab in (1_001, 12_001):
        head = nn.Linear(64, n_vocab, bias=False, device="cuda", dtype=torch.bfloat16)
        hidden = torch.randn(TOKENS, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ids = torch.randint(n_vocab, (TOKENS,), device="cuda")
        ids[:10] = -100
        for chunk_tokens in (None, 64):
            (2 * linear_cross_entropy(hidden, head, ids, chunk_tokens=chunk_tokens)).backward()


@triton.jit
def planted_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32))


def main() -> None:
    torch.manual_seed(0)
    if sys.argv[1:] == ["--planted"]:
        planted_kernel[(1,)](torch.empty(1000, device="cuda"), BLOCK=4096)
        torch.cuda.synchronize()
        return
    kernels = launched()
    attend_all()
    rotate()
    lose()
    torch.cuda.synchronize()
    missed = {f"{kernel.__module__}.{kernel.__name__}" for kernel in ours() - kernels}
    if missed:
        sys.exit(f"not launched: {', '.join(sorted(missed))}")
    print(f"{len(ours())} kernels launched")


if __name__ == "__main__":
    main()
