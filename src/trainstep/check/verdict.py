"""The verdict of every check: of a step, a script, a scheme's ranks, attention, a fused operator.

Each of them is held against a reference: its gradients (`Deviation`), other quantities one by one (`Part`), and faults
that have no number, such as ranks with different weights. `tolerance` has what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainstep.base.tolerance import VACUOUS


@dataclass(frozen=True)
class Part:
    """A quantity beside its reference: the error and the tolerance, in the same unit."""

    error: float = 0.0
    allowed: float = 0.0
    """Infinite where rounding alone moves the quantity so much that nothing tells right from wrong."""
    name: str = ""

    @property
    def is_right(self) -> bool:
        """True within the tolerance. NaN and an infinite error never are."""
        return self.error <= self.allowed and self.error < math.inf

    @property
    def share(self) -> float:
        """Return the error over the tolerance; infinite for NaN, and where nothing is allowed."""
        used = self.error / self.allowed if self.allowed else math.inf if self.error else 0.0
        return math.inf if math.isnan(used) else used

    def __str__(self) -> str:
        return f"{self.name} off by {self.error:.2g} of {self.allowed:.2g}"


@dataclass(frozen=True)
class Deviation:
    """Distance of loss and gradients from the reference's, relative, and what is allowed."""

    loss: float
    loss_allowed: float
    gradient: float
    """‖g − g_ref‖ / ‖g_ref‖ over all parameters."""
    gradient_allowed: float
    scale: float
    """|⟨g, g_ref⟩ / ⟨g_ref, g_ref⟩ − 1| over all parameters."""
    scale_allowed: float
    worst: float
    """The error of the parameter, the row of one or the buffer that uses most of what it is allowed, relative to its
    gradient, or to the buffer's change."""
    worst_allowed: float
    worst_name: str
    note: str = ""
    """Another step that is off alike, or is not: where the mistake may lie. Empty where nothing is known of that."""
    fault: str = ""
    """Mistake of the step though its gradients are right as they were compared."""

    @property
    def is_right(self) -> bool:
        """True if everything is allowed; NaN never is."""
        return (
            not self.fault
            and self.loss <= self.loss_allowed
            and self.gradient <= self.gradient_allowed
            and self.scale <= self.scale_allowed
            and self.worst <= self.worst_allowed
        )

    @property
    def is_vacuous(self) -> bool:
        """True if so much is allowed that gradients of anything else might be within it."""
        return not self.gradient_allowed < VACUOUS

    @property
    def severity(self) -> tuple[bool, bool, float]:
        """Larger where it is worse: what is wrong, then what says nothing, then what uses more of its budget."""
        return not self.is_right, self.is_vacuous, self.worst / (self.worst_allowed or 1)

    def __str__(self) -> str:
        if self.fault:
            return self.fault
        named = {"the loss": "loss", "the gradients": "gradient", "their scale": "scale", self.worst_name: "worst"}
        parts = [Part(getattr(self, key), getattr(self, f"{key}_allowed"), name) for name, key in named.items() if name]
        said = ", ".join(str(part) for part in [part for part in parts if not part.error <= part.allowed] or parts)
        return f"{said} ({self.note})" if self.note else said


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check."""

    gradients: Deviation | None = None
    """In the precision at hand, in the place that uses most of what is allowed; None of a single operator."""
    float32: Deviation | None = None
    """In float32, where that is another precision and was compared."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """Other quantities: `update`, `loss`, `weights`, or of an operator each result and statistic."""
    faults: tuple[str, ...] = ()
    """Mistakes without a number."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Fields of a row that say how it was compared."""

    @property
    def is_right(self) -> bool:
        """True if everything is within its tolerance."""
        return not self._wrong

    @property
    def holds(self) -> bool:
        """True if it is right, and that says something."""
        return self.is_right and not self.not_told

    @property
    def not_told(self) -> str:
        """Reason why a right result says nothing about the gradients; empty where it does."""
        for where, found in (("", self.gradients), (" in float32", self.float32)):
            if found is not None and found.is_vacuous and self.is_right:
                allowed = f"{found.gradient_allowed:.2g} would be allowed"
                return f"rounding alone takes its gradients{where} off by so much that {allowed}"
        return ""

    @property
    def nearest(self) -> Part:
        """Return the part that uses most of its tolerance, or exceeds it most."""
        return max(self.parts.values(), key=lambda each: each.share)

    @property
    def _wrong(self) -> list[str]:
        deviations = (("in float32, ", self.float32), ("", self.gradients))
        wrong = [f"{where}{found}" for where, found in deviations if found is not None and not found.is_right]
        return [*wrong, *(str(part) for part in self.parts.values() if not part.is_right), *self.faults]

    def __str__(self) -> str:
        """Say what is wrong; empty where nothing is."""
        return "; ".join(self._wrong)

    def columns(self) -> dict[str, Any]:
        """Return the fields of a row: errors of gradients and parts, and the notes. A tolerance that says nothing is
        None."""
        own = self.gradients
        assert own is not None, "an operator's rows have columns of their own"
        exact = own if self.float32 is None and not self.notes.get("not_in_float32") else self.float32
        values: dict[str, Any] = {
            "loss_error": own.loss,
            "gradient_error": own.gradient,
            "error_budget": own.gradient_allowed,
            "worst_gradient_error": own.worst,
            "worst_allowed": own.worst_allowed,
            "worst_parameter": own.worst_name,
            "float32_error": exact.gradient if exact else None,
            "float32_allowed": exact.gradient_allowed if exact else None,
            "not_checked": self.not_told or None,
        }
        for key, part in self.parts.items():
            values[f"{key}_error"] = part.error
            values[f"{key}_allowed"] = part.allowed if part.allowed < math.inf else None
        return {**values, **self.notes}
