"""What docs/memory.md says about its tables: peaks, owners at the peak, what a block keeps, checkpointing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tables.source import figure, one, results
from texts.memory import peak
from texts.wording import percent, times
from trainstep.config import SIZES
from trainstep.records import Row
from trainstep.report.finding import in_gib, in_ms, listed
from trainstep.report.numbers import number

MODEL = SIZES["2.7B"]
CONTEXTS = (128, 256, 512)
PRECISIONS = ("fp32", "bf16")


def bytes_each(count: int) -> str:
    """GiB of this many bytes per parameter."""
    return in_gib(count * MODEL.num_parameters / 2**30)


def step_gib(context: int, precision: str = "fp32", name: str = "peak_gib") -> float:
    """A figure of a whole step of 2.7B."""
    return figure(peak(context, "step", precision), name)


def peaks() -> str:
    """Where the peak lies, by context."""
    short, middle, long = (step_gib(context) for context in CONTEXTS)
    assert abs(short / middle - 1) < 0.01, "does not depend on the context"
    for context in CONTEXTS[:2]:
        assert step_gib(context, name="loss_peak_gib") < step_gib(context, name="optimizer_peak_gib")
    assert step_gib(512, name="optimizer_peak_gib") < step_gib(512, name="loss_peak_gib") < long
    large = peak(2048, "step")
    assert large.status == "out of memory"
    return (
        f"At rest are the weights and AdamW's two moments, 12 bytes per parameter, {bytes_each(12)}; inference holds "
        f"the weights alone. The gradients are {bytes_each(4)} more. Up to 256 tokens they decide: the peak is at the "
        "end of backward, where all gradients are there and the activations are gone, and it does not depend on the "
        f"context ({in_gib(short)} and {in_gib(middle)} in fp32). At 512 tokens the activations are larger than the "
        f"gradients, and the peak moves to the beginning of backward ({in_gib(long)}).\n\n"
        f"At 2,048 tokens the step needs {number(figure(large, 'predicted_gib'))} GiB by prediction and does not fit "
        f"the GPU, while forward alone takes {in_gib(figure(peak(2048, 'forward'), 'peak_gib'))}. The difference is "
        "what is kept for backward, most of it eager attention's score matrices."
    )


def autocast() -> str:
    """Why autocast saves no memory."""
    cast = MODEL.num_parameters - MODEL.vocab_size * MODEL.d_model  # the embedding is looked up, not multiplied with
    copies = 2 * cast / 2**30
    forward = [figure(peak(128, "forward", precision), "peak_gib") for precision in PRECISIONS]
    middle = [step_gib(512, precision) for precision in PRECISIONS]
    large = [step_gib(2048, precision, "predicted_gib") for precision in PRECISIONS]
    assert all(narrow > wide for wide, narrow in (forward, middle, large))
    apart = [abs(step_gib(context, "bf16") / step_gib(context) - 1) for context in CONTEXTS[:2]]
    assert max(apart) < 0.005
    return (
        f"Autocast saves no memory here; it costs some. Forward alone needs {in_gib(forward[1])} instead of "
        f"{in_gib(forward[0])} at 128 tokens, because autocast keeps a bf16 copy of every weight it has cast until "
        f"forward ends, {in_gib(copies)}. In a training step the copies are kept for backward in any case. Half-width "
        f"activations make up for them only in part: {in_gib(middle[1])} against {in_gib(middle[0])} at 512 tokens, "
        f"and by prediction {number(large[1])} against {number(large[0])} GiB at 2,048, as the score matrices are kept "
        "in float32 for softmax and in bf16 for the product after it. At 128 and 256 tokens the peak under bf16 is "
        f"that under fp32, to within {percent(max(apart))}: it is that of gradients, which are float32 in both."
    )


def predicted() -> str:
    """How far the prediction is off, and why."""
    rows = [row for row in results("h200-memory", "peak") if row.case["mode"] == "step" and row.status == "ok"]
    errors = [figure(row, "prediction_error") for row in rows]
    assert max(errors) < 0
    rests = [figure(row, "at_rest_gib") for row in rows]
    return (
        f"The prediction is within {percent(-min(errors))} for all {len(rows)} steps that fit, and always below. It "
        "counts the bytes asked for. The allocator gives out a block whole where less than 1 MiB of it would be left "
        f"over, so memory at rest is more than the 12 bytes per parameter, {in_gib(min(rests))} to "
        f"{in_gib(max(rests))} from case to case; and the CUDA libraries hold {libraries()}."
    )


def libraries() -> str:
    """Memory that no part of the step owns: the CUDA libraries' workspaces."""
    return in_gib(figure(owned("unknown"), "mib") / 1024)


def owned(owner: str, part: str = "all") -> Row:
    """What one owner holds at the peak of the timeline's step."""
    return one("h200-allocations", "owner", owner=owner, part=part)


