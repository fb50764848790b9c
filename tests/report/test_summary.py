"""The first screen: the bar of modules by phases, cards ranked by what is at stake, confidence, and lines of code."""

import re
from dataclasses import replace

import pytest

from tests.report import sample
from tests.report.changes import BY_NAME, carried, drifted, final
from tests.report.page import Page
from tests.report.subjects.test_kernels import gpu_profile
from tests.report.subjects.test_kernels import records as profiled
from tests.report.subjects.test_script_ladder import BASELINE as SCRIPT
from tests.report.subjects.test_script_ladder import FUSED, TOP, ratio, row
from trainstep.base.config import PHASES
from trainstep.report.blocks import Advice, Cards, Headline, Sentences
from trainstep.report.breakdown import BESIDE, IDLE, OTHERS, UNPLACED, breakdown
from trainstep.report.findings import Claim, Finding
from trainstep.report.numbers import gib
from trainstep.report.page import render
from trainstep.report.subjects import SECTIONS, findings
from trainstep.report.subjects.climbs import of_steps
from trainstep.report.summary import MOST, alarms, cards, summary
from trainstep.rows import FINAL, AttentionRow, ChangeRow, KernelRow, ParallelRow, PeakRow, ProfileRow, ScriptRow
from trainstep.rows.records import Times, of_kind

PROFILE = ProfileRow(
    workload="m",
    precision="fp32",
    times={"step": Times(20.0), "forward": Times(8.0), "backward": Times(10.0), "optimizer": Times(2.0)},
    kernels_ms=15.0,
    n=10,
)  # fmt: skip


def profile(**busy):
    """A profile whose phases have kernels for so long."""
    times = {f"{phase}{end}": Times(ms) for phase, ms in busy.items() for end in ("_kernels", "_busy")}
    return replace(PROFILE, times=PROFILE.times | times)


def kernel(phase, module, ms):
    return KernelRow(workload="m", precision="fp32", phase=phase, module=module, kernel=f"k of {module}", ms=ms)


def summarised(rows):
    sections = [section for make in SECTIONS if (section := make(rows)) is not None]
    made = summary(rows, findings(rows), sections)
    assert made is not None
    return made


def first(rows, kind):
    return next((block for block in summarised(rows).blocks if isinstance(block, kind)), None)


def drawn(rows, bar=0):
    """Phase → part → ms of a bar."""
    stack = breakdown(rows).stacks[bar]
    return {phase: {part.name: part.ms for part in parts} for phase, parts in stack.phases.items()}


# ---- the bar


def test_kernels_are_drawn_by_module_and_phase_with_what_the_device_idles():
    rows = [
        profile(forward=6.0, backward=7.0, optimizer=2.0),
        kernel("forward", "blocks.*.attention.query", 1.0),
        kernel("forward", "blocks.*.attention", 2.0),
        kernel("forward", "blocks.*.mlp.up", 3.0),
        kernel("backward", "blocks.*.attention", 4.0),
        kernel("backward", "blocks.*.mlp.up", 3.0),
        kernel("optimizer", "(optimizer)", 2.0),
    ]
    assert drawn(rows) == {
        "forward": {"attention": 3.0, "mlp": 3.0, IDLE: 2.0},
        "backward": {"attention": 4.0, "mlp": 3.0, IDLE: 3.0},
        "optimizer": {"optimizer": 2.0},
    }
    made = breakdown(rows)
    assert made.stacks[0].total == 20.0
    roles = {part.name: part.role for parts in made.stacks[0].phases.values() for part in parts}
    assert len(set(roles.values())) == len(roles), "a colour each, the same in every phase"


def test_what_no_row_lists_is_not_given_to_a_module():
    """Rows of short kernels may be left out of a file; the profile knows their sum."""
    rows = [profile(forward=6.0), kernel("forward", "blocks.*.mlp", 4.0)]
    assert drawn(rows) == {"forward": {"mlp": 4.0, UNPLACED: 2.0, IDLE: 2.0}}
    on_cpu = [replace(rows[0], on_cpu=True), *rows[1:]]
    assert drawn(on_cpu) == {"forward": {"mlp": 4.0, UNPLACED: 2.0, BESIDE: 2.0}}, "a CPU is not idle there"


