"""Compile the fused kernels for GPUs that are not here, with the arguments that ordinary tensors give them."""

from dataclasses import dataclass, field
from typing import Any

from triton.compiler import ASTSource

from tests.attention.triton.aot import Compiled, compile_source
from trainstep.fused.triton import cross_entropy, rotary, scaling

FLOAT32 = ("losses_ptr", "scales_ptr", "factor_ptr", "cos_ptr", "sin_ptr")
OTHERS = {"targets_ptr": "*i64", "fits_ptr": "*i32", "sign": "fp32"}


@dataclass(frozen=True)
class Kernel:
    """A kernel with the constants and warps of one shape."""

    kernel: Any
    warps: int
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def is_padded(self) -> bool:
        """Whether rows of logits lie further apart than they are long."""
        return bool(self.constants.get("PADDED"))

    def compile(self, capability: int, dtype: str) -> Compiled:
        """For sm_`capability`; dtype in Triton's names ("bf16")."""
        signature, attributes = {}, {}
        for index, name in enumerate(self.kernel.arg_names):
            if name in self.constants:
                signature[name] = "constexpr"
            elif name in OTHERS:
                signature[name] = OTHERS[name]
            elif name.endswith("_ptr"):
                signature[name] = "*fp32" if name in FLOAT32 else f"*{dtype}"
            else:
                signature[name] = "i32"
            if name.endswith("_ptr") or name.startswith("stride_") or (name == "n_vocab" and not self.is_padded):
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, self.constants, attributes)
        return compile_source(source, capability, {"num_warps": self.warps})


def kernels_of(head_dim: int, n_vocab: int) -> dict[str, Kernel]:
    """Every kernel as the shapes of a model make it."""
    half = head_dim // 2
    block, turning = rotary.tile(32, half)
    turn = {"Q_HEADS": 32, "K_HEADS": 32, "HALF": half, "BLOCK_HALF": 1 << (half - 1).bit_length(), "BLOCK_H": block}
    rows, warps = cross_entropy.layout(n_vocab, -(-n_vocab // cross_entropy.ALIGNED) * cross_entropy.ALIGNED)
    found = {"rope": Kernel(rotary.rope_kernel, turning, turn)}
    found["rope, grouped"] = Kernel(rotary.rope_kernel, turning, turn | {"Q_HEADS": 48, "K_HEADS": 8})
    for gradient in (False, True):
        constants = rows | {"GRADIENT": gradient}
        kernel = cross_entropy.kernel_for(n_vocab)
        found[f"loss, gradient {gradient}"] = Kernel(kernel, warps, constants)
    targets = {"MEAN": True, "LATER": False, "BLOCK": cross_entropy.TARGETS}
    found["targets"] = Kernel(cross_entropy.count_targets_kernel, 8, targets)
    found["scale"] = Kernel(scaling.scale_kernel, 8, {"BLOCK": scaling.BLOCK})
    return found
