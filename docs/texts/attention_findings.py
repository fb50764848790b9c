"""What docs/attention.md says about its tables: what limits our kernels, the eager formula's end, compile, lengths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from statistics import median

from tables.attention import ceiling_tflops
from tables.source import figure, one, results
from texts.attention import compiled_gains, naive
from texts.wording import percent, span
from trainstep.attention.tuned import CHOICES, ChoiceCase
from trainstep.records import Record
from trainstep.report.finding import in_gib, in_ms, listed
from trainstep.report.numbers import number

OURS = "flash-triton"
MULTIPROCESSORS, EXPONENTIALS_PER_CLOCK = 132, 16
"""Of an H200, and of each of its multiprocessors."""
BACK_TO_BACK_MS = 0.8
"""docs/lab-log.md, 2026-11-21, "launch-bound attention": 16×16×1024×128, forward and backward."""


def peer(impl: str, **case: int | str) -> Record:
    """A row of the shapes that are compared with what PyTorch ships."""
    return one("h200-attention-peers", "attention", impl=impl, **case)


def beside() -> str:
    """Which peers are faster, on how many shapes."""
    rows = results("h200-attention-peers", "attention")
    shapes = list({tuple(row.case[name] for name in ("batch", "heads", "seq", "head_dim", "causal")) for row in rows})
    both = {
        (str(row.case["impl"]), *(row.case[name] for name in ("batch", "heads", "seq", "head_dim", "causal"))): figure(
            row, "both_ms"
        )
        for row in rows
    }
    behind = {
        impl: sum(both[(impl, *shape)] > both[(OURS, *shape)] for shape in shapes)
        for impl in ("sdpa-flash", "flex", "sdpa-cudnn")
    }
    assert behind["sdpa-flash"] == behind["flex"] == len(shapes)
    ahead = len(shapes) - behind["sdpa-cudnn"]
    return (
        "Forward and backward together are faster than SDPA's FlashAttention-2 and than compiled FlexAttention on "
        f"every row. cuDNN is faster than ours on {ahead} of the {len(shapes)}."
    )


def limits() -> str:
    """What keeps the kernels from a plain product's rate, where it has a figure."""
    row = peer(OURS, seq=16384, head_dim=64)
    pairs = int(str(row.case["heads"])) * 16384**2 / 2
    clock = figure(row, "sm_clock_mhz") * 1e6
    exponentials = pairs / (EXPONENTIALS_PER_CLOCK * MULTIPROCESSORS * clock) * 1e3
    products = 4 * 64 * pairs / (ceiling_tflops("bf16") * 1e12) * 1e3
    assert exponentials > products / 2
    short = figure(peer(OURS, seq=1024), "both_ms")
    assert short > BACK_TO_BACK_MS
    return (
        f"**Forward at head_dim 64: exponentials.** 16 × 16,384² / 2 of them, at {EXPONENTIALS_PER_CLOCK} a clock on "
        f"each of {MULTIPROCESSORS} multiprocessors and the {figure(row, 'sm_clock_mhz'):,.0f} MHz of this run, take "
        f"{in_ms(exponentials)}; the two products take {in_ms(products)} at the ceiling. The two overlap only as far "
        f"as two or three warpgroups alternate: the forward takes {in_ms(figure(row, 'forward_ms'))}.\n\n"
        f"**16 × 16 × 1,024: launches.** The row takes {in_ms(short)}. Launched back to back it is "
        f"{BACK_TO_BACK_MS} ms of work ([lab log](lab-log.md), 2026-11-21, launch-bound attention). The rest is what "
        "the host needs for three launches and autograd's thread."
    )


def end_of_eager() -> str:
    """Where the eager formula runs out of memory."""
    row = naive(32768, 128)
    assert row.status == "out of memory"
    assert row.values["score_matrices_at_peak"] == 4
    found = re.search(r"total capacity of ([\d.]+) GiB.*allocated memory ([\d.]+) GiB is allocated", row.reason)
    assert found
    capacity, held = (float(each) for each in found.groups())
    assert 3 * 32 <= held < 4 * 32, "three of four score matrices"
    fits = [naive(16384, head_dim) for head_dim in (16, 32, 64, 128)]
    assert all(number(figure(r, "peak_gib")) == number(figure(r, "predicted_peak_gib")) for r in fits)
    return (
        "**Where eager runs out of memory.** At batch 8, 32,768 tokens and float32 one score matrix is 8 · 32,768² · 4 "
        "bytes = 32 GiB. At its peak, in the backward, the eager formula holds four of them: the probabilities that "
        "were saved, their gradient, the product of the two inside softmax's backward, and its result. With inputs and "
        f"gradients that is {number(figure(row, 'predicted_peak_gib'))} GiB by formula, on a GPU of "
        f"{capacity:.1f} GiB that the allocator cannot fill to the last block. The attempt failed when it asked for "
        f"the fourth, with {held:.1f} GiB allocated. At 16,384 tokens the formula and the measured peak agree to three "
        "digits."
    )


