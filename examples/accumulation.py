"""0.01 added a thousand times on a CPU, in four mixtures of float32 and float16: why sums are kept wide.

    python -m examples.accumulation

From 8 on, float16's neighbours are 2^-7 = 0.0078 apart, so adding 0.01 adds 0.0078. In a float32 sum only the addend's
one rounding remains: float16's 0.01 is 0.010002136, and casting it up brings no digits back.
"""

from __future__ import annotations

import torch

STEPS, ADDEND = 1000, 0.01
FULL, HALF = torch.float32, torch.float16
MIXTURES = {
    ("fp32", "fp32"): (FULL, FULL, FULL),
    ("fp16", "fp16"): (HALF, HALF, HALF),
    ("fp32", "fp16"): (FULL, HALF, HALF),
    ("fp32", "fp16 → fp32"): (FULL, HALF, FULL),
}
"""Names of the running sum's dtype and the addend's → the dtypes of the sum, of 0.01, and of what is added."""


def total(accumulator: torch.dtype, stored: torch.dtype, added: torch.dtype) -> float:
    """The sum of `STEPS` times `ADDEND`."""
    running, term = torch.zeros((), dtype=accumulator), torch.tensor(ADDEND, dtype=stored).to(added)
    for _ in range(STEPS):
        running += term
    return running.item()


def main() -> None:
    """Print every sum."""
    print(f"{'accumulator':14}{'addend':14}sum")
    for (accumulator, addend), dtypes in MIXTURES.items():
        print(f"{accumulator:14}{addend:14}{total(*dtypes):.4f}")


if __name__ == "__main__":
    main()
