"""`bench fused` with ours, of the shape tiny: right in every operator, and not timed in the interpreter."""

import pytest

from tests.fused.places import DEVICE, HERE
from trainstep.bench.cases import FUSED_IMPLS, FusedCase
from trainstep.bench.fused.run import run_cases

pytestmark = HERE


@pytest.mark.parametrize("operator", FUSED_IMPLS)
def test_ours_is_right(operator) -> None:
    cases = [FusedCase(impl, operator, "tiny", "fp32") for impl in ("eager", "ours")]
    found = list(run_cases(cases, device=DEVICE, warmup=1, passes=1))
    rows = [row for row in found if row.kind == "fused operator"]
    assert [row.status for row in rows] == ["ok", "ok"], [row.reason for row in rows]
    if DEVICE == "cpu":
        assert rows == found, "no ratio of an interpreter's times"
        assert (rows[1].not_timed, rows[1].samples) == ("checked in Triton's interpreter, no time", {})
        assert rows[0].not_timed is None
        assert rows[0].samples
