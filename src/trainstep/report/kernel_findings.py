"""What a profile says, in sentences; a suggestion is followed by the rung of the ladder that tried it, if one did."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainstep.kinds import CeilingRow, FamilyRow, PieceRow, ProfileRow, RungRow
from trainstep.precision import PRECISIONS
from trainstep.records import Row, Scalar, of_kind
from trainstep.report.finding import Finding, in_ms, listed
from trainstep.report.numbers import number, numeric
from trainstep.stats import RUN_SPREAD

TOPIC = "kernels"
NEEDED_COVERAGE = 0.98
"""Share of kernel time that must be in a known phase and module."""
MUCH = 0.15
"""Share of the step's kernel time from which a family is remarked on."""
MEMORY_BOUND = 0.5
"""Share of a large copy's rate from which a kernel is called bound by memory."""
IDLE = 0.10
"""Share of the step in which the device may have nothing to do before it is remarked on."""
_PLAIN = re.compile(r"array|char|float|double|int|long|bool|true|false|TensorList\w*Metadata")
"""Template arguments that do not say what a kernel does."""
_COMPILED = ("compiled blocks", "compiled model")
_FUSABLE = ("elementwise", "normalisation", "reduction", "copy")


def kernel_findings(records: Sequence[Row]) -> list[Finding]:
    """The findings of the first profile."""
    profile = next((row for row in of_kind(records, ProfileRow) if row.status == "ok"), None)
    if profile is None:
        return []
    own = [row for row in records if profile.case.items() <= row.case.items()]
    sentences = [
        *_trust(profile),
        *_top(profile),
        *_matmuls(profile, own, records),
        *_softmax(own, records),
        *_memory_bound(profile, own, records),
        *_optimizer(profile, own, records),
        *_idle(profile, records),
        *_communication(profile),
    ]
    return [Finding(TOPIC, sentence) for sentence in sentences]


def _trust(profile: Row) -> list[str]:
    """What limits the other sentences; nothing where all is well."""
    found = []
    coverage = numeric(profile.values["module_coverage"])
    if coverage < NEEDED_COVERAGE:
        found.append(
            f"Only {coverage:.1%} of kernel time could be put in a phase and a module: shares by phase and module "
            "leave out the rest."
        )
    if profile.values.get("sums_disagree"):
        found.append(
            f"Kernels took longer than the unprofiled step in: {profile.values['sums_disagree']}. The machine was busy "
            "with something else, or the profiler slows the kernels themselves; run again on a quieter machine."
        )
    if profile.values.get("profiler_cost") is not None:
        cost = numeric(profile.values["profiler_cost"])
        change = f"{in_ms(profile.values['step_ms'])} → {in_ms(profile.values['profiled_step_ms'])}"
        if cost < -RUN_SPREAD:
            found.append(
                f"The profiled steps were {_percent(cost)} faster than those without the profiler ({change}): the "
                "machine changed meanwhile. Shares can be trusted, times cannot; run again on a quieter machine."
            )
        elif cost <= RUN_SPREAD:
            found.append(f"Profiling cost nothing that shows ({change}).")
        else:
            found.append(
                f"Profiling cost {_percent(cost)} of the step ({change}): compare kernel times with one "
                "another, and not with times measured without the profiler."
            )
    return found


def _percent(share: float) -> str:
    return f"{abs(share):.0%}" if abs(share) >= 0.1 else f"{abs(share):.1%}"


def _top(profile: Row) -> list[str]:
    """The longest kernel of forward and of the step, each beside the one that is called most often."""
    found = []
    for where, words in (("forward", "the forward pass"), ("step", "the whole step")):
        name = profile.values.get(f"top_{where}_kernel")
        if name is None:
            continue
        share, spent, calls = (profile.values[f"top_{where}_kernel_{part}"] for part in ("share", "ms", "calls"))
        sentence = (
            f"In {words}, the kernel that takes most time is {brief_name(name)} "
            f"({profile.values[f'top_{where}_kernel_family']}): {_percent(numeric(share))} of the kernel time, "
            f"{in_ms(spent)} in {_calls(calls)}"
        )
        most = profile.values[f"most_called_{where}_kernel"]
        if most != name:
            often = numeric(profile.values[f"most_called_{where}_kernel_calls"])
            sentence += f". Called most often, {often:.0f} times, is {brief_name(most)}"
        found.append(f"{sentence}.")
    return found


