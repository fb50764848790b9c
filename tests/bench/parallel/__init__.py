"""An agreement with one process, right unless changed; and those of a comparison, by scheme."""

from typing import Any

from trainstep.base.schemes import Scheme
from trainstep.bench.parallel.check import Agreement, Comparison
from trainstep.check.gradients import Deviation
from trainstep.check.updates import UpdateError
from trainstep.measure.outcome import Failure


def deviation(allowed: float = 0.02, **change: Any) -> Deviation:
    """Off by half of what is allowed."""
    half = dict.fromkeys(("loss", "gradient", "scale", "worst"), allowed / 2)
    most = dict.fromkeys(("loss_allowed", "gradient_allowed", "scale_allowed", "worst_allowed"), allowed)
    return Deviation(**({**half, **most, "worst_name": "head.weight"} | change))


def agreement(**change: Any) -> Agreement:
    """Within every budget, in bf16."""
    right = {
        "gradients": deviation(),
        "float32": deviation(1e-6),
        "optimizer": UpdateError(1e-5, 1e-4, "head.weight"),
        "loss_error": 0.0,
        "update_error": 1e-7,
        "loss_allowed": 1e-6,
        "update_allowed": 1e-6,
    }
    return Agreement(**(right | change))


def by_scheme(found: Comparison) -> dict[Scheme, Agreement | Failure | None]:
    """Of cases that differ in nothing but their scheme."""
    return {case.scheme: each for case, each in found.cases.items()}
