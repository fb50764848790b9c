"""`trainstep bench fused`: operators of a decoder's step that are bound by memory, ours against others'.

`base.operators.FUSED` says what each computes and by whom, `check.fused` checks it, `bench.turns` times it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict
from typing import cast

import torch

from trainstep.base.config import PhaseContext, no_phases
from trainstep.base.errors import UnsupportedError
from trainstep.base.operators import FUSED, function_at
from trainstep.bench.cases import FusedCase
from trainstep.bench.turns import IN_INTERPRETER, Pass, Turns, require_interpretable
from trainstep.check.fused import Operator, check_operator, inputs_of, oracle_of
from trainstep.check.verdict import Verdict
from trainstep.fused import liger
from trainstep.measure.memory import GIB, step_memory
from trainstep.measure.step import is_interpreted
from trainstep.rows import FusedRatioRow, FusedRow
from trainstep.rows.records import Scalar
from trainstep.step.casting import DTYPES


class FusedTurns(Turns[FusedCase]):
    """`bench fused`: the implementations of one operator, shape and dtype in turns."""

    row, ratio, ours = FusedRow, FusedRatioRow, "ours"

    def problem(self, case: FusedCase) -> Hashable:
        return case.operator, case.shape, case.dtype

    def columns(self, case: FusedCase) -> Mapping[str, Scalar]:
        named: dict[str, Scalar] = {name: getattr(case, name) for name in ("operator", "impl", "shape", "dtype")}
        return named | asdict(case.sizes)

    def implementation(self, case: FusedCase) -> Operator:
        """Return the case's form of its operator.

        Raises:
            UnsupportedError: it does not run here: no Liger-Kernel, no GPU, or a CPU and a shape too large for the
                interpreter.
        """
        entry = FUSED[case.operator]
        if case.impl.startswith("liger"):
            if self.device.type != "cuda":
                raise UnsupportedError(f"Liger-Kernel's operators run on a GPU, and this is {self.device}")
            liger.installed()
        if case.impl == "ours":
            require_small(case, self.device)
        if home := entry.forms[case.impl]:
            return cast(Operator, function_at(home))
        oracle = oracle_of(entry)
        return torch.compile(oracle, dynamic=False) if case.impl == "compiled" else oracle

    def verdict(self, case: FusedCase, implementation: Operator) -> Verdict:
        return check_operator(FUSED[case.operator], implementation, case.sizes, DTYPES[case.dtype], self.device)

    def values(self, case: FusedCase, implementation: Operator) -> Mapping[str, Scalar]:
        """Memory of one pass after one that made what is made once, on a GPU alone; the peer's package."""
        values: dict[str, Scalar] = {}
        step = self.step(case, implementation)
        if self.device.type != "cpu":
            step(no_phases)
            peaks = step_memory(step, self.device, [])
            left = peaks.after["forward"] - peaks.before
            values = {"before_backward_gib": left / GIB, "peak_gib": (peaks.peak - peaks.before) / GIB}
        if case.impl.startswith("liger"):
            values["package"] = liger.installed()[0]
        if case.impl == "ours" and is_interpreted(self.device):
            values["not_timed"] = IN_INTERPRETER
        return values

    def step(self, case: FusedCase, implementation: Operator) -> Pass:
        sizes = case.sizes
        inputs = inputs_of(FUSED[case.operator], sizes, sizes.tokens, DTYPES[case.dtype], self.device)
        leaves = [each for each in inputs if each.requires_grad]
        with torch.no_grad():
            results = implementation(*inputs)
        upstream = [torch.ones_like(each) for each in (results if isinstance(results, tuple) else (results,))]
        del results

        def step(phase: PhaseContext) -> None:
            with phase("forward"):
                found = implementation(*inputs)
            with phase("backward"):
                torch.autograd.grad(found, leaves, upstream)

        return step


def require_small(case: FusedCase, device: torch.device) -> None:
    """Raise `UnsupportedError` where our kernels do not run, or would take hours."""
    from trainstep.fused.operators import require_device  # here: it loads Triton

    require_device("bench fused's own implementation", device)
    if is_interpreted(device):
        require_interpretable(case.dtype)
        if case.shape != "tiny":
            raise UnsupportedError(
                f"in Triton's interpreter a pass over the shape {case.shape} takes hours; there, choose --shape tiny"
            )