def _calls(number: Scalar) -> str:
    return "1 call" if f"{numeric(number):.0f}" == "1" else f"{numeric(number):.0f} calls"


def brief_name(kernel: Scalar) -> str:
    """A kernel's name for a sentence: of its template arguments only the first that tells something."""
    name, _, arguments = str(kernel).partition("<")
    telling = next((word for word in re.findall(r"[A-Za-z_]\w+", arguments) if not _PLAIN.fullmatch(word)), None)
    return f"{name}<{telling}>" if telling else name


def _families(own: Sequence[Row]) -> dict[str, Row]:
    """Family → its row of the whole step."""
    return {str(row.case["family"]): row for row in of_kind(own, FamilyRow) if row.case["phase"] == "step"}


def _where(own: Sequence[Row], names: Sequence[str]) -> str:
    """The phases in which most of these families' time passes: `62% of it in backward and 30% of it in loss`."""
    times: dict[str, float] = {}
    for row in of_kind(own, FamilyRow):
        if row.case["phase"] != "step" and row.case["family"] in names:
            times[str(row.case["phase"])] = times.get(str(row.case["phase"]), 0) + numeric(row.values["ms"])
    total = sum(times.values())
    most = [phase for phase in sorted(times, key=lambda phase: -times[phase]) if times[phase] >= MUCH * total]
    return listed([f"{times[phase] / total:.0%} of it in {phase}" for phase in most]) if total else ""


def _matmuls(profile: Row, own: Sequence[Row], records: Sequence[Row]) -> list[str]:
    found = []
    if profile.values.get("matmul_share_forward") is not None:
        forward, step = (numeric(profile.values[f"matmul_share_{where}"]) for where in ("forward", "step"))
        found.append(
            f"Matrix products take {_percent(forward)} of the kernel time in forward and {_percent(step)} in the whole "
            "step, fused attention not counted."
        )
    simt, precision = _families(own).get("FP32 SIMT matmul"), profile.case.get("precision")
    if simt is not None and numeric(simt.values["share"]) >= MUCH:
        sentence = (
            f"{_percent(numeric(simt.values['share']))} of the kernel time are float32 products on the ordinary units, "
            "not on tensor cores"
        )
        if precision is None or PRECISIONS[str(precision)].rate == "fp32":
            sentence += ": TF32 or bf16 moves them there." + _proof(records, ("TF32 matmuls", "bf16 autocast"))
        else:
            where = _where(own, ["FP32 SIMT matmul"])
            sentence += f", though the step runs in {precision}{f': {where}' if where else ''}."
        found.append(sentence)
    return found


def _softmax(own: Sequence[Row], records: Sequence[Row]) -> list[str]:
    """Softmax's kernel against the score product's, in forward."""
    pieces = {str(row.case["piece"]): row for row in of_kind(own, PieceRow) if row.case["phase"] == "forward"}
    if "softmax" not in pieces or "scores" not in pieces:
        return []
    softmax, scores = pieces["softmax"].values, pieces["scores"].values
    needed = (softmax.get("main_tflop"), scores.get("main_tflop"), softmax.get("main_ms"), scores.get("main_ms"))
    if not all(needed):
        return []
    fewer = numeric(scores["main_tflop"]) / numeric(softmax["main_tflop"])
    ratio = numeric(scores["main_ms"]) / numeric(softmax["main_ms"])
    factor = max(ratio, 1 / ratio)
    times = f"{factor:.1f}× {'less' if ratio > 1 else 'more'} time than" if factor >= 1.05 else "as much time as"
    sentence = f"Softmax takes {times} the score product with {fewer:.0f}× fewer FLOPs"
    if fewer < 2 * ratio:  # as slow as its arithmetic is small
        return [f"{sentence}."]
    moved = numeric(softmax["main_gb_s"]) if softmax.get("main_gb_s") else None
    copy = next((row for row in of_kind(records, CeilingRow) if row.case["what"] == "copy"), None)
    rate, why = "", "it is bound by memory"
    if moved is not None and copy is not None and copy.values.get("gb_s"):
        limit = numeric(copy.values["gb_s"])
        rate = f" (it moves {number(moved)} GB/s, {moved / limit:.0%} of a large copy here)"
        if moved < MEMORY_BOUND * limit:
            why = "its arithmetic is not what takes the time"
    return [
        f"{sentence}: {why}{rate}; a fused attention removes it."
        + _proof(records, ("fused attention", "our FlashAttention"))
    ]


