"""Findings of a profile, in sentences; a suggestion is followed by the change of the ladder that tried it, if one
did."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from trainstep.base import advice
from trainstep.base.precision import PRECISIONS
from trainstep.base.stats import RUN_SPREAD
from trainstep.report.findings import Claim, Finding, found, listed, literal
from trainstep.report.numbers import as_float, numeric
from trainstep.report.subjects.climbs import advised
from trainstep.report.subjects.run import slowing
from trainstep.rows import CeilingRow, DtypeRow, FamilyRow, KernelRow, PieceRow, ProfileRow, ScriptRow
from trainstep.rows.records import Row, Scalar, belonging, of_kind

NEEDED_COVERAGE = 0.98  # Share of kernel time that must be in a known phase and module
MUCH = 0.15  # Share of the step's kernel time from which a family is remarked on
MEMORY_BOUND = 0.6
"""Share of a large copy's rate from which a kernel is called bound by memory, as in Nsight Compute's speed of light:
below it, latency sets the pace as likely."""
AS_SMALL = 2.0  # Softmax this many times slower than its FLOPs explain is not called slow for its arithmetic
NOTABLE = 1.05  # Factor from which two times are told apart
TRACE = 0.01  # Share of the step's kernel time from which a family is named among others
EXPOSED = 0.05
"""Share of the time in which the device is busy that transfers may take with no kernel beside them."""
IDLE = 0.10  # Share of the step in which the device may have nothing to do before it is remarked on
_PLAIN = re.compile(r"array|char|float|double|int|long|bool|true|false|TensorList\w*Metadata")
"""Template arguments that do not say what a kernel does."""
FUSABLE = ("elementwise", "normalisation", "reduction", "copy")
_SIMT, _TRANSFER = "FP32 SIMT matmul", "transfer"
_KERNELS = ("families", "kernels")  # what shows a part of the kernel time


def kernel_findings(records: Sequence[Row]) -> list[Finding]:
    """The findings of the first profile."""
    profile = next((row for row in of_kind(records, ProfileRow) if row.status == "ok"), None)
    if profile is None:
        return []
    own = [row for row in records if profile.case.items() <= row.case.items()]
    return [
        *_devices(profile, records),
        *_reading(profile),
        *_trust(profile, records),
        *_top(profile, "forward", "the forward pass"),
        *_top(profile, "step", "the whole step" if profile.has_steps is not False else "the whole trace"),
        *_matmuls(profile, own, records),
        *_softmax(own, records),
        *_memory_bound(profile, own, records),
        *_optimizer(profile, own, records),
        *_transfers(profile),
        *_graphs(profile),
        *_idle(profile, records),
        *_communication(profile),
    ]


def _devices(profile: ProfileRow, records: Sequence[Row]) -> list[Finding]:
    """Findings of each device by itself: what is true of one need not be of another, and what one hides is not hidden
    by another."""
    if profile.devices is None:
        return []
    rows = [row for row in of_kind(records, ProfileRow) if row.status == "ok" and _same_trace(row, profile)]
    hidden = tuple(
        f"{row.device}: {(row.communication_overlapped_ms or 0) / row.communication_ms:.0%}"
        for row in rows
        if row.communication_ms
    )
    said = "The trace has {devices} devices, each measured by itself; what follows is of " + literal(
        str(profile.device)
    )
    if hidden:
        said += ". Of communication, this much runs beside the same device's compute: " + literal(", ".join(hidden))
    return [found("kernels.devices", said + ".", devices=profile.devices, hidden_shares=hidden)]


def _same_trace(row: Row, other: Row) -> bool:
    return {**row.case, "device": ""} == {**other.case, "device": ""}


def _reading(profile: ProfileRow) -> list[Finding]:
    """Findings on what could not be read, in the reader's words."""
    if not profile.notes:
        return []
    return [found("kernels.reading", literal(" ".join(profile.notes)), notes=profile.notes)]


def _per(profile: ProfileRow) -> str:
    """Unit of a figure: per step, or of another part."""
    return "per step" if profile.has_steps is not False else "in the trace"