def owners() -> str:
    """Who owns the peak of a step, and which allocations are the largest."""
    step = one("h200-allocations", "memory-timeline")
    assert figure(step, "peak_gib") == figure(step, "allocator_gib")
    shares = {owner: figure(owned(owner), "share") for owner in ("optimizer state", "activations", "parameters")}
    feed_forward, attention = (
        figure(owned("activations", f"blocks.*.{name}"), "mib") / 1024 for name in ("feed_forward", "attention")
    )
    gradients = figure(owned("gradients"), "share")
    assert gradients < 0.02
    largest = results("h200-allocations", "allocation")
    size = figure(largest[0], "mib")
    made = [row for row in largest if row.values["made_in"] == "forward" and figure(row, "mib") == size]
    assert size == 4 * MODEL.num_heads * 512 * 512 * 4 / 2**20, "a block's scores in float32"
    assert sorted(str(row.values["owner"]) for row in made) == ["activations", "temporaries"]
    told = listed([f"{owner} ({percent(share)})" for owner, share in shares.items()])
    return (
        f"The peak of this step, {in_gib(figure(step, 'peak_gib'))} by the timeline and by the allocator's count, is "
        f"{told}. It is reached in the last block's backward, when a first "
        f"few gradients are there ({percent(gradients)}), and before anything of the other blocks is freed. "
        f"{percent(figure(step, 'unknown_share'))} has no owner: {libraries()}, the CUDA libraries' workspaces.\n\n"
        f"Of the activations, feed-forward networks own {in_gib(feed_forward)} and attention {in_gib(attention)}, most "
        "of the latter scores, which grow with the square of the context. The largest allocations are the score "
        f"matrices of one block in float32, {number(size)} MiB each. In forward the softmax makes two per block: its "
        "float32 input, which autocast makes and drops, and its result, which stays."
    )


def kept(what: str, precision: str = "fp32", compiled: str = "off", part: str = "first block") -> Row:
    """What one block of 2.7B keeps for backward: a group of tensors, or all."""
    return one("h200-residuals", "residual", part=part, what=what, precision=precision, compile=compiled)


def group(tensor: str, operation: str, precision: str, compiled: str = "off") -> Row:
    """The group of a block's tensors with this shape, kept for this operation."""
    rows = results("h200-residuals", "residual")
    (found,) = (
        row
        for row in rows
        if (row.case["part"], row.case["precision"], row.case["compile"]) == ("first block", precision, compiled)
        and (row.values["tensor"], row.values["operation"]) == (tensor, operation)
    )
    return found


def block() -> str:
    """What one block keeps in fp32."""
    groups = {
        "the two factors of SwiGLU's product": group("fp32 4×512×10240", "Mul", "fp32"),
        "softmax's result": group("fp32 4×32×512×512", "Softmax", "fp32"),
        "SiLU's input": group("fp32 4×512×10240", "Silu", "fp32"),
        "the input of the down projection": group("fp32 2048×10240", "Mm", "fp32"),
        "and two factors of attention's products": group("fp32 128×512×80", "Bmm", "fp32"),
    }
    shares = {name: figure(row, "share") for name, row in groups.items()}
    whole = kept("all")
    stream = kept("input of the first block", part="residual stream")
    assert figure(stream, "mib") == figure(stream, "formula_mib")
    return (
        f"One block keeps {number(figure(whole, 'mib'))} MiB in fp32. Five groups make up "
        f"{percent(sum(shares.values()))} of it: "
        f"{', '.join(f'{name} ({percent(share)})' for name, share in shares.items())}. The residual stream itself is "
        f"{number(figure(stream, 'mib'))} MiB, batch × context × d_model × 4 bytes, "
        f"{percent(figure(stream, 'mib') / figure(whole, 'mib'))} of what the block keeps. It is the least of it, and "
        "that is why checkpointing can do so much."
    )


def block_narrow() -> str:
    """The same under bf16 autocast."""
    wide, narrow = (figure(kept("all", precision), "mib") for precision in PRECISIONS)
    assert narrow > wide
    result, copy = group("fp32 4×32×512×512", "Softmax", "bf16"), group("bf16 128×512×512", "Bmm", "bf16")
    weights = 4 * MODEL.d_model**2 + 3 * MODEL.d_model * MODEL.d_ff
    return (
        f"Under bf16 autocast a block keeps {number(narrow)} MiB, more than in fp32. What was kept in float32 for "
        f"products is kept in half. But softmax's result stays float32 ({number(figure(result, 'mib'))} MiB) and its "
        f"bf16 copy is kept too ({number(figure(copy, 'mib'))} MiB). So are the bf16 copies of the weights, 2 bytes "
        f"per weight, {number(2 * weights / 2**20)} MiB in one block; these do not grow with batch or context."
    )


