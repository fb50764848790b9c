"""`bench fused` with ours, of the shape tiny: right in every operator, and not timed in the interpreter."""

import pytest

from tests.fused.places import DEVICE, HERE
from trainstep.base.operators import FUSED
from trainstep.bench.cases import FusedCase
from trainstep.bench.fused import FusedTurns

pytestmark = HERE


@pytest.mark.parametrize("operator", FUSED)
def test_ours_is_right(operator) -> None:
    cases = [FusedCase(impl, operator, "tiny", "fp32") for impl in ("eager", "ours") if impl in FUSED[operator].forms]
    found = list(FusedTurns(DEVICE).run(cases, warmup=1, passes=1))
    rows = [row for row in found if row.kind == "fused operator"]
    assert {row.status for row in rows} == {"ok"}, [row.reason for row in rows]
    if DEVICE == "cpu":
        assert rows == found, "no ratio of an interpreter's times"
        for row in rows:
            not_timed = "checked in Triton's interpreter, no time" if row.impl == "ours" else None
            assert (row.not_timed, bool(row.samples)) == (not_timed, not_timed is None)