def test_many_modules_are_few_colours():
    rows = [profile(), *(kernel("forward", f"m{index}", 10.0 - index) for index in range(10))]
    parts = drawn(rows)["forward"]
    assert list(parts) == ["m0", "m1", "m2", "m3", "m4", "m5", OTHERS]
    assert sum(parts.values()) == pytest.approx(55.0)


def test_modules_of_two_towers_keep_their_paths():
    rows = [profile(), kernel("forward", "encoder.*.mlp", 2.0), kernel("forward", "decoder.*.mlp", 1.0)]
    assert drawn(rows) == {"forward": {"encoder.*.mlp": 2.0, "decoder.*.mlp": 1.0}}


def test_without_kernels_a_bar_has_phases_alone_and_the_recommended_step_beside_it():
    rows = sample.h200_analysis()
    base, top = accepted(rows)[0], accepted(rows)[-1]
    for bar, rung in enumerate((base, top)):
        assert drawn(rows, bar) == {name: {name: rung.times[name].median} for name in PHASES}
    assert len(breakdown(rows).stacks) == 2
    html = render(rows)
    label = r'role="img" aria-label="recommended: bf16[^"]+ forward [\d.]+ ms;[^"]* optimizer [\d.]+ ms"'
    assert re.search(label, html), "the same in words"


def test_the_recommended_bar_has_no_colour_of_a_module_s():
    """Two bars under one legend: blue was attention in one and forward in the other."""
    rows = [*sample.h200_analysis()]
    step = next(each for each in of_kind(rows, ChangeRow))
    busy = {f"{phase}_{part}": Times(3.0) for phase in ("forward", "backward") for part in ("kernels", "busy")}
    times = {phase: Times(4.0) for phase in ("step", "forward", "backward")} | busy
    case = {name: value for name, value in step.case.items() if name != "change"}
    profiled_step = ProfileRow(**case, times=times, kernels_ms=6.0, n=10)
    kernels = [
        KernelRow(**case, phase=phase, module="blocks.*.mlp", kernel=phase, ms=3.0) for phase in ("forward", "backward")
    ]
    both = breakdown([*rows, profiled_step, *kernels])
    assert len(both.stacks) == 2
    of_modules, recommended = (
        {part.role for parts in stack.phases.values() for part in parts} for stack in both.stacks
    )
    assert "neutral" not in of_modules
    assert recommended == {"neutral"}
    assert {part.role for parts in breakdown(rows).stacks[1].phases.values() for part in parts} > {"kind-1", "kind-2"}


def test_a_script_s_bar_has_its_own_phases():
    times = {"step": Times(10.0), "data": Times(4.0), "forward": Times(5.0)}
    rows = [ScriptRow(workload="train.py", times=times, n=9)]
    assert drawn(rows) == {"data wait": {"data wait": 4.0}, "forward": {"forward": 5.0}}, (
        "what no phase has is no part: medians need not add up"
    )
    assert breakdown(rows).caption.endswith("the phases’ together are 9.00 ms.")
    profiled = [replace(profile(), on_cpu=True), kernel("data", "m", 0.5)]
    assert drawn([*rows, *profiled])["data wait"] == {"m": 0.5, BESIDE: 3.5}, "what it waits has no kernels"


def test_rows_without_phases_have_no_bar():
    assert summary([], [], []) is None
    assert breakdown([PeakRow(workload="m", peak_gib=2.0)]) is None
    assert breakdown([replace(PROFILE, status="failed"), kernel("forward", "m", 1.0)]) is None


# ---- the cards


