"""Sentences about attention: the eager formula, its compiled form, FlashAttention, the leaderboard's case."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables.source import figure, one, results
from texts.wording import span, times
from trainstep.records import Row
from trainstep.report.finding import in_gib, in_ms


def naive(seq: int, head_dim: int, impl: str = "eager") -> Row:
    """A row of the grid of the eager formula."""
    return one("h200-attention-naive", "attention", seq=seq, head_dim=head_dim, impl=impl)


def eager() -> str:
    """Times and memory by length, and where memory ends."""
    rows = [naive(seq, 64) for seq in (1024, 4096, 16384)]
    told = ", ".join(
        f"{int(row.case['seq'] or 0):,} tokens {in_ms(figure(row, 'forward_ms'))}, {in_ms(figure(row, 'backward_ms'))} "
        f"and {in_gib(figure(row, 'before_backward_gib'))}"
        for row in rows
    )
    held = [figure(row, "before_backward_gib") for row in rows]
    growth = [held[1] / held[0], held[2] / held[1]]
    assert 12 < growth[0] < growth[1] < 16
    broken = naive(32768, 128)
    assert broken.status == "out of memory"
    return (
        f"Batch 8, fp32, head_dim 64: forward, backward, and memory before backward: {told}. Four times the length "
        f"takes {span(growth)} times the memory, near the sixteen of the scores alone. At 32,768 tokens and head_dim "
        "128 it is out of memory: one score matrix is 8 · 32,768² · 4 bytes = 32 GiB, four are alive at the peak of "
        "backward, and with the rest that makes "
        f"{in_gib(figure(broken, 'predicted_peak_gib'))}. What is kept for backward grows with the square of the "
        "length. To be rid of it, never write the scores to memory: compute them again in backward, tile by tile."
    )


def compiled_gains() -> dict[int, dict[int, float]]:
    """Length → head_dim → how many times less time compiled code takes, forward and backward, where both fit."""
    gains: dict[int, dict[int, float]] = {}
    for row in results("h200-attention-naive", "attention"):
        if row.case["impl"] == "eager" and row.status == "ok":
            seq, head_dim = int(row.case["seq"] or 0), int(row.case["head_dim"] or 0)
            other = naive(seq, head_dim, "eager-compiled")
            gains.setdefault(seq, {})[head_dim] = figure(row, "both_ms") / figure(other, "both_ms")
    return gains


def compiled() -> str:
    """What torch.compile makes of the eager formula."""
    gains = compiled_gains()
    short, long = (
        [gain for seq in seqs for gain in gains[seq].values()] for seqs in ((256, 1024), (4096, 8192, 16384))
    )
    assert min(long) > 1 > max(short)
    pair = [figure(naive(16384, 64, impl), "peak_gib") for impl in ("eager", "eager-compiled")]
    return (
        f"Forward and backward together are {span(long)} times faster from 4,096 tokens on, and the "
        f"peak at 16,384 falls from {in_gib(pair[0])} to {in_gib(pair[1])}. At 256 and 1,024 tokens the ratio is "
        f"{span(short)}: it is slower, because a compiled call costs the host more than these kernels take."
    )


def flash() -> str:
    """Our kernels beside the eager formula, by length."""
    found = {
        (int(row.case["seq"] or 0), str(row.case["impl"])): row
        for row in results("h200-attention-flash", "attention")
        if row.case["dtype"] == "bf16" and row.case["head_dim"] == 64 and row.status == "ok"
    }
    told = []
    for seq in (1024, 8192, 65536):
        ours, plain = found[seq, "flash-triton"], found[seq, "eager"]
        told.append(
            f"at {seq:,} tokens {in_ms(figure(ours, 'forward_ms'))} forward and {in_ms(figure(ours, 'backward_ms'))} "
            f"backward against {in_ms(figure(plain, 'forward_ms'))} and {in_ms(figure(plain, 'backward_ms'))}"
        )
    lengths = sorted({seq for seq, impl in found if impl == "flash-triton"})
    wins = [
        seq for seq in lengths if figure(found[seq, "flash-triton"], "both_ms") < figure(found[seq, "eager"], "both_ms")
    ]
    assert wins[-1] == 65536
    steady = next(seq for seq in lengths if all(longer in wins for longer in lengths if longer >= seq))
    memory = [figure(found[65536, impl], "peak_gib") for impl in ("flash-triton", "eager")]
    return (
        f"Batch 1, one head, causal, bf16, head_dim 64, our Triton kernels against the eager formula: "
        f"{'; '.join(told)}. From {steady:,} tokens on ours is faster; below, both are bound by launches. The peak at "
        f"65,536 is {in_gib(memory[0])} against {in_gib(memory[1])}."
    )


def leaderboard() -> str:
    """The leaderboard's case."""
    times_ms = {
        str(row.case["impl"]): figure(row, "both_ms")
        for row in results("h200-attention-peers", "attention")
        if row.case["seq"] == 16384 and row.case["head_dim"] == 64
    }
    ours = times_ms.pop("flash-triton")
    told = ", ".join(f"{impl} {in_ms(value)}" for impl, value in times_ms.items())
    return (
        f"Batch 1, 16 heads, 16,384 tokens, head_dim 64, causal, bf16, forward and backward: {in_ms(ours)} with our "
        f"kernels, deterministic and without atomics. In the same run: {told}. FlashAttention-2 in PyTorch takes "
        f"{times(times_ms['sdpa-flash'] / ours)} as long."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "attention-eager": eager,
    "attention-compiled": compiled,
    "attention-flash": flash,
    "attention-leaderboard": leaderboard,
}
