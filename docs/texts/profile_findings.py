"""What docs/profile.md says about its tables: what profiling costs, the longest kernels, softmax, families."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tables.source import figure, one, results
from texts.kernels import CASE, profile
from texts.wording import percent, span
from trainstep.plan.roofline import OPTIMIZER_BYTES
from trainstep.records import Row
from trainstep.report.finding import in_ms, listed
from trainstep.report.kernel_findings import brief_name
from trainstep.report.numbers import number

CONTEXTS = (128, 512, 1024)
PHASES = ("forward", "loss", "backward", "optimizer")
PIECES = ("scores", "softmax", "weighted sum")


def piece(name: str, context: int) -> Row:
    """A piece of eager attention in the forward of 2.7B."""
    return one("h200-profile", "attention piece", **(CASE | {"context": context}), phase="forward", piece=name)


def family(name: str, size: str = "2.7B") -> Row:
    """A family's row over the whole step at 512 tokens."""
    return one("h200-profile", "family", **(CASE | {"workload": size}), phase="step", family=name)


def ceiling(what: str) -> Row:
    """What a large product or a large copy reached in the run of 2.7B at 512 tokens."""
    return one("h200-profile-2.7B", "ceiling", what=what)


def coverage() -> str:
    """How much is attributed, and that kernels fit into their phases."""
    rows = results("h200-profile", "profile")
    least = min(figure(row, "module_coverage") for row in rows)
    assert least > 0.999
    assert all(figure(row, f"{phase}_busy_ms") <= figure(row, f"{phase}_ms") for row in rows for phase in PHASES)
    return (
        f"Every row has at least {100 * least:.2f}% of its kernel time in a known phase and module, backward included. "
        "In every phase of every row the kernels take no longer than the phase did without the profiler. What is left "
        "over is idle time."
    )


def cost() -> str:
    """What profiling costs, by who sets the pace."""

    def lengthened(row: Row) -> str:
        return f"{in_ms(figure(row, 'step_ms'))} become {in_ms(figure(row, 'profiled_step_ms'))}"

    short, middle, long = (profile(context=context) for context in CONTEXTS)
    costs = [figure(row, "profiler_cost") for row in (long, middle, short)]
    assert costs == sorted(costs)
    assert costs[0] < 0.05
    assert costs[-1] > 0.25
    starved = [profile(workload="small", context=context) for context in CONTEXTS[:2]]
    factors = [1 + figure(row, "profiler_cost") for row in starved]
    assert f"{factors[0]:.1f}" == f"{factors[1]:.1f}"
    assert abs(figure(starved[0], "step_ms") / figure(starved[1], "step_ms") - 1) < 0.05
    kernels = [figure(row, "kernels") for row in starved]
    assert abs(kernels[0] / kernels[1] - 1) < 0.05
    busy = [figure(row, "forward_busy_ms") for row in starved]
    return (
        "What profiling costs depends on who sets the pace. The launch of a kernel takes longer under it, the kernel "
        f"does not. 2.7B at 1,024 tokens waits for its kernels and takes {percent(costs[0])} longer "
        f"({lengthened(long)}). At 512 tokens it takes {percent(costs[1])} longer ({lengthened(middle)}). At 128, "
        f"where launches set the pace of its forward, it takes {percent(costs[2])} longer ({lengthened(short)}).\n\n"
        f"small at 128 and 512 tokens waits for its launches throughout. It takes {factors[0]:.1f} times as long "
        f"({listed([*map(lengthened, starved)])}), although its forward has only {in_ms(busy[0])} and "
        f"{in_ms(busy[1])} of kernels. Both contexts take the same time, as they launch about the same number of "
        f"kernels ({kernels[0]:,.0f} and {kernels[1]:,.0f}). At 128 tokens the GPU has nothing to do for "
        f"{percent(figure(starved[0], 'idle_share'))} of the step. The profiled time of such a step says nothing about "
        "the step."
    )