def compiled() -> str:
    """What compilation changes about the eager formula."""
    gains = compiled_gains()
    long, short = (
        [gain for seq in seqs for gain in gains[seq].values()] for seqs in ((4096, 8192, 16384), (256, 1024))
    )
    assert min(long) > 1 > max(short)
    assert all(gains[seq][16] > gains[seq][64] > gains[seq][128] for seq in (4096, 8192, 16384)), (
        "most at small head_dim"
    )
    halves = [
        figure(naive(16384, head_dim, "eager-compiled"), "peak_gib") / figure(naive(16384, head_dim), "peak_gib")
        for head_dim in (16, 32, 64, 128)
    ]
    assert max(abs(half - 0.5) for half in halves) < 0.01
    assert all(
        figure(naive(seq, 128, impl), "before_backward_gib") == figure(naive(seq, 128), "before_backward_gib")
        for seq in gains
        for impl in ("eager", "eager-compiled")
    )
    fits = figure(naive(32768, 128, "eager-compiled"), "peak_gib")
    return (
        f"**What compile changes.** From 4,096 tokens on it is {span(long)} times faster, most at small head_dim, "
        "because it merges what lies between the two products and so passes over the scores fewer times. It holds half "
        f"the memory at its peak, so 32,768 tokens fit ({in_gib(fits)}). At 256 and 1,024 tokens it is *slower*, with "
        f"{span(short)} of eager's speed, as its calls cost the host more than these kernels take. It does not change "
        "what is saved for backward, nor that memory grows with the square of the length."
    )


def both_ms(impl: str, dtype: str, head_dim: int) -> dict[int, float]:
    """Length → milliseconds of forward and backward, one head; lengths that were not run are missing."""
    return {
        int(str(row.case["seq"])): figure(row, "both_ms")
        for row in results("h200-attention-flash", "attention")
        if (row.case["impl"], row.case["dtype"], row.case["head_dim"]) == (impl, dtype, head_dim) and row.status == "ok"
    }


def faster_from(other: str, dtype: str, head_dim: int) -> int | None:
    """The length from which ours is faster than `other` at all lengths measured; None if not at the longest."""
    ours, theirs = both_ms(OURS, dtype, head_dim), both_ms(other, dtype, head_dim)
    lost = [seq for seq in theirs if ours[seq] >= theirs[seq]]
    return min((seq for seq in theirs if seq > max(lost, default=0)), default=None)


def bfloat16() -> str:
    """From which length ours is faster, in bf16."""
    head_dims = (16, 64, 128)

    def told(other: str) -> str:
        starts = {head_dim: faster_from(other, "bf16", head_dim) for head_dim in head_dims}
        groups: dict[int, list[str]] = {}
        for head_dim, start in starts.items():
            assert start is not None
            groups.setdefault(start, []).append(str(head_dim))
        words = {start: "at every length" if start == 128 else f"from {start:,} tokens on" for start in groups}
        if len(groups) == 1:
            return next(iter(words.values()))
        return listed([f"{words[start]} at head_dim {listed(group)}" for start, group in sorted(groups.items())])

    longest = [both_ms("eager", "bf16", d)[65536] / both_ms(OURS, "bf16", d)[65536] for d in head_dims]
    short = [
        both_ms("sdpa-flash", "bf16", d)[seq] / both_ms(OURS, "bf16", d)[seq]
        for d in head_dims
        for seq in (128, 256, 512, 1024, 2048)
    ]
    assert max(short) < 1
    return (
        f"**In bfloat16**, with one head, ours is faster than the eager formula {told('eager')}. It is faster than its "
        f"compiled form {told('eager-compiled')}, and than SDPA's FlashAttention-2 {told('sdpa-flash')}. At 65,536 "
        f"tokens it is {span(longest)} times faster than eager.\n\n"
        "Up to 2,048 tokens all are bound by launches. SDPA's FlashAttention-2 then takes "
        f"{percent(median(short))} of our time in the median, because PyTorch's C++ operators are launched faster. "
        "With this little work name `sdpa-flash`, or capture a CUDA graph: `auto` goes by what was fastest with a "
        "whole batch."
    )


def float32() -> str:
    """Three TF32 products, beside SDPA's memory-efficient kernels and the eager formula; what `auto` takes."""
    faster, slower = [], []
    for head_dim in (16, 32, 64, 128):
        times_ms = {impl: both_ms(impl, "fp32", head_dim) for impl in (OURS, "sdpa-efficient", "eager")}
        longest = max(times_ms[OURS])
        ours, theirs, plain = (times_ms[impl][longest] for impl in (OURS, "sdpa-efficient", "eager"))
        assert longest == 65536
        assert ours < plain
        told = f"{in_ms(ours)} against {in_ms(theirs)} at head_dim {head_dim}"
        if ours < theirs:
            faster.append(f"{told} (faster from {faster_from('sdpa-efficient', 'fp32', head_dim):,} on)")
        else:
            slower.append(f"{told} (eager {in_ms(plain)})")
    shipped = CHOICES.shipped()
    chosen = {
        d: {impl for _, impl in shipped[ChoiceCase("sm_90", "float32", d, True)].by_length}
        for d in (16, 32, 64, 128, 256)
    }
    own = [d for d, impls in chosen.items() if impls == {OURS}]
    others = [d for d, impls in chosen.items() if impls == {"sdpa-efficient"}]
    assert [*own, *others] == list(chosen)
    return (
        '**In float32** under PyTorch\'s default matmul precision ("highest") our products are three on the TF32 '
        "matrix units, as in SDPA's memory-efficient kernels, and longer sums are taken in parts, which keeps them "
        "within the error budget of float32.\n\n"
        f"One head, forward and backward at 65,536 tokens, ours against SDPA's: {', '.join(faster)}. Beyond that "
        f"SDPA's is faster: {', '.join(slower)}. With a whole batch to fill the GPU `auto` takes ours up to head_dim "
        f"{own[-1]} and SDPA's at {listed([str(d) for d in others])}."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "attention-beside": beside,
    "attention-limits": limits,
    "attention-end-of-eager": end_of_eager,
    "attention-compile-changes": compiled,
    "attention-bfloat16": bfloat16,
    "attention-float32": float32,
}