def test_cards_are_ranked_by_what_is_at_stake_and_lead_to_their_evidence():
    rows = profiled(gpu_profile())
    found = first(rows, Cards)
    stakes = [float(card.figure.removesuffix(" ms")) for card in found.cards]
    assert len(stakes) >= 3
    assert stakes == sorted(stakes, reverse=True)
    page = Page(render(rows))
    for card in found.cards:
        assert card.evidence[0] in page.ids, card.claim
        assert card.sentence in [each.sentence for each in findings(rows)]
    idle = next(card for card in found.cards if "idle" in card.claim)
    assert (idle.figure, idle.share) == ("0.300 ms", "15% of the step")


def finding(id, said="{id}", figures=None, **claim):
    return Finding(id.partition(".")[0], f"{id} said", id, figures or {}, Claim(said.format(id=id), **claim))


def claims(told, rows=()):
    shown = cards(rows, told, [])
    return [] if shown is None else [(card.claim, card.figure) for card in shown.cards]


WAITS = [finding("waits.line", f"l{index}", ms=float(index)) for index in range(1, 9)]
ASIDE = finding("phases.longest", ms=9.0, severity="aside")


def test_time_comes_before_memory_and_memory_is_not_left_out():
    told = claims([*WAITS, finding("memory.cache", gib=3.0)])
    assert [figure for _, figure in told] == ["8.00 ms", "7.00 ms", "6.00 ms", "5.00 ms", "3.00 GiB"]
    assert len(told) == MOST
    of_memory = [finding("x", f"m{index}", gib=float(index)) for index in range(1, 5)]
    assert [figure for _, figure in claims(of_memory)] == ["4.00 GiB", "3.00 GiB", "2.00 GiB", "1.00 GiB"]
    assert [figure[-2:] for _, figure in claims([*WAITS, *of_memory])] == ["ms", "ms", "ms", "iB", "iB"]


def test_a_claim_is_made_once_of_its_largest_stake():
    told = [finding("waits.line", "l", ms=2.0), finding("waits.line", "m", ms=5.0), finding("waits.line", "l", ms=9.0)]
    assert claims(told) == [("l", "9.00 ms"), ("m", "5.00 ms")]


def test_asides_are_cards_only_where_there_is_little_else():
    assert claims([*WAITS[:2], ASIDE])[0] == ("phases.longest", "9.00 ms")
    assert ("phases.longest", "9.00 ms") not in claims([*WAITS[:3], ASIDE])


def test_nothing_at_stake_is_no_card():
    assert claims([finding("x", ms=0.0), finding("x"), finding("x", severity="alarm")]) == []
    assert claims([finding("x", ms=0.19)], [PROFILE]) == [], "below 1 % of the step"
    assert claims([finding("x", ms=0.21)], [PROFILE]) != []
    assert claims([finding("x", ms=0.19, is_part=False)], [PROFILE]) != []


def test_what_makes_the_rest_worthless_comes_first():
    rows = [ChangeRow(workload="m", change="baseline", verdict="failed", status="failed", reason="no loss")]
    blocks = summarised(rows).blocks
    assert isinstance(blocks[0], Cards)
    assert blocks[0].is_alarm
    assert "The baseline failed (failed): no loss" in blocks[0].cards[0].sentence
    assert alarms(WAITS, []) is None


def test_the_action_is_what_a_ladder_found_best_of_what_it_kept():
    said = finding("x", ms=9.0, figures={"gain of TF32 matmuls": 3.0, "gain of bf16 autocast": 1.2})
    tf32 = ChangeRow(workload=PROFILE.workload, change="TF32 matmuls", **carried("TF32 matmuls"))
    assert cards([PROFILE, tf32], [said], []).cards[0].action == tf32.code
    kept = [row for row in sample.h200_analysis() if isinstance(row, ChangeRow)]
    assert cards([*kept, PROFILE], [said], []).cards[0].action == BY_NAME["bf16 autocast"].line.code, "TF32 is no more"
    slower = finding("kernels.unfused", ms=9.0, figures={"gain of compiled blocks": 0.8})
    assert cards([PROFILE], [slower], []).cards[0].action == "", "it was tried, and did not help"