def block_compiled() -> str:
    """What compilation saves of it."""
    pairs = {p: [figure(kept("all", p, mode), "mib") for mode in ("off", "blocks")] for p in PRECISIONS}
    saved = {precision: 1 - after / before for precision, (before, after) in pairs.items()}
    assert min(saved.values()) > 0
    assert group("bf16 128×512×512", "CompiledFunction", "bf16", "blocks").values["storages"] == 2
    assert group("fp32 2048×10240", "CompiledFunction", "fp32", "blocks").values["storages"] == 3, "four without"
    told = " and ".join(
        f"{percent(saved[precision])} of a block in {precision} ({number(before)} to {number(after)} MiB)"
        for precision, (before, after) in pairs.items()
    )
    return (
        f"Compilation saves {told}: it computes SiLU's result again in backward instead of keeping it, and "
        "under autocast keeps two score matrices in bf16 instead of one in float32 and one in bf16. Compiled code has "
        "no modules to name; shapes tell what is what."
    )


def policies() -> dict[str, Row]:
    """Checkpointing policy → its row."""
    return {str(row.case["checkpointing"]): row for row in results("h200-checkpointing", "checkpointing")}


def best() -> str:
    """The best number of blocks between two checkpoints, and why it is not the square root of their number."""
    rows = policies()
    by_k = {int(name.removeprefix("every-")): row for name, row in rows.items() if name.startswith("every-")}
    sizes = {k: figure(row, "peak_gib") for k, row in by_k.items()}
    assert min(sizes, key=sizes.__getitem__) == 1
    assert list(sizes.values()) == sorted(sizes.values()), "every doubling is worse"
    none, first = rows["none"], by_k[1]
    ratio = figure(first, "step_ms") / figure(none, "step_ms")
    per_block = [(sizes[k] - sizes[1]) / (k - 1) for k in sizes if k > 1]
    step_ms = [figure(row, "step_ms") for row in by_k.values()]
    assert max(step_ms) / min(step_ms) < 1.05
    assert abs(sizes[32] / figure(none, "peak_gib") - 1) < 0.01
    return (
        f"The best K is 1. A checkpoint at every block takes the peak from {in_gib(figure(none, 'peak_gib'))} to "
        f"{in_gib(sizes[1])} ({percent(1 - sizes[1] / figure(none, 'peak_gib'))} less) and the step from "
        f"{in_ms(figure(none, 'step_ms'))} to {in_ms(figure(first, 'step_ms'))} ({times(ratio)} as long). Its "
        f"neighbours are no checkpointing and K = 2, with {in_gib(sizes[2])}.\n\n"
        f"The rule of the square root of the number of blocks, which would say {round(math.sqrt(MODEL.num_layers))} "
        "here, weighs the inputs that are kept against the blocks that are computed again. But the peak lies at the "
        "end of backward, in the first K blocks: there all gradients are held, and the inputs of later blocks are "
        "gone. So fewer inputs save nothing, and every further block that is computed again at once adds "
        f"{in_gib(sum(per_block) / len(per_block))}. At K = {max(sizes)} everything is computed again and nothing is "
        f"saved. The steps of all K take between {in_ms(min(step_ms))} and {in_ms(max(step_ms))}; two timed steps each "
        "are too few to rank them."
    )


def bargains() -> str:
    """Selective and recursive checkpointing, and what is left at K = 1."""
    rows = policies()
    plain, first, selective, recursive = (rows[name] for name in ("none", "every-1", "selective", "recursive"))
    saved = 1 - figure(selective, "peak_gib") / figure(plain, "peak_gib")
    longer = [figure(row, "step_ms") / figure(plain, "step_ms") for row in (selective, recursive)]
    assert figure(recursive, "peak_gib") >= figure(first, "peak_gib")
    errors = [abs(figure(row, "prediction_error")) for row in rows.values() if "prediction_error" in row.values]
    return (
        f"`selective` is the better bargain where {in_gib(figure(selective, 'peak_gib'))} will do: it saves "
        f"{percent(saved)} and takes {times(longer[0])} as long, as it computes no matrix product twice. `recursive` "
        f"keeps least of all in theory; with {MODEL.num_layers} blocks of this size it saves no more than K = 1 "
        f"({in_gib(figure(recursive, 'peak_gib'))}) and takes {times(longer[1])} as long as no checkpointing. All "
        f"predictions are within {percent(max(errors))}.\n\n"
        f"What is left at K = 1 is not activations: weights, optimizer state and gradients, 16 bytes per parameter, "
        f"are {bytes_each(16)} of the {in_gib(figure(first, 'peak_gib'))}."
    )


TEXTS: Mapping[str, Callable[[], str]] = {
    "memory-peak-moments": peaks,
    "memory-autocast": autocast,
    "memory-predicted": predicted,
    "memory-peak-owners": owners,
    "memory-block": block,
    "memory-block-bf16": block_narrow,
    "memory-block-compiled": block_compiled,
    "memory-best-policy": best,
    "memory-bargains": bargains,
}
