"""Compile the fused kernels for GPUs that are not here, with the arguments that ordinary tensors give them."""

from dataclasses import dataclass, field
from typing import Any

from triton.compiler import ASTSource

from tests.attention.triton.aot import Compiled, compile_source
from trainstep.fused.triton import adamw, cross_entropy, gating, norm, rotary, warps_for

FLOAT32 = ("rstd_ptr", "losses_ptr", "dw_ptr", "cos_ptr", "sin_ptr")
FLOATS = ("eps", "sign", "decay", "rate", "gain1", "beta2", "gain2", "correction")
OTHERS = {"targets_ptr": "*i64", "table": "*i64", "owners": "*i32", "ignore_index": "i32", "seed": "i32"}


@dataclass(frozen=True)
class Kernel:
    """A kernel with the constants and warps of one shape."""

    kernel: Any
    warps: int
    constants: dict[str, Any] = field(default_factory=dict)

    def compile(self, capability: int, dtype: str) -> Compiled:
        """For sm_`capability`; dtype in Triton's names ("bf16")."""
        constants = self.constants | {name: dtype for name, value in self.constants.items() if value == "dtype"}
        signature, attributes = {}, {}
        for index, name in enumerate(self.kernel.arg_names):
            if name in constants:
                signature[name] = "constexpr"
            elif name in OTHERS:
                signature[name] = OTHERS[name]
            elif name.endswith("_ptr"):
                signature[name] = "*fp32" if name in FLOAT32 else f"*{dtype}"
            else:
                signature[name] = "fp32" if name in FLOATS else "i32"
            if name.endswith("_ptr") or name.startswith("stride_"):
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return compile_source(source, capability, {"num_warps": self.warps})


def kernels_of(d_model: int, head_dim: int, n_vocab: int) -> dict[str, Kernel]:
    """Every kernel as the shapes of a model make it, and the widest of each."""
    block = 1 << (d_model - 1).bit_length()
    rows = {"D": d_model, "BLOCK_D": block}
    half = head_dim // 2
    pairs = 1 << (half - 1).bit_length()
    turn = {"HALF": half, "BLOCK_HALF": pairs, "BLOCK_H": rotary.BLOCK_HEADS}
    chunk = min(cross_entropy.WIDEST_BLOCK, 1 << (n_vocab - 1).bit_length())
    found = {
        "swiglu forward": Kernel(gating.swiglu_forward_kernel, 4, {"BLOCK": gating.BLOCK}),
        "swiglu backward": Kernel(gating.swiglu_backward_kernel, 4, {"BLOCK": gating.BLOCK}),
        "rope": Kernel(rotary.rope_kernel, warps_for(4 * rotary.BLOCK_HEADS * pairs), turn),
    }
    for add in (False, True):
        constants = rows | {"ADD": add}
        found[f"norm forward, add {add}"] = Kernel(norm.rms_norm_forward_kernel, warps_for(block), constants)
        found[f"norm backward, add {add}"] = Kernel(norm.rms_norm_backward_kernel, warps_for(block), constants)
        constants = {"GRADIENT": add, "BLOCK": chunk}
        found[f"loss, gradient {add}"] = Kernel(cross_entropy.cross_entropy_kernel, warps_for(chunk), constants)
    return found


def adamw_kernels() -> dict[str, Kernel]:
    """AdamW with states as the parameters, and with states in bfloat16, rounded at random."""
    from triton.language import bfloat16, float32

    found = {}
    for name, (p, s, stochastic) in {
        "float32": (float32, float32, False),
        "float32, states in bfloat16": (float32, bfloat16, True),
        "bfloat16": (bfloat16, bfloat16, True),
    }.items():
        kinds = {"P": p, "G": p, "S": s, "P_STOCHASTIC": stochastic and p is bfloat16, "S_STOCHASTIC": stochastic}
        found[f"adamw, {name}"] = Kernel(adamw.adamw_kernel, 4, kinds | {"BLOCK": adamw.BLOCK})
    return found