def test_all_findings_are_there_folded_below_the_cards():
    rows = profiled(gpu_profile())
    sentences = first(rows, Sentences)
    assert sentences.is_folded
    assert sentences.count == len(findings(rows))
    assert f"<summary>All findings ({sentences.count})</summary>" in render(rows)
    noisy = [AttentionRow(**SHAPE, impl="sdpa", times={"both": Times(1.0, 0.5, 1.5)})]
    assert not first(noisy, Sentences).is_folded, "nothing stands above them"


# ---- confidence and the other headlines


def accepted(rows):
    """What the first ladder accepted."""
    return of_steps(rows)[0].accepted


def ended(rows, **fields):
    """These rows with another end of their ladder."""
    return [*(row for row in rows if not isinstance(row, ChangeRow) or row.change != FINAL), final(**fields)]


def test_confidence_names_interval_samples_control_and_noise():
    rows = sample.h200_analysis()
    told = first(rows, Headline).confidence
    assert told.startswith("95 % interval within this run ")
    assert "one process, 10 steps" in told
    assert told.count("drift check: ") == 2
    assert "the GPU was slowed in 8 of 8 changes" in told
    assert "no drift was checked" in first(ended(rows), Headline).confidence


def test_a_control_that_fails_is_said_beside_the_headline():
    rows = ended(sample.cpu_analysis(), **drifted("first", 1.0, 1.3, 1.2, 1.4))
    told = first(rows, Headline).confidence
    assert "again at the end took 1.30× [1.20–1.40] its first time, so the machine changed" in told


SHAPE = {"batch": 8, "heads": 1, "seq": 1024, "head_dim": 64, "causal": "yes", "dtype": "bf16"}


def test_attention_s_headline_is_the_fastest_of_the_largest_case():
    rows = [
        AttentionRow(**SHAPE, impl=impl, times={"both": Times(ms)}, n=9)
        for impl, ms in {"eager": 4.0, "sdpa": 2.0, "flex": 3.0}.items()
    ]
    small = {**SHAPE, "seq": 128}
    rows += [AttentionRow(**small, impl=impl, times={"both": Times(0.1)}) for impl in ("eager", "flex")]
    rows += [AttentionRow(**{**SHAPE, "seq": 4096}, impl="eager", times={"both": Times(64.0)})]
    made = first(rows, Headline)
    assert made.figure.value == 2.0
    assert made.says == "forward and backward with sdpa, the fastest median of 3 implementations"
    assert "seq 1024" in made.detail
    assert made.stats == [("flex", "3.00 ms", "1.50× the median"), ("eager", "4.00 ms", "2.00× the median")]


def test_schemes_and_peaks_have_a_headline_of_their_own():
    schemes = [
        ParallelRow(workload="m", scheme=name, world_size=2, times={"step": Times(ms)}, n=9)
        for name, ms in {"single": 5.0, "ddp": 8.0, "fsdp": 9.0}.items()
    ]
    assert first(schemes, Headline).says == "per step with ddp on 2 ranks, the fastest median of 2 schemes"
    hybrid = [
        ParallelRow(workload="m", scheme="hsdp", replicas=each, world_size=2, times={"step": Times(ms)}, n=9)
        for each, ms in {1: 7.0, 2: 6.0}.items()
    ]
    says = first([*schemes, *hybrid], Headline).says
    assert says == "per step with hsdp-2 on 2 ranks, the fastest median of 4 schemes"
    eager, compiled = ([replace(each, compile=mode) for each in schemes] for mode in ("off", "blocks"))
    quick = [replace(each, times={"step": Times(each.times["step"].median / 2)}) for each in compiled]
    says = first([*eager, *quick], Headline).says
    assert says == "per step with ddp, compile blocks on 2 ranks, the fastest median of 4 schemes"
    peaks = [
        PeakRow(workload="m", mode="step", context=512, peak_gib=3.0),
        PeakRow(workload="m", context=64, peak_gib=1.0),
    ]
    assert first(peaks, Headline).figure.text == "3.00 GiB"