def _trust(profile: ProfileRow, records: Sequence[Row]) -> Iterator[Finding]:
    """Findings that limit the others; nothing where all is well."""
    coverage, cost = profile.module_coverage, profile.profiler_cost
    if coverage is not None and coverage < NEEDED_COVERAGE:
        said = (
            "Only {module_coverage:.1%} of kernel time could be put in a phase and a module: shares by phase and "
            "module leave out the rest."
        )
        yield found("kernels.coverage", said, module_coverage=coverage)
    if profile.sums_disagree:
        said = (
            f"Kernels took longer than the unprofiled step in: {', '.join(profile.sums_disagree)}. The machine was "
            "busy with something else, or the profiler slows the kernels themselves; run again on a quieter machine."
        )
        yield found("kernels.sums", said, phases=profile.sums_disagree)
    if cost is None:
        return
    change = "{step_ms:ms} → {profiled_step_ms:ms}"
    if cost < -RUN_SPREAD:
        called = "profiler-faster"
        slows = any(map(slowing, of_kind(records, ScriptRow)))
        why = "they come earlier in a script that slows down"
        why = why if slows else "the machine changed meanwhile; run again on a quieter one"
        said = (
            f"The profiled steps were {{profiler_cost:share}} faster than those without the profiler ({change}): "
            f"{why}. Shares can be trusted, times cannot."
        )
    elif cost <= RUN_SPREAD:
        called, said = "profiler-free", f"Profiling cost nothing that shows ({change})."
    else:
        called = "profiler-cost"
        said = (
            f"Profiling cost {{profiler_cost:share}} of the step ({change}): compare kernel times with one another, "
            "and not with times measured without the profiler."
        )
    figures = {"profiler_cost": cost, "step_ms": profile.step_ms, "profiled_step_ms": profile.profiled_step_ms}
    yield found(f"kernels.{called}", said, **figures)


def _top(profile: ProfileRow, where: str, words: str) -> list[Finding]:
    values, top, often = profile.values, f"top_{where}_kernel", f"most_called_{where}_kernel"
    if top not in values:
        return []
    figures = {"kernel": values[top], **{name: values[f"{top}_{name}"] for name in ("share", "ms", "calls")}}
    calls = "1 call" if round(numeric(figures["calls"])) == 1 else "{calls:.0f} calls"
    said = (
        f"In {words}, the kernel that takes most time is {literal(brief_name(str(values[top])))} "
        f"({literal(str(values[f'{top}_family']))}): {{share:share}} of the kernel time, {{ms:ms}} in {calls}"
    )
    if values[often] != values[top]:
        said += ". Called most often, {most_calls:.0f} times, is " + literal(brief_name(str(values[often])))
        figures |= {"most_called": values[often], "most_calls": values[f"{often}_calls"]}
    ms = as_float(figures["ms"]) if where == "step" else None
    claim = Claim("One kernel takes {share:share} of the kernel time", ("kernels",), ms=ms, severity="aside")
    return [found(f"kernels.top-of-{where}", f"{said}.", claim, **figures)]


def brief_name(kernel: str) -> str:
    """A kernel's name for a sentence: of its template arguments only the first that tells something."""
    name, _, arguments = kernel.partition("<")
    telling = next((word for word in re.findall(r"[A-Za-z_]\w+", arguments) if not _PLAIN.fullmatch(word)), None)
    return f"{name}<{telling}>" if telling else name


def _of_kernels(profile: ProfileRow, share: float) -> float | None:
    """A share of the kernel time in ms."""
    return None if profile.kernels_ms is None else share * profile.kernels_ms


def _families(own: Sequence[Row]) -> dict[str, FamilyRow]:
    return {row.family: row for row in of_kind(own, FamilyRow) if row.phase == "step"}


def _where(own: Sequence[Row], names: Sequence[str]) -> str:
    """The phases in which most of these families' time passes: `62% of it in backward and 30% of it in loss`."""
    rows = [row for row in of_kind(own, FamilyRow) if row.phase != "step" and row.family in names]
    times = {
        phase: sum(row.ms or 0 for row in rows if row.phase == phase)
        for phase in dict.fromkeys(row.phase for row in rows)
    }
    total = sum(times.values())
    most = [phase for phase in sorted(times, key=lambda phase: -times[phase]) if times[phase] >= MUCH * total]
    return listed([f"{times[phase] / total:.0%} of it in {phase}" for phase in most]) if total else ""