def top() -> str:
    """The longest kernels of forward and of the step."""
    rows = results("h200-profile", "profile")
    cases = {(str(row.case["workload"]), int(str(row.case["context"]))): row for row in rows}
    families = {
        where: {case: row.values[f"top_{where}_kernel_family"] for case, row in cases.items()}
        for where in ("forward", "step")
    }
    products = {case for case, name in families["forward"].items() if name == "tensor-core matmul"}
    assert products == {("2.7B", 512), ("2.7B", 1024)}
    assert {name for case, name in families["forward"].items() if case not in products} == {"copy"}
    assert {case for case, name in families["step"].items() if name != "copy"} == {("2.7B", 128)}
    assert families["step"]["2.7B", 128] == "optimizer"
    row, down = cases["2.7B", 512], cases["2.7B", 128]
    assert figure(row, "top_forward_kernel_calls") == 7 * 32
    names = [brief_name(down.values["top_forward_kernel"]), brief_name(row.values["top_step_kernel"])]
    return (
        "By time, the top kernel of forward is a matrix product only where model and context are large. At 2.7B and "
        f"512 tokens the same tensor-core kernel runs {figure(row, 'top_forward_kernel_calls'):.0f} times in a forward "
        "(seven projections in each of 32 blocks) and takes "
        f"{percent(figure(row, 'top_forward_kernel_share'))} of it. In the other rows it is a copy.\n\n"
        "In the whole step it is a copy in every row but one; at 2.7B and 128 tokens it is a kernel of the foreach "
        "optimizer. The copies are autocast's casts between float32 and bf16. "
        f"`{names[0]}` casts weights and scores down, in forward. `{names[1]}` casts results up again, "
        "among them every gradient of a weight: at 2.7B and 512 tokens "
        f"{figure(row, 'top_step_kernel_calls'):.0f} calls in a step, {in_ms(figure(row, 'top_step_kernel_ms'))} of "
        f"its {in_ms(figure(row, 'busy_ms'))} of kernels."
    )


def matmul() -> str:
    """Matrix products in forward and in the step."""
    shares = {
        context: [figure(profile(context=context), f"matmul_share_{where}") for where in ("step", "forward")]
        for context in CONTEXTS
    }
    gaps = {context: forward - step for context, (step, forward) in shares.items()}
    assert list(gaps.values()) == sorted(gaps.values(), reverse=True)
    assert 0 < gaps[1024] < 0.05
    optimizer = [figure(profile(context=context), "optimizer_busy_ms") for context in CONTEXTS]
    assert max(optimizer) / min(optimizer) < 1.01
    small = [
        figure(profile(workload="small", context=context), f"matmul_share_{where}")
        for context in CONTEXTS
        for where in ("step", "forward")
    ]
    moved = sum(figure(family(name, "small"), "share") for name in ("copy", "elementwise"))
    told = ", ".join(
        f"{percent(step)} against {percent(forward)} at {context:,} tokens" for context, (step, forward) in
        shares.items()
    )  # fmt: skip
    return (
        f"Matrix products have a smaller share of the step than of forward, at 2.7B {told}. Backward has two products "
        "for each of forward's, and so keeps their share. The optimizer has none, and its "
        f"{in_ms(optimizer[0])} do not depend on the context.\n\n"
        f"In small the products have at most {percent(max(small))} anywhere. At 512 tokens copies and elementwise "
        f"kernels take {percent(moved)} of its kernel time."
    )


