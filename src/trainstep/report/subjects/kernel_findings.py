"""What a profile says, in sentences; a suggestion is followed by the rung of the ladder that tried it, if one did."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from trainstep.kinds import CeilingRow, FamilyRow, PieceRow, ProfileRow, RungRow
from trainstep.records import Row, Scalar, of_kind
from trainstep.report.finding import Finding, in_ms, listed
from trainstep.report.numbers import number
from trainstep.stats import RUN_SPREAD

NEEDED_COVERAGE = 0.98  # Share of kernel time that must be in a known phase and module
MUCH = 0.15  # Share of the step's kernel time from which a family is remarked on
MEMORY_BOUND = 0.5  # Share of a large copy's rate from which a kernel is called bound by memory
IDLE = 0.10  # Share of the step in which the device may have nothing to do before it is remarked on
_PLAIN = re.compile(r"array|char|float|double|int|long|bool|true|false|TensorList\w*Metadata")
"""Template arguments that do not say what a kernel does."""
_COMPILED = ("compiled blocks", "compiled model")
_FUSABLE = ("elementwise", "normalisation", "reduction", "copy")
_SIMT = "FP32 SIMT matmul"


def kernel_findings(records: Sequence[Row]) -> list[Finding]:
    """The findings of the first profile."""
    profile = next((row for row in of_kind(records, ProfileRow) if row.status == "ok"), None)
    if profile is None:
        return []
    own = [row for row in records if profile.case.items() <= row.case.items()]
    return [
        *_trust(profile),
        *_top(profile, "forward", "the forward pass"),
        *_top(profile, "step", "the whole step"),
        *_matmuls(profile, own, records),
        *_softmax(own, records),
        *_memory_bound(profile, own, records),
        *_optimizer(profile, own, records),
        *_idle(profile, records),
        *_communication(profile),
    ]


RULES = (kernel_findings,)


def _found(id: str, sentence: str, figures: Mapping[str, Scalar]) -> Finding:
    return Finding("kernels", sentence, f"kernels.{id}", figures)


def _trust(profile: ProfileRow) -> list[Finding]:
    """What limits the other findings; nothing where all is well."""
    found = []
    coverage, cost = profile.module_coverage, profile.profiler_cost
    if coverage is not None and coverage < NEEDED_COVERAGE:
        sentence = (
            f"Only {coverage:.1%} of kernel time could be put in a phase and a module: shares by phase and module "
            "leave out the rest."
        )
        found.append(_found("coverage", sentence, {"module_coverage": coverage}))
    if profile.sums_disagree:
        sentence = (
            f"Kernels took longer than the unprofiled step in: {', '.join(profile.sums_disagree)}. The machine was "
            "busy with something else, or the profiler slows the kernels themselves; run again on a quieter machine."
        )
        found.append(_found("sums", sentence, {"phases": profile.sums_disagree}))
    if cost is None:
        return found
    figures = {"profiler_cost": cost, "step_ms": profile.step_ms, "profiled_step_ms": profile.profiled_step_ms}
    change = f"{in_ms(profile.step_ms)} → {in_ms(profile.profiled_step_ms)}"
    if cost < -RUN_SPREAD:
        sentence = (
            f"The profiled steps were {_percent(cost)} faster than those without the profiler ({change}): the "
            "machine changed meanwhile. Shares can be trusted, times cannot; run again on a quieter machine."
        )
        return [*found, _found("profiler-faster", sentence, figures)]
    if cost <= RUN_SPREAD:
        return [*found, _found("profiler-free", f"Profiling cost nothing that shows ({change}).", figures)]
    sentence = (
        f"Profiling cost {_percent(cost)} of the step ({change}): compare kernel times with one "
        "another, and not with times measured without the profiler."
    )
    return [*found, _found("profiler-cost", sentence, figures)]


def _percent(share: float) -> str:
    return f"{abs(share):.0%}" if abs(share) >= 0.1 else f"{abs(share):.1%}"


def _top(profile: ProfileRow, where: Literal["forward", "step"], words: str) -> list[Finding]:
    """The longest kernel beside the one that is called most often."""
    top = profile.top(where)
    if top is None:
        return []
    calls = "1 call" if f"{top.calls:.0f}" == "1" else f"{top.calls:.0f} calls"
    sentence = (
        f"In {words}, the kernel that takes most time is {brief_name(top.name)} ({top.family}): "
        f"{_percent(top.share)} of the kernel time, {in_ms(top.ms)} in {calls}"
    )
    figures: dict[str, Scalar] = {"kernel": top.name, "share": top.share, "ms": top.ms, "calls": top.calls}
    if top.most_called != top.name:
        sentence += f". Called most often, {top.most_calls:.0f} times, is {brief_name(top.most_called)}"
        figures |= {"most_called": top.most_called, "most_calls": top.most_calls}
    return [_found(f"top-of-{where}", f"{sentence}.", figures)]


def brief_name(kernel: str) -> str:
    """A kernel's name for a sentence: of its template arguments only the first that tells something."""
    name, _, arguments = kernel.partition("<")
    telling = next((word for word in re.findall(r"[A-Za-z_]\w+", arguments) if not _PLAIN.fullmatch(word)), None)
    return f"{name}<{telling}>" if telling else name