def _matmuls(profile: ProfileRow, own: Sequence[Row], records: Sequence[Row]) -> Iterator[Finding]:
    forward, step = profile.matmul_share_forward, profile.matmul_share_step
    if forward is not None and step is not None:
        said = (
            "Matmuls take {forward_share:share} of the kernel time in forward and {step_share:share} in the "
            f"whole {'step' if profile.has_steps is not False else 'trace'}, fused attention not counted."
        )
        yield found("kernels.matmuls", said, forward_share=forward, step_share=step)
    elif step is None and profile.undecided_share:
        said = (
            "The share of matmuls is unknown: neither operators nor names tell what {undecided_share:share} of "
            "the kernel time computes."
        )
        yield found("kernels.matmuls-unknown", said, undecided_share=profile.undecided_share)
    simt = _families(own).get(_SIMT)
    if simt is None or simt.share is None or simt.share < MUCH:
        return
    said = "{share:share} of the kernel time are float32 products on the ordinary units, not on tensor cores"
    entry = PRECISIONS.get(profile.precision or "fp32")  # None for one that only another version knows
    is_mended = entry is None or entry.rate != "fp32"
    if not is_mended:
        end, gains = advised(": TF32 or bf16 moves them there.", records, "kernels.float32-products", profile.workload)
        said += end
    else:
        where, gains = _where(own, [_SIMT]), {}
        said += f", though the step runs in {profile.precision}{f': {where}' if where else ''}."
    claimed, ms = "Products run in float32, off the tensor cores", _of_kernels(profile, simt.share)
    claim = Claim(claimed, _KERNELS, ms, action="" if is_mended else advice.TF32)
    yield found("kernels.float32-products", said, claim, share=simt.share, **gains)


def _softmax(own: Sequence[Row], records: Sequence[Row]) -> list[Finding]:
    every = of_kind(own, PieceRow)
    pieces = {row.piece: row for row in every if row.phase == "forward"}
    if "softmax" not in pieces or "scores" not in pieces:
        return []
    softmax, scores = pieces["softmax"], pieces["scores"]
    if not (softmax.main_tflop and scores.main_tflop and softmax.main_ms and scores.main_ms):
        return []
    fewer, ratio = scores.main_tflop / softmax.main_tflop, scores.main_ms / softmax.main_ms
    factor = max(ratio, 1 / ratio)
    times = f"{factor:.1f}× {'less' if ratio > 1 else 'more'} time than" if factor >= NOTABLE else "as much time as"
    said = f"Softmax takes {times} the score product with {{fewer_flop:.0f}}× fewer FLOPs"
    if fewer < AS_SMALL * ratio:  # as slow as its arithmetic is small
        return [found("kernels.softmax", f"{said}.", fewer_flop=fewer, faster=ratio)]
    copy = next((row.gb_s for row in of_kind(records, CeilingRow) if row.operation == "copy"), None)
    end, figures = advised(". Fused attention removes it.", records, "kernels.softmax", softmax.workload)
    rate, is_bound = "", False
    if softmax.main_gb_s and copy:
        rate = " ({gb_s:n} GB/s, {of_copy:.0%} of a large copy)"
        figures |= {"gb_s": softmax.main_gb_s, "of_copy": softmax.main_gb_s / copy}
        is_bound = softmax.main_gb_s >= MEMORY_BOUND * copy
    why = "bandwidth-bound" if is_bound else "its arithmetic does not take that long"
    said += f": {why}{rate}{end}"
    ms = sum(row.ms or 0.0 for row in every if row.piece == "softmax" and row.phase != "step") or None
    claim = Claim("Softmax takes long for its arithmetic", ("pieces",), ms, action=advice.FUSED_ATTENTION)
    figures |= {"fewer_flop": fewer, "faster": ratio, "is_memory_bound": is_bound}
    return [found("kernels.softmax", said, claim, **figures)]