def softmax() -> str:
    """Why softmax takes longer than the product Q·Kᵀ, with a fraction of its FLOPs."""
    pairs = [[piece(name, context) for name in ("scores", "softmax")] for context in CONTEXTS]

    def by_context(name: str) -> list[float]:
        return [figure(soft, name) / figure(scores, name) for scores, soft in pairs]

    (fewer,) = {round(1 / ratio) for ratio in by_context("main_tflop")}
    assert min(by_context("main_ms")) > 1.5
    longer, bytes_more = (listed([f"{ratio:.1f}" for ratio in by_context(name)]) for name in ("main_ms", "main_gb"))
    products = [piece(name, context) for name in ("scores", "weighted sum") for context in CONTEXTS[1:]]
    rates = [figure(piece("softmax", context), "main_gb_s") for context in CONTEXTS[1:]]
    moved = [figure(row, "main_gb_s") for row in products]
    copied = figure(ceiling("copy"), "gb_s")
    assert min(*rates, *moved) > 0.7 * copied, "near the limit of memory"
    return (
        f"At 2.7B softmax has {fewer} times fewer FLOPs than the score product (5 per score against 2·head_dim = 160), "
        f"and still takes {longer} times as long at 128, 512 and 1,024 tokens. Bytes explain it: it reads and writes "
        f"every score in float32, and so moves {bytes_more} times what the product moves in bf16.\n\n"
        f"Both run near the limit of memory. A large copy moves {number(copied)} GB/s on this GPU; at 512 and 1,024 "
        f"tokens softmax moves {span(rates)} GB/s, and the two products {span(moved)}. The products reach "
        f"{span(figure(row, 'main_tflops') for row in products)} TFLOP/s of the "
        f"{number(figure(ceiling('matmul bf16'), 'tflops'))} that a large product reaches, as head_dim is only 80: "
        "even the score product is bound by memory."
    )


def pieces() -> str:
    """What the products and softmax leave of the time of attention's pieces."""
    whole, alone = (
        [sum(figure(piece(name, context), what) for name in PIECES) for context in CONTEXTS[1:]]
        for what in ("ms", "main_ms")
    )
    assert all(part < everything / 2 for everything, part in zip(whole, alone, strict=True)), "the larger part"
    return (
        "The column beside them is the larger part. At 512 tokens all kernels of the three pieces take "
        f"{in_ms(whole[0])}, the products and softmax alone {in_ms(alone[0])}; at 1,024 tokens {in_ms(whole[1])} and "
        f"{in_ms(alone[1])}. The rest is the scaling, the mask and the casts: elementwise kernels that each read and "
        "write all scores. A fused attention removes all of it. The [ladder](steps.md) measured what that brings."
    )


def families() -> str:
    """The four large families of 2.7B at 512 tokens, and what is to be gained in each."""
    shares = {
        name: figure(family(name), "share") for name in ("optimizer", "tensor-core matmul", "copy", "elementwise")
    }
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    products, optimizer = family("tensor-core matmul"), family("optimizer")
    reached = figure(products, "tflops") / figure(ceiling("matmul bf16"), "tflops")
    moved = figure(optimizer, "gb_s") / figure(ceiling("copy"), "gb_s")
    assert min(reached, moved) > 0.9
    rungs = {
        name: figure(one("h200-analyze-2.7B", "rung", rung=name), "step_ms")
        for name in ("fused attention", "fused optimizer", "compiled blocks")
    }
    assert list(rungs.values()) == sorted(rungs.values(), reverse=True)
    names = ("the optimizer", "products", "copies", "elementwise kernels")
    told = ", ".join(f"{name} {percent(share)}" for name, share in zip(names, shares.values(), strict=True))
    return (
        f"At 2.7B and 512 tokens four families are large: {told}.\n\n"
        f"The products reach {number(figure(products, 'tflops'))} TFLOP/s, {percent(reached)} of a large product "
        "alone: there is little to gain in them. The optimizer moves "
        f"{number(figure(optimizer, 'gb'))} GB in {in_ms(figure(optimizer, 'ms'))}, at {percent(moved)} of the speed "
        "of a copy: its kernels are about as fast as they can be, and there are too many passes over the parameters. "
        f"The fused form moves {OPTIMIZER_BYTES['adamw-fused']} bytes per parameter instead of "
        f"{OPTIMIZER_BYTES['adamw-foreach']}. Copies and elementwise kernels take "
        f"{percent(shares['copy'] + shares['elementwise'])} of the time for next to no arithmetic; compilation fuses "
        "them.\n\n"
        f"On the [ladder](steps.md) of 2.7B, after fused attention, the fused optimizer took the step from "
        f"{in_ms(rungs['fused attention'])} to {in_ms(rungs['fused optimizer'])}, and compiling the blocks to "
        f"{in_ms(rungs['compiled blocks'])}."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "profile-coverage": coverage,
    "profile-cost": cost,
    "profile-top": top,
    "profile-matmul": matmul,
    "profile-softmax": softmax,
    "profile-pieces": pieces,
    "profile-time": families,
}