def _families(own: Sequence[Row]) -> dict[str, FamilyRow]:
    """Family → its row of the whole step."""
    return {row.family: row for row in of_kind(own, FamilyRow) if row.phase == "step"}


def _where(own: Sequence[Row], names: Sequence[str]) -> str:
    """The phases in which most of these families' time passes: `62% of it in backward and 30% of it in loss`."""
    times: dict[str, float] = {}
    for row in of_kind(own, FamilyRow):
        if row.phase != "step" and row.family in names:
            times[row.phase] = times.get(row.phase, 0) + (row.ms or 0)
    total = sum(times.values())
    most = [phase for phase in sorted(times, key=lambda phase: -times[phase]) if times[phase] >= MUCH * total]
    return listed([f"{times[phase] / total:.0%} of it in {phase}" for phase in most]) if total else ""


def _matmuls(profile: ProfileRow, own: Sequence[Row], records: Sequence[Row]) -> list[Finding]:
    found = []
    forward, step = profile.matmul_share_forward, profile.matmul_share_step
    if forward is not None and step is not None:
        sentence = (
            f"Matrix products take {_percent(forward)} of the kernel time in forward and {_percent(step)} in the whole "
            "step, fused attention not counted."
        )
        found.append(_found("matmuls", sentence, {"forward_share": forward, "step_share": step}))
    simt = _families(own).get(_SIMT)
    if simt is None or simt.share is None or simt.share < MUCH:
        return found
    sentence = (
        f"{_percent(simt.share)} of the kernel time are float32 products on the ordinary units, not on tensor cores"
    )
    if profile.precision in (None, "fp32"):
        proof, gains = _proof(records, ("TF32 matmuls", "bf16 autocast"))
        sentence += f": TF32 or bf16 moves them there.{proof}"
    else:
        where, gains = _where(own, [_SIMT]), {}
        sentence += f", though the step runs in {profile.precision}{f': {where}' if where else ''}."
    return [*found, _found("float32-products", sentence, {"share": simt.share, **gains})]


def _softmax(own: Sequence[Row], records: Sequence[Row]) -> list[Finding]:
    """Softmax's kernel against the score product's, in forward."""
    pieces = {row.piece: row for row in of_kind(own, PieceRow) if row.phase == "forward"}
    if "softmax" not in pieces or "scores" not in pieces:
        return []
    softmax, scores = pieces["softmax"], pieces["scores"]
    if not (softmax.main_tflop and scores.main_tflop and softmax.main_ms and scores.main_ms):
        return []
    fewer, ratio = scores.main_tflop / softmax.main_tflop, scores.main_ms / softmax.main_ms
    figures: dict[str, Scalar] = {"fewer_flop": fewer, "faster": ratio}
    factor = max(ratio, 1 / ratio)
    times = f"{factor:.1f}× {'less' if ratio > 1 else 'more'} time than" if factor >= 1.05 else "as much time as"
    sentence = f"Softmax takes {times} the score product with {fewer:.0f}× fewer FLOPs"
    if fewer < 2 * ratio:  # as slow as its arithmetic is small
        return [_found("softmax", f"{sentence}.", figures)]
    copy = next((row.gb_s for row in of_kind(records, CeilingRow) if row.operation == "copy"), None)
    rate, why = "", "it is bound by memory"
    if softmax.main_gb_s and copy:
        part = softmax.main_gb_s / copy
        rate = f" (it moves {number(softmax.main_gb_s)} GB/s, {part:.0%} of a large copy here)"
        figures |= {"gb_s": softmax.main_gb_s, "of_copy": part}
        if part < MEMORY_BOUND:
            why = "its arithmetic is not what takes the time"
    proof, gains = _proof(records, ("fused attention", "our FlashAttention"))
    return [_found("softmax", f"{sentence}: {why}{rate}; a fused attention removes it.{proof}", {**figures, **gains})]