def _memory_bound(profile: ProfileRow, own: Sequence[Row], records: Sequence[Row]) -> list[Finding]:
    """Kernels that fusing would save; of a step that is compiled already, where they are left."""
    shares = {name: row.share or 0 for name, row in _families(own).items() if name in FUSABLE}
    present = tuple(name for name in FUSABLE if shares.get(name, 0) >= TRACE)
    share = sum(shares[name] for name in present)
    if share < MUCH:
        return []
    said = (
        f"{listed(present).capitalize()} kernels take {{share:share}} of the kernel time for little arithmetic: each "
        "reads and writes whole tensors"
    )
    if profile.compile not in (None, "off"):
        compiled, where = "the model is" if profile.compile == "model" else "the blocks are", _where(own, present)
        said += f", though {compiled} compiled{f'; {where}' if where else ''}."
        claim = Claim("Small kernels are left though it is compiled", _KERNELS, _of_kernels(profile, share))
        return [found("kernels.unfused-though-compiled", said, claim, share=share, families=present)]
    saves = "saves" if profile.compile == "off" else "would save, where it is not used yet,"
    fusing = f", which torch.compile {saves} by fusing them."
    end, gains = advised(fusing, records, "kernels.unfused", profile.workload)
    said += end
    claimed, ms = "Small kernels read and write whole tensors", _of_kernels(profile, share)
    claim = Claim(claimed, _KERNELS, ms, action=advice.COMPILED_BLOCKS)
    return [found("kernels.unfused", said, claim, share=share, families=present, **gains)]


def _optimizer(profile: ProfileRow, own: Sequence[Row], records: Sequence[Row]) -> list[Finding]:
    families = [row for row in of_kind(own, FamilyRow) if row.family != _TRANSFER]
    rows = [row for row in families if row.phase == "optimizer"]
    total = sum(row.ms or 0 for row in families if row.phase == "step")
    spent, moved = sum(row.ms or 0 for row in rows), sum(row.gb or 0 for row in rows)
    if not total or spent / total < MUCH:
        return []
    said = "The optimizer takes {share:share} of the kernel time" + (" and moves {gb:n} GB" if moved else "")
    figures: dict[str, Scalar] = {"share": spent / total, "gb": moved or None}
    ms = _of_kernels(profile, spent / total)
    if profile.optimizer in (None, "adamw-foreach"):
        unknown = ", where it is not used yet," if profile.optimizer is None else ""
        fused_form = f": its fused form{unknown} reads and writes everything once."
        end, gains = advised(fused_form, records, "kernels.optimizer-unfused", profile.workload)
        claim = Claim("The optimizer is not fused", _KERNELS, ms, action=advice.FUSED_OPTIMIZER)
        return [found("kernels.optimizer-unfused", said + end, claim, **figures, **gains)]
    fused = ", fused already" if profile.optimizer == "adamw-fused" else ""
    said += f"{fused}: that grows with the parameters alone, so a larger batch makes its share smaller."
    claim = Claim("The optimizer takes {share:share} of the kernel time", _KERNELS, ms)
    return [found("kernels.optimizer", said, claim, **figures)]


def _idle(profile: ProfileRow, records: Sequence[Row]) -> list[Finding]:
    if profile.idle_share is None or profile.on_cpu or profile.idle_share < IDLE:
        return []
    end, figures = ". Fewer, larger kernels help.", dict[str, Scalar]()
    if profile.compile in (None, "off"):
        end, figures = advised(end, records, "kernels.idle", profile.workload)
    said = (
        "The device is idle for {idle_share:share} of the step ({idle_ms:ms} of {step_ms:ms}, without the "
        f"profiler): the host launches more slowly than the kernels run{end}"
    )
    figures |= {"idle_share": profile.idle_share, "idle_ms": profile.idle_ms, "step_ms": profile.step_ms}
    seen = ("phase-sums", "kernels")
    claim = Claim("The device is idle for {idle_share:share} of the step", seen, ms=profile.idle_ms)
    return [found("kernels.idle", said, claim, **figures)]


