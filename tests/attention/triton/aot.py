"""Compile a kernel for a GPU that is not here, and read from the result what would make it slow or impossible."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainstep.attention.triton.dkdv import dkdv_kernel
from trainstep.attention.triton.dq import dq_kernel
from trainstep.attention.triton.forward import forward_kernel
from trainstep.attention.triton.tuning import Tile, block_of

KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Compiled:
    ptx: str
    shared_bytes: int
    registers: int
    spilled_bytes: int


def compile_kernel(
    kernel: str,
    tile: Tile,
    capability: int,
    dtype: torch.dtype,
    head_dim: int,
    is_causal: bool,
    precision: str = "tf32",
) -> Compiled:
    """Compile one of KERNELS for sm_`capability`, with the argument alignment that ordinary tensors have."""
    fn = KERNELS[kernel]
    constants: dict[str, Any] = {
        "IS_CAUSAL": is_causal,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_of(head_dim),
        "BLOCK_Q": tile.queries,
        "BLOCK_K": tile.keys,
        "PRECISION": precision,
    }
    signature, attributes = {}, {}
    for index, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in ("lse_ptr", "delta_ptr") else f"*{TYPES[dtype]}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name.startswith("stride_"):
            signature[name] = "i32"
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
    compiled = triton.compile(
        ASTSource(fn, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    registers, spilled = _resource_usage(compiled.asm["cubin"])
    return Compiled(compiled.asm["ptx"], compiled.metadata.shared, registers, spilled)


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory per thread (its stack: where registers are spilled to)."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", report))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])