def test_a_profile_s_headline_is_its_step_without_the_profiler():
    made = first(profiled(gpu_profile()), Headline)
    assert made.figure.value == 2.0
    assert ("Device idle", "15%", "without the profiler") in made.stats


# ---- advice


def test_kept_rungs_are_lines_with_the_gain_that_was_measured():
    rows = sample.h200_analysis()
    lines = {line.change: line for line in first(rows, Advice).lines}
    kept = {rung.change: rung for rung in accepted(rows)}
    assert list(lines) == ["bf16 autocast", "fused attention", "fused optimizer", "compiled blocks"]
    for name in ("fused attention", "fused optimizer", "compiled blocks"):
        gain = kept[name]
        assert lines[name].code == BY_NAME[name].line.code
        shown = [each.value for each in (lines[name].gain, lines[name].gain.low, lines[name].gain.high)]
        assert shown == pytest.approx([gain.gain, gain.gain_low, gain.gain_high])
    together = kept["TF32 matmuls"].gain * kept["bf16 autocast"].gain
    assert lines["bf16 autocast"].gain.value == pytest.approx(together), "TF32 is gone from the top, its gain is not"
    total = 1.0
    for line in lines.values():
        total *= line.gain.value
    assert total == pytest.approx(accepted(rows)[-1].speedup, rel=0.01)


def rung(name, gain, speedup, **case):
    low, high = {"gain_low": 0.99 * gain, "gain_high": 1.01 * gain}, {"speedup_low": speedup, "speedup_high": speedup}
    return ChangeRow(
        workload="m", change=name, gain=gain, speedup=speedup, accepted=True, verdict="faster", gradient_error=0.0,
        **carried(name),
        error_budget=1.0, times={"step": Times(100 / speedup)}, **low, **high, **case,
    )  # fmt: skip


def test_a_gain_counts_to_what_took_the_place_of_its_line_and_to_no_neighbour():
    eager = {"precision": "fp32", "attention": "eager", "optimizer": "adamw-foreach"}
    low, fused = eager | {"precision": "bf16"}, {"precision": "bf16", "attention": "sdpa"}
    rows = [
        replace(rung("baseline", 1.0, 1.0, **eager), verdict="baseline"),
        rung("bf16 autocast", 2.0, 2.0, **low),
        rung("fused attention", 1.5, 3.0, **low | fused),
        rung("fused optimizer", 1.25, 3.75, **low | fused | {"optimizer": "adamw-fused"}),
        rung("our FlashAttention, on the top", 1.2, 4.5,
             **low | {"attention": "flash-triton", "optimizer": "adamw-fused"}),
    ]  # fmt: skip
    lines = {line.change: line.gain.value for line in first(rows, Advice).lines}
    assert list(lines) == ["bf16 autocast", "fused optimizer", "our FlashAttention, on the top"]
    assert list(lines.values()) == pytest.approx([2.0, 1.25, 1.5 * 1.2])


def test_the_first_rung_that_fits_is_a_line_too():
    """Without it the script would still be too large."""
    case = {"precision": "fp32", "attention": "eager"}
    too_large = ChangeRow(workload="m", change="baseline", status="out of memory", reason="40 GiB", **case)
    fits = replace(rung("bf16 autocast", 1.0, 1.0, precision="bf16", attention="eager"), verdict="first that fits")
    (line,) = first([too_large, fits], Advice).lines
    assert (line.code, line.gain.text, line.gain.note) == (
        BY_NAME["bf16 autocast"].line.code, "fits", "the baseline does not",
    )  # fmt: skip
    second = rung("fused attention", 1.5, 1.5, precision="bf16", attention="sdpa")
    assert [line.change for line in first([too_large, fits, second], Advice).lines] == [
        "bf16 autocast",
        "fused attention",
    ]