def _memory_bound(profile: ProfileRow, own: Sequence[Row], records: Sequence[Row]) -> list[Finding]:
    """Kernels that fusing would save; of a step that is compiled already, where they are left."""
    shares = {name: row.share or 0 for name, row in _families(own).items() if name in _FUSABLE}
    present = [name for name in _FUSABLE if shares.get(name, 0) >= 0.01]
    share = sum(shares[name] for name in present)
    if share < MUCH:
        return []
    sentence = (
        f"{listed(present).capitalize()} kernels take {_percent(share)} of the kernel time for little arithmetic: each "
        "reads and writes whole tensors"
    )
    figures: dict[str, Scalar] = {"share": share, "families": tuple(present)}
    if _is_compiled(profile):
        compiled = "the blocks are" if profile.compile == "blocks" else "the model is"
        where = _where(own, present)
        sentence += f", though {compiled} compiled{f'; {where}' if where else ''}."
        return [_found("unfused-though-compiled", sentence, figures)]
    saves = "saves" if profile.compile == "off" else "would save, where it is not used yet,"
    proof, gains = _proof(records, _COMPILED)
    sentence += f", which torch.compile {saves} by fusing them.{proof}"
    return [_found("unfused", sentence, {**figures, **gains})]


def _is_compiled(profile: ProfileRow) -> bool:
    return profile.compile not in (None, "off")


def _optimizer(profile: ProfileRow, own: Sequence[Row], records: Sequence[Row]) -> list[Finding]:
    families = of_kind(own, FamilyRow)
    rows = [row for row in families if row.phase == "optimizer"]
    total = sum(row.ms or 0 for row in families if row.phase == "step")
    spent = sum(row.ms or 0 for row in rows)
    if not total or spent / total < MUCH:
        return []
    moved = sum(row.gb or 0 for row in rows)
    sentence = f"The optimizer takes {_percent(spent / total)} of the kernel time"
    sentence += f" and moves {number(moved)} GB" if moved else ""
    figures: dict[str, Scalar] = {"share": spent / total, "gb": moved or None}
    if profile.optimizer in (None, "adamw-foreach"):
        unknown = ", where it is not used yet," if profile.optimizer is None else ""
        proof, gains = _proof(records, ("fused optimizer",))
        sentence += f": its fused form{unknown} reads and writes everything once.{proof}"
        return [_found("optimizer-unfused", sentence, {**figures, **gains})]
    fused = ", fused already" if profile.optimizer == "adamw-fused" else ""
    sentence += f"{fused}: that grows with the parameters alone, so a larger batch makes its share smaller."
    return [_found("optimizer", sentence, figures)]


def _idle(profile: ProfileRow, records: Sequence[Row]) -> list[Finding]:
    if profile.idle_share is None or profile.on_cpu or profile.idle_share < IDLE:
        return []
    proof, gains = ("", {}) if _is_compiled(profile) else _proof(records, _COMPILED)
    sentence = (
        f"The device has nothing to do for {_percent(profile.idle_share)} of the step ({in_ms(profile.idle_ms)} of "
        f"{in_ms(profile.step_ms)}, without the profiler): the host launches more slowly than the kernels run. Fewer, "
        f"larger kernels help.{proof}"
    )
    figures = {"idle_share": profile.idle_share, "idle_ms": profile.idle_ms, "step_ms": profile.step_ms}
    return [_found("idle", sentence, {**figures, **gains})]


def _communication(profile: ProfileRow) -> list[Finding]:
    if not profile.communication_ms or profile.communication_overlapped_ms is None:
        return []
    part = profile.communication_overlapped_ms / profile.communication_ms
    sentence = f"Communication takes {in_ms(profile.communication_ms)} per step, {part:.0%} of it beside compute."
    return [_found("communication", sentence, {"ms": profile.communication_ms, "overlapped_share": part})]


def _proof(records: Sequence[Row], names: Sequence[str]) -> tuple[str, dict[str, Scalar]]:
    """What the ladder measured of such a change, in words and as `gain of RUNG`; empty where it has not."""
    found, gains = [], dict[str, Scalar]()
    for row in of_kind(records, RungRow):
        if row.rung not in names:
            continue
        if row.status != "ok":
            found.append(f"{row.rung} could not be used ({row.status})")
        elif row.verdict in ("faster", "slower") and row.gain is not None:
            factor = row.gain if row.verdict == "faster" else 1 / row.gain
            found.append(f"{row.rung} made the step {factor:.2f}× {row.verdict}")
            gains[f"gain of {row.rung}"] = row.gain
        elif row.verdict == "inconclusive":
            found.append(f"{row.rung} made no difference that the samples can show")
    return (f" On the ladder, {listed(found)}." if found else ""), gains