def _transfers(profile: ProfileRow) -> list[Finding]:
    """Copies between host and device that the kernels wait for: they are mended by memory and order, not by kernels."""
    taken, beside, busy = profile.transfers_ms, profile.transfers_overlapped_ms or 0, profile.busy_ms
    if not (taken and busy) or taken - beside < EXPOSED * busy:
        return []
    to_host, pinned, gb = profile.transfers_to_host_share or 0, profile.transfers_pinned_share, profile.transfers_gb
    rate = " ({gb:n} GB at {gb_s:n} GB/s)" if gb else ""
    said = f"Transfers between host and device take {{ms:ms}} {_per(profile)}{rate}, "
    said += "{overlapped_share:.0%} of it beside kernels"
    if to_host > 0.5:
        said += (
            "; most of it goes to the host: .item(), .cpu() and printing a loss copy and wait, so take them every so "
            "many steps, or into pinned memory with non_blocking=True"
        )
    elif pinned is None:
        said += (
            "; the trace does not say whether the host's memory is pinned, without which a copy cannot run beside "
            "kernels: pin_memory=True in the DataLoader and .to(device, non_blocking=True)"
        )
    elif pinned < 0.5:
        said += (
            f"; {1 - pinned:.0%} of it is of pageable memory, which cannot be copied beside kernels: pin_memory=True "
            "in the DataLoader and .to(device, non_blocking=True) make it so"
        )
    else:
        said += (
            ", though the memory is pinned already: copy the next batch while this one is computed, with "
            "non_blocking=True on a stream of its own"
        )
    figures = {"ms": taken, "gb": gb, "gb_s": gb / taken * 1e3 if gb else None, "overlapped_share": beside / taken}
    claimed, seen = "Kernels wait for copies between host and device", ("profile", "kernels")
    claim = Claim(claimed, seen, ms=taken - beside)
    return [found("kernels.transfers", f"{said}.", claim, **figures, pinned_share=pinned, to_host_share=to_host)]


def _graphs(profile: ProfileRow) -> list[Finding]:
    if not profile.graphs_ms or not profile.kernels_ms:
        return []
    said = (
        "CUDA graphs take {share:share} of the kernel time ({ms:ms}), recorded as one each: which kernels and which "
        "communication ran in them is not known. nsys profile --cuda-graph-trace=node records them."
    )
    return [found("kernels.graphs", said, share=profile.graphs_ms / profile.kernels_ms, ms=profile.graphs_ms)]


def _communication(profile: ProfileRow) -> list[Finding]:
    if not profile.communication_ms or profile.communication_overlapped_ms is None:
        return []
    part = profile.communication_overlapped_ms / profile.communication_ms
    said = f"Communication takes {{ms:ms}} {_per(profile)}, {{overlapped_share:.0%}} of it beside compute."
    exposed = profile.communication_ms - profile.communication_overlapped_ms
    claimed, seen = "{overlapped_share:.0%} of communication is hidden by compute", ("profile", "kernels")
    claim = Claim(claimed, seen, ms=exposed)
    return [found("kernels.communication", said, claim, ms=profile.communication_ms, overlapped_share=part)]


FORMULA = 0.05  # share of the step's kernel time from which a formula that is written out is remarked on
_LOSS = "(loss)"
_CROSS_ENTROPY = advice.Line("F.cross_entropy(logits.flatten(0, -2), targets.flatten())")
_MATH_FORM = "aten::_scaled_dot_product_attention_math"
_ATTENTION = {
    "attention-written-out": (
        "Attention is unfused",
        advice.FUSED_ATTENTION,
        "Attention is unfused in {modules:list}: products, mask and softmax are kernels of their own there, and "
        "take {share:.0%} of the kernel time. F.scaled_dot_product_attention(q, k, v, attn_mask=mask) computes the "
        "same in one kernel, without a score matrix in memory. Leave attn_mask out if you have no mask. Write "
        "is_causal=True in its place only if your mask is causal. A boolean attn_mask is True where a query may look.",
    ),
    "attention-returns-weights": (
        "nn.MultiheadAttention computes weights to return them",
        advice.Line("attention(q, k, v, …, need_weights=False)", "where nn.MultiheadAttention is called"),
        "In {modules:list}, nn.MultiheadAttention returns its weights, so products, mask and softmax are kernels of "
        "their own, and take {share:.0%} of the kernel time. Call it with need_weights=False if you do not use them.",
    ),
    "attention-not-fused": (
        "Attention runs in its math form",
        None,
        "In {modules:list}, scaled_dot_product_attention runs in its math form, as products, mask, softmax and "
        "dropout one after the other, and takes {share:.0%} of the kernel time: no fused kernel took the call. On a "
        "CPU dropout is one reason, on a GPU a mask, a dtype or head_dim; "
        "torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) around the call makes torch say which.",
    ),
}
"""Form of attention → the claim, the line to write, and the sentence, which is right for any mask."""
_OF_LOSSES = ("softmax", "elementwise", "reduction")
_LOG_LIKELIHOOD = re.compile(r"aten::_?(softmax|log|neg|mean|div_|add|clamp(_min)?|(fill|zero)_|nll_loss\w*)")
"""Operators of a written-out cross-entropy, of the families before; a mean on a CPU divides."""
_GATHERED = {"aten::gather", "aten::index", "aten::scatter_", "aten::nll_loss_forward"}
"""Operators of which one picks the targets' log-probabilities; the third makes ones and zeros to multiply by."""