def test_a_disputed_ladder_recommends_no_bar_and_advises_nothing_on_cards_either():
    rows = sample.h200_analysis()
    disputed = ended(rows, speedup=1.1, speedup_low=1.0, speedup_high=1.2)
    assert len(breakdown(disputed).stacks) == 1
    assert "In turns at the end 1.10×" in first(disputed, Headline).confidence
    assert [first(each, Advice) is None for each in (rows, disputed)] == [False, True]
    assert "On the ladder" in " ".join(finding.sentence for finding in findings(rows))
    assert "On the ladder" not in " ".join(finding.sentence for finding in findings(disputed))


def test_a_rung_kept_for_its_memory_says_what_it_saves():
    base, top = accepted(sample.cpu_analysis())[:2]
    smaller = replace(top, peak_gib=0.1, gain=1.0, gain_low=0.99, gain_high=1.01)
    (line,) = first([base, smaller], Advice).lines
    assert line.gain.note == f"peak {gib(base.peak_gib).removesuffix(' MiB')} → 102 MiB"


def test_a_script_s_ladder_has_its_lines_and_its_headline():
    lines = BY_NAME["fused optimizer"].line.text
    rows = [SCRIPT, replace(FUSED, **ratio("gain", 2.0), **carried("fused optimizer")), replace(TOP, code=lines)]
    (line,) = first(rows, Advice).lines
    assert (line.change, line.code, line.gain.value) == ("fused optimizer", BY_NAME["fused optimizer"].line.code, 2.0)
    assert first(rows, Headline).figure.value == 2.5
    assert "between runs 2.45–2.55×" in first(rows, Headline).confidence
    proven = ratio("gain", 1.5) | ratio("speedup", 1.5)
    other = row("its own", 5.0, **proven, verdict="faster", accepted=True, code="do(this)")
    assert first([SCRIPT, other], Advice).lines[0].code == "do(this)", "as the row has it"


def test_a_script_s_line_that_another_took_the_place_of_is_not_advised():
    kept = {"verdict": "faster", "accepted": True}
    blocks = row("compiled blocks", 8.0, **ratio("gain", 1.25), **kept, **carried("compiled blocks"))
    model = row("compiled model", 7.0, **ratio("gain", 1.14), **kept, **carried("compiled model"))
    rows = [SCRIPT, blocks, model, replace(TOP, code=model.lines)]
    advice = first(rows, Advice)
    assert [line.change for line in advice.lines] == ["compiled model"]
    assert "compiled blocks had brought 1.25×" in advice.note
    assert next(each for each in findings(rows) if each.id == "gain.script").figures["changes"] == ("compiled model",)
    uncertain = replace(TOP, code=model.lines, speedup_low=0.9)
    assert first([SCRIPT, blocks, model, uncertain], Advice) is None, "together nothing was certain"


def test_a_script_s_line_reads_as_its_row_has_it():
    old = row(
        "loader workers", 5.0, **ratio("gain", 1.5), verdict="faster", accepted=True, code="DataLoader(num_workers=8)"
    )
    advice = first([SCRIPT, old, replace(TOP, code=old.lines)], Advice)
    assert (advice.lines[0].code, advice.lines[0].where) == ("DataLoader(num_workers=8)", "")
    assert advice.to_copy.startswith("# loader workers: 1.50×")
    assert ", \n" not in advice.to_copy


def test_two_ladders_have_ids_of_their_own():
    rows = sample.cpu_analysis()
    page = Page(render([*rows, *(replace(row, workload="other") for row in rows if isinstance(row, ChangeRow))]))
    assert {"lines", "lines-1", "flags", "flags-1"} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)


def test_two_times_that_belie_the_speed_up_are_said_to_be_of_different_moments():
    rows = sample.h200_analysis()
    top = accepted(rows)[-1]
    slower = [replace(row, times=row.times | {"step": Times(5000.0)}) if row is top else row for row in rows]
    plain, told = first(rows, Headline), first(slower, Headline)
    assert "changed" not in plain.detail + str(plain.stats)
    assert "per step; the machine changed between them" in told.detail
    assert "; the machine changed between them" in told.stats[0][2]
