"""The precisions a step can be taken in, with what each one means for bytes, rates and rounding. Imports no torch.

What torch does for a precision follows from these properties, in `trainstep.step.casting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "bf16-pure"]
Dtype = Literal["float32", "bfloat16", "float16"]  # torch's names
Rate = Literal["fp32", "tf32", "bf16"]
"""Units that multiply matrices, each named by a precision that runs on them: ordinary float32 units, tensor cores on
TF32, tensor cores on 16-bit types."""


@dataclass(frozen=True)
class Precision:
    """A precision: the types of weights, products and optimizer state. Everything else is derived from these four
    fields."""

    stored: Dtype  # of weights, gradients and the optimizer's state
    computed: Dtype  # of the inputs of matrix products; where it is not `stored`, autocast converts them
    rate: Rate  # the units that matrix products run on
    unit_roundoff: float  # half the spacing of numbers near 1, in the format that products' inputs are rounded to

    @property
    def one_rounding(self) -> float:
        """The spacing of numbers near 1 in that format, twice the unit roundoff."""
        return 2 * self.unit_roundoff

    @property
    def is_autocast(self) -> bool:
        """True if products run in another type than the weights are stored in."""
        return self.stored != self.computed

    @property
    def is_half(self) -> bool:
        """True if products have 16-bit inputs."""
        return self.computed != "float32"

    @property
    def is_stored_half(self) -> bool:
        """True if weights, gradients and optimizer state have 16 bits per element."""
        return self.stored != "float32"

    @property
    def stored_bytes(self) -> int:
        """Bytes per weight, and per number of its gradient and of each of its moments."""
        return 2 if self.is_stored_half else 4

    @property
    def computed_bytes(self) -> int:
        """Bytes per element of a product's inputs."""
        return 2 if self.is_half else 4

    @property
    def uses_tf32(self) -> bool:
        """True if float32 products may be rounded to TF32."""
        return self.rate == "tf32"

    @property
    def needs_scaler(self) -> bool:
        """True if gradients underflow without a scaled loss: float16 has five bits of exponent."""
        return self.computed == "float16"


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision("float32", "float32", "fp32", 2.0**-24),
    "tf32": Precision("float32", "float32", "tf32", 2.0**-11),
    "bf16": Precision("float32", "bfloat16", "bf16", 2.0**-8),
    "fp16": Precision("float32", "float16", "bf16", 2.0**-11),
    "bf16-pure": Precision("bfloat16", "bfloat16", "bf16", 2.0**-8),
}
"""To add one: its name in `PrecisionName`, and its entry here."""
