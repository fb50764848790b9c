"""Sentences about attention: the eager formula, its compiled form, FlashAttention, the leaderboard's case."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables.source import figure, one, results

from texts.wording import span, times
from trainstep.attention.choice_table import FASTEST
from trainstep.report.finding import in_gib, in_ms
from trainstep.report.records import Record


def naive(seq: int, head_dim: int, impl: str = "eager") -> Record:
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
    broken = naive(32768, 128)
    assert broken.status == "out of memory"
    return (
        f"Batch 8, fp32, head_dim 64: forward, backward, and memory before backward: {told}. Four times the length "
        "takes sixteen times the memory. At 32,768 tokens and head_dim 128 it is out of memory: one score matrix is 8 "
        f"· 32,768² · 4 bytes = 32 GiB, four are alive at the peak of backward, and with the rest that makes "
        f"{in_gib(figure(broken, 'predicted_peak_gib'))}. What is kept for backward grows with the square of the "
        "length. To be rid of it, never write the scores to memory: compute them again in backward, tile by tile."
    )


def compiled() -> str:
    """What torch.compile makes of the eager formula."""
    rows = results("h200-attention-naive", "attention")
    gains: dict[int, list[float]] = {}
    for row in rows:
        if row.case["impl"] == "eager" and row.status == "ok":
            seq, head_dim = int(row.case["seq"] or 0), int(row.case["head_dim"] or 0)
            other = naive(seq, head_dim, "eager-compiled")
            if other.status == "ok":
                gains.setdefault(seq, []).append(figure(row, "both_ms") / figure(other, "both_ms"))
    short, long = [*gains[256], *gains[1024]], [*gains[4096], *gains[8192], *gains[16384]]
    assert min(long) > 1
    assert min(short) < 1
    pair = [figure(naive(16384, 64, impl), "peak_gib") for impl in ("eager", "eager-compiled")]
    return (
        f"Forward and backward together take {span(gain for gain in long)} times less time from 4,096 tokens on, and "
        f"the peak at 16,384 falls from {in_gib(pair[0])} to {in_gib(pair[1])}. At 256 and 1,024 tokens the ratio is "
        f"{span(short)}: mostly slower, because a compiled call costs the host more than these kernels take."
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


def float32() -> str:
    """Three TF32 products, beside SDPA's memory-efficient kernels and the eager formula; what `auto` takes."""

    def both(impl: str, head_dim: int, seq: int) -> float:
        case = {"dtype": "fp32", "head_dim": head_dim, "seq": seq}
        return figure(one("h200-attention-flash", "attention", impl=impl, **case), "both_ms")

    seqs = sorted({int(str(row.case["seq"])) for row in results("h200-attention-flash", "attention")})
    longest = seqs[-1]
    faster, slower = [], []
    for head_dim in (16, 32, 64, 128):
        ours, theirs, plain = (both(impl, head_dim, longest) for impl in ("flash-triton", "sdpa-efficient", "eager"))
        assert ours < plain
        told = f"{in_ms(ours)} against {in_ms(theirs)} at head_dim {head_dim}"
        if ours < theirs:
            lost = [n for n in seqs if both("flash-triton", head_dim, n) >= both("sdpa-efficient", head_dim, n)]
            faster.append(f"{told} (faster from {min(n for n in seqs if n > max(lost)):,} on)")
        else:
            slower.append(f"{told} (eager {in_ms(plain)})")
    chosen = {d: {impl for _, impl in FASTEST["sm_90", "float32", d, True]} for d in (16, 32, 64, 128, 256)}
    own = [d for d, impls in chosen.items() if impls == {"flash-triton"}]
    others = [d for d, impls in chosen.items() if impls == {"sdpa-efficient"}]
    assert [*own, *others] == list(chosen)
    return (
        '**In float32** under PyTorch\'s default matmul precision ("highest") our products are three on the TF32 '
        "matrix units, as in SDPA's memory-efficient kernels, and longer sums are taken in parts, which keeps them "
        "within the error budget of float32. One head, forward and backward at "
        f"{longest:,} tokens, ours against SDPA's: {', '.join(faster)}. "
        f"Beyond that SDPA's is faster: {', '.join(slower)}. With a whole batch to fill the GPU "
        f"`auto` takes ours up to head_dim {own[-1]} and SDPA's at {' and '.join(map(str, others))}."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "attention-eager": eager,
    "attention-compiled": compiled,
    "attention-flash": flash,
    "attention-leaderboard": leaderboard,
    "attention-float32": float32,
}