def _memory_bound(profile: Row, own: Sequence[Row], records: Sequence[Row]) -> list[str]:
    """Kernels that fusing would save; of a step that is compiled already, where they are left."""
    families = _families(own)
    present = [name for name in _FUSABLE if name in families and numeric(families[name].values["share"]) >= 0.01]
    share = sum(numeric(families[name].values["share"]) for name in present)
    if share < MUCH:
        return []
    sentence = (
        f"{listed(present).capitalize()} kernels take {_percent(share)} of the kernel time for little arithmetic: each "
        "reads and writes whole tensors"
    )
    if _is_compiled(profile):
        compiled = "the blocks are" if profile.case["compile"] == "blocks" else "the model is"
        where = _where(own, present)
        return [f"{sentence}, though {compiled} compiled{f'; {where}' if where else ''}."]
    saves = "saves" if profile.case.get("compile") == "off" else "would save, where it is not used yet,"
    return [f"{sentence}, which torch.compile {saves} by fusing them." + _proof(records, _COMPILED)]


def _is_compiled(profile: Row) -> bool:
    return profile.case.get("compile") not in (None, "off")


def _optimizer(profile: Row, own: Sequence[Row], records: Sequence[Row]) -> list[str]:
    rows = [row for row in of_kind(own, FamilyRow) if row.case["phase"] == "optimizer"]
    total = sum(numeric(row.values["ms"]) for row in of_kind(own, FamilyRow) if row.case["phase"] == "step")
    spent = sum(numeric(row.values["ms"]) for row in rows)
    if not rows or not total or spent / total < MUCH:
        return []
    moved = sum(numeric(row.values["gb"]) for row in rows if row.values.get("gb"))
    sentence = f"The optimizer takes {_percent(spent / total)} of the kernel time"
    sentence += f" and moves {number(moved)} GB" if moved else ""
    optimizer = profile.case.get("optimizer")
    if optimizer in (None, "adamw-foreach"):
        unknown = ", where it is not used yet," if optimizer is None else ""
        proof = _proof(records, ("fused optimizer",))
        return [f"{sentence}: its fused form{unknown} reads and writes everything once.{proof}"]
    fused = ", fused already" if optimizer == "adamw-fused" else ""
    return [f"{sentence}{fused}: that grows with the parameters alone, so a larger batch makes its share smaller."]


def _idle(profile: Row, records: Sequence[Row]) -> list[str]:
    if (
        profile.values.get("idle_share") is None
        or profile.values.get("on_cpu")
        or numeric(profile.values["idle_share"]) < IDLE
    ):
        return []
    return [
        f"The device has nothing to do for {_percent(numeric(profile.values['idle_share']))} of the step "
        f"({in_ms(profile.values['idle_ms'])} of {in_ms(profile.values['step_ms'])}, without the profiler): the host "
        "launches more slowly than the kernels run. Fewer, larger kernels help."
        + ("" if _is_compiled(profile) else _proof(records, _COMPILED))
    ]


def _communication(profile: Row) -> list[str]:
    if not profile.values.get("communication_ms"):
        return []
    spent, shared = (numeric(profile.values[f"communication_{name}"]) for name in ("ms", "overlapped_ms"))
    return [f"Communication takes {in_ms(spent)} per step, {shared / spent:.0%} of it beside compute."]


def _proof(records: Sequence[Row], names: Sequence[str]) -> str:
    """What the ladder measured of such a change; empty where it has not."""
    found = []
    for row in of_kind(records, RungRow):
        if row.case.get("rung") not in names:
            continue
        name, called = row.case["rung"], row.values.get("verdict")
        if row.status != "ok":
            found.append(f"{name} could not be used ({row.status})")
        elif called == "faster":
            found.append(f"{name} made the step {numeric(row.values['gain']):.2f}× faster")
        elif called == "slower":
            found.append(f"{name} made the step {1 / numeric(row.values['gain']):.2f}× slower")
        elif called == "inconclusive":
            found.append(f"{name} made no difference that the samples can show")
    return f" On the ladder, {listed(found)}." if found else ""
