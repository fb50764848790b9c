"""An agreement with one process, right unless changed; and those of a comparison, by scheme."""

from dataclasses import replace
from typing import Any

from trainstep.base.schemes import Scheme
from trainstep.check.ranks import RANKS_DIFFER, STEPS, Comparison
from trainstep.check.verdict import Deviation, Part, Verdict
from trainstep.measure.outcome import Failure


def deviation(allowed: float = 0.02, **change: Any) -> Deviation:
    """Off by half of what is allowed."""
    half = dict.fromkeys(("loss", "gradient", "scale", "worst"), allowed / 2)
    most = dict.fromkeys(("loss_allowed", "gradient_allowed", "scale_allowed", "worst_allowed"), allowed)
    return Deviation(**({**half, **most, "worst_name": "head.weight"} | change))


def agreement(ranks_agree: bool = True, **change: Any) -> Verdict:
    """Within every budget, in bf16; parts may be changed by their key."""
    parts = {
        "optimizer": Part(1e-5, 1e-4, "12 updates of head.weight from equal gradients"),
        "loss": Part(0.0, 1e-6, f"after {STEPS} steps its loss"),
        "update": Part(1e-7, 1e-6, f"after {STEPS} steps its parameters' movement"),
    }
    parts |= {key: replace(parts[key], error=change.pop(key)) for key in parts if key in change}
    faults = () if ranks_agree else (RANKS_DIFFER,)
    return Verdict(
        **({"gradients": deviation(), "float32": deviation(1e-6), "parts": parts, "faults": faults} | change)
    )


def by_scheme(found: Comparison) -> dict[Scheme, Verdict | Failure | None]:
    """Of cases that differ in nothing but their scheme."""
    return {case.scheme: each for case, each in found.cases.items()}
