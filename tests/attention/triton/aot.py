"""Compile a kernel for a GPU that is not here, and read from the result what would make it slow or impossible."""

import functools
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
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from trainstep.attention.hopper import backward as hopper_backward
from trainstep.attention.hopper import dkdv as hopper_dkdv
from trainstep.attention.hopper import dq as hopper_dq
from trainstep.attention.hopper import dq_sum
from trainstep.attention.hopper import forward as hopper_forward
from trainstep.attention.triton import backward, forward
from trainstep.attention.tuned import HopperTile, Tile

PORTABLE = {"forward": forward.forward_kernel, "dq": backward.dq_kernel, "dkdv": backward.dkdv_kernel}
HOPPER = {"forward": hopper_forward.forward_kernel, "dq": hopper_dq.dq_kernel, "dkdv": hopper_dkdv.dkdv_kernel}
STREAMED = {"forward": ("k", "v"), "dq": ("k", "v"), "dkdv": ("q", "do")}  # the others are a consumer's own 64 rows
FLOAT32 = ("lse_ptr", "delta_ptr", "stat_ptr")


@dataclass(frozen=True)
class Compiled:
    ptx: str
    shared_bytes: int
    cubin: bytes

    @property
    def spilled_bytes(self) -> int:
        """Local memory per thread."""
        usage = dict(re.findall(r"(STACK|LOCAL):(\d+)", self._listing("-res-usage")))
        return int(usage["STACK"]) + int(usage["LOCAL"])

    @functools.cached_property
    def sass(self) -> str:
        """What the assembler made of it, as `sass.parse` takes it."""
        return self._listing("-sass")

    def _listing(self, option: str) -> str:
        cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return subprocess.run([cuobjdump, option, file.name], capture_output=True, text=True, check=True).stdout


def compile_portable(
    kernel: str, tile: Tile, capability: int, dtype: str, head_dim: int, is_causal: bool, precision: str,
    *, band: tuple[str, ...] = (),
) -> Compiled:  # fmt: skip
    """A portable kernel for sm_`capability`; dtype in Triton's names ("bf16"), head_dim a power of two from 16.

    band: which of the arguments "window", "bounds_ptr" and "cap" it has.
    """
    constants = {
        "IS_CAUSAL": is_causal,
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_Q": tile.queries,
        "BLOCK_K": tile.keys,
        "PRECISION": precision,
    }
    constants |= {name: None for name in ("window", "bounds_ptr", "cap") if name not in band}
    signature, attributes = _arguments(PORTABLE[kernel], constants, {}, dtype)
    source = ASTSource(PORTABLE[kernel], signature, constants, attributes)
    return compile_source(source, capability, {"num_warps": tile.warps, "num_stages": tile.stages})


def compile_hopper(
    kernel: str, tile: HopperTile, head_dim: int, is_causal: bool, *, window: int | None = None, n_queries: int = 4096
) -> Compiled:
    """A Hopper kernel in bfloat16, as it is for ordinary multi-head attention (one query head per key head)."""
    streams_queries = kernel == "dkdv"
    takes_turns = False
    if kernel == "forward":
        tile, takes_turns = hopper_forward.for_rows(tile, head_dim, is_causal, n_queries, window)
    constants = {
        "group": 1,
        "IS_CAUSAL": is_causal,
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_Q" if streams_queries else "BLOCK_K": tile.block,
        "CONSUMERS": tile.consumers,
        "STAGES": tile.stages,
        "OWN_REGS": tile.own_in_registers,
        "REGISTERS": tile.registers,
    }
    if kernel == "forward":
        constants["TURNS"] = takes_turns
        if window is None:
            constants["window"] = None
    rows = {tensor: tile.block if tensor in STREAMED[kernel] else 64 for tensor in ("q", "k", "v", "do")}
    return _compile_gluon(HOPPER[kernel], constants, _descriptors(rows, head_dim))


def compile_fused(head_dim: int, is_causal: bool, *, has_window: bool = False) -> Compiled:
    """Hopper's single backward kernel, as it is for ordinary multi-head attention in bfloat16."""
    constants = {"group": 1, "IS_CAUSAL": is_causal, "HEAD_DIM": head_dim, "BLOCK_D": head_dim}
    if not has_window:
        constants["window"] = None
    queries = hopper_backward.TILE_SIZE.value // head_dim
    descriptors = _descriptors({"q": queries, "k": 128, "v": 128, "do": queries}, head_dim)
    descriptors["acc_desc"] = f"tensordesc<fp32{[dq_sum.SUM_ROWS.value, 256]},{gl.NVMMASharedLayout(0, 32, 2)!r}>"
    statistic = dq_sum.statistic_tiles(dq_sum.empty_statistic(queries, head_dim, torch.device("cpu")), queries)
    of = {torch.float32: "fp32", torch.bfloat16: "bf16"}[statistic.base.dtype]
    for name in ("lse_desc", "delta_desc"):
        descriptors[name] = f"tensordesc<{of}{statistic.block_shape},{statistic.layout!r}>"
    return _compile_gluon(hopper_backward.backward_kernel, constants, descriptors)


def _descriptors(rows: dict[str, int], head_dim: int) -> dict[str, str]:
    shapes = {tensor: [1, 1, n_rows, head_dim] for tensor, n_rows in rows.items()}
    return {
        f"{tensor}_desc": f"tensordesc<bf16{shape},{gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16)!r}>"
        for tensor, shape in shapes.items()
    }


def _compile_gluon(kernel: Any, constants: dict[str, Any], descriptors: dict[str, str]) -> Compiled:
    signature, attributes = _arguments(kernel, constants, descriptors, "bf16")
    return compile_source(GluonASTSource(kernel, signature, constants, attributes), 90, {"num_warps": 4})


def _arguments(
    kernel: Any, constants: dict[str, Any], descriptors: dict[str, str], dtype: str
) -> tuple[dict[str, str], dict[tuple[int, ...], Any]]:
    """The types of a kernel's arguments, and the alignment that ordinary tensors give them."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in descriptors:
            signature[name] = descriptors[name]
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in FLOAT32 else "*i32" if name == "bounds_ptr" else f"*{dtype}"
        else:
            signature[name] = "fp32" if name.startswith(("scale", "cap")) else "i32"
        if name.endswith("_ptr") or name.startswith("stride_") or name == "stat_rows":
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, attributes


def compile_source(source: ASTSource, capability: int, options: dict[str, int]) -> Compiled:
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(compiled.asm["ptx"], compiled.metadata.shared, compiled.asm["cubin"])
