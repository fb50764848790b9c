"""The formulas against every byte that is alive while attention runs on a CPU, and against a hand count."""

import pytest

from trainstep.bench.attention import run_cases
from trainstep.bench.cases import AttentionCase
from trainstep.plan.attention_memory import eager_memory, flash_memory


@pytest.mark.parametrize("causal", ["yes", "no"])
@pytest.mark.parametrize(("seq", "head_dim"), [(64, 8), (256, 16), (48, 64)])
def test_eager_memory_is_exact(causal, seq, head_dim):
    case = AttentionCase("eager", batch=2, heads=3, seq=seq, head_dim=head_dim, causal=causal, dtype="fp32")
    (row,) = run_cases([case], device="cpu", warmup=1, passes=1)
    assert row.values["before_backward_gib"] == row.values["predicted_before_backward_gib"]
    if head_dim < seq:  # else the gradients' own reductions weigh more than a score matrix
        assert row.values["peak_gib"] == row.values["predicted_peak_gib"]


def test_hand_count():
    """One head, 4 tokens of 2 features, float32: T = 32 bytes, N = 64 bytes."""
    memory = eager_memory(1, 1, 4, 2, 4, is_causal=False, on_gpu=False)
    assert memory.before_backward == 5 * 32 + 64
    assert memory.peak == 6 * 32 + 3 * 64
    assert memory.score_matrices == 3
    assert eager_memory(1, 1, 4, 2, 4, is_causal=False, on_gpu=True).peak == memory.peak + 64


@pytest.mark.gpu
@pytest.mark.parametrize("causal", ["yes", "no"])
def test_eager_memory_on_a_gpu(causal):
    case = AttentionCase("eager", batch=2, heads=2, seq=2048, head_dim=64, causal=causal, dtype="fp32")
    (row,) = run_cases([case], device="cuda", warmup=1, passes=1)
    assert row.values["before_backward_gib"] == pytest.approx(row.values["predicted_before_backward_gib"], rel=0.01)
    assert row.values["peak_gib"] == pytest.approx(row.values["predicted_peak_gib"], rel=0.02)


def test_flash_memory_is_linear_in_the_length():
    half, full = (flash_memory(1, 32, seq, 128, 2) for seq in (32768, 65536))
    assert full.before_backward == 2 * half.before_backward
    assert full.peak == 2 * half.peak
    assert full.before_backward == 5 * 32 * 65536 * 128 * 2 + 32 * 65536 * 4