def formula_findings(rows: Sequence[Row]) -> list[Finding]:
    """Attention and cross-entropy written out where PyTorch has one kernel for them, in the first profile's model."""
    profile = next((row for row in of_kind(rows, ProfileRow) if row.status == "ok"), None)
    if profile is None:
        return []
    kernels = belonging(rows, KernelRow, profile)
    own = () if belonging(rows, PieceRow, profile) else _attention(profile, kernels, rows)  # ours has a flag for it
    return [*own, *_cross_entropy(profile, kernels)]


def _attention(profile: ProfileRow, kernels: Sequence[KernelRow], rows: Sequence[Row]) -> Iterator[Finding]:
    """Modules whose own forward makes batched products and a softmax, by themselves or in SDPA's math form."""
    returning = [row.module for row in of_kind(rows, DtypeRow) if row.class_name == "MultiheadAttention"]
    forms: dict[str, list[str]] = {form: [] for form in _ATTENTION}
    for module in dict.fromkeys(row.module for row in kernels if row.module != _LOSS):
        operators = _operators(kernels, module, "forward")
        if {"aten::bmm", "aten::_softmax"} <= operators:
            returns = any(fnmatchcase(each, module) for each in returning)  # `blocks.*.attention` is one row of kernels
            form = "not-fused" if _MATH_FORM in operators else "returns-weights" if returns else "written-out"
            forms[f"attention-{form}"].append(module)
    for form, (claimed, action, said) in _ATTENTION.items():
        share = sum(row.share or 0 for row in kernels if row.module in forms[form])
        if share >= FORMULA:
            claim = Claim(claimed, _KERNELS, _of_kernels(profile, share), action=action)
            yield found(f"formulas.{form}", said, claim, modules=tuple(forms[form]), share=share)


def _cross_entropy(profile: ProfileRow, kernels: Sequence[KernelRow]) -> list[Finding]:
    """A loss that is the mean of a softmax's logarithm at the targets. With other arithmetic it is another one, such as
    an entropy, a focal loss, a distillation or a likelihood with weights."""
    operators = _operators(kernels, _LOSS, "loss")
    share = sum(row.share or 0 for row in kernels if row.module == _LOSS)
    own = Counter[str]()
    for row in kernels:
        if row.module == _LOSS and row.phase == "loss" and (row.family in _OF_LOSSES or row.operator in _GATHERED):
            own[str(row.operator)] += round(row.calls or 1)
    ones = own["aten::scatter_"]
    most = {"aten::mul": ones, "aten::sum": ones + own["aten::mean"] / 2}  # a mean on a CPU is seen twice, and sums
    others = own.keys() - _GATHERED - {each for each in own if _LOG_LIKELIHOOD.fullmatch(each)}
    is_mean = {"aten::_softmax", "aten::log"} <= operators and operators & {"aten::mean", "aten::nll_loss_forward"}
    is_other = any(own[each] > most.get(each, 0) for each in others)
    if share < FORMULA or not is_mean or not operators & _GATHERED or is_other:
        return []
    said = (
        "Cross-entropy is unfused: the loss and its backward take {share:.0%} of the kernel time, over tensors "
        f"as large as the logits. {_CROSS_ENTROPY.code} makes two passes over them where classes are their last "
        "dimension, and cannot overflow or take the logarithm of zero."
    )
    claimed, ms = "Cross-entropy is unfused", _of_kernels(profile, share)
    claim = Claim(claimed, _KERNELS, ms, action=_CROSS_ENTROPY)
    return [found("formulas.cross-entropy-written-out", said, claim, modules=(_LOSS,), share=share)]


def _operators(kernels: Sequence[KernelRow], module: str, phase: str) -> set[str]:
    return {str(row.operator) for row in kernels if row.module == module and row.phase == phase}


RULES = (formula_findings, kernel_findings)
