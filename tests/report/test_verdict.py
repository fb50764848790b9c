"""Every word of a verdict, on both sides of its threshold; and which of several words comes first."""

from dataclasses import replace

import pytest

from tests.report.subjects.test_thresholds import PROFILE, ceiling, family
from tests.report.test_findings import step
from trainstep.report.subjects import findings
from trainstep.report.subjects.run import DEBUGGING
from trainstep.report.verdict import MIXED, RULES, judge
from trainstep.rows import HabitRow, LineRow, RecompilationRow, ScriptRow, WaitRow
from trainstep.rows.records import Times
from trainstep.rows.run import LATE

NAME = "train.py"


def script(n=20, width=0.0, on_gpu=False, step=100.0, **phases):
    """A script with steps of 100 ms, some of them in these phases, and an interval of this width."""
    whole = Times(step, step * (1 - width / 2), step * (1 + width / 2))
    times = {"step": whole} | {name: Times(ms) for name, ms in (phases or {"forward": 10.0}).items()}
    return ScriptRow(workload=NAME, times=times, n=n, steps_seen=100, on_gpu=on_gpu, loader=f"{NAME}:39, no workers")


def habit(seen, name="anomaly-detection"):
    return HabitRow(workload=NAME, habit=name, line="train.py:7", seen=seen)


def again(compilations):
    return RecompilationRow(workload=NAME, line="train.py:5", function="f", compilations=compilations, last_step=9)


def lines(share, phase="other"):
    rows = script(**{"forward": 100 - share, phase: share})
    return [rows, LineRow(workload=NAME, line="train.py:31", phase=phase, function="log", seen=40, share=1.0)]


def before_backward(plain, ms):
    """So many samples of plain Python among 40 before backward, which is so long."""
    rows = [replace(lines(0.0, phase)[1], seen=n) for phase, n in (("forward", 40), ("python", plain))]
    return [script(forward=ms, other=100 - ms), *rows]


def waits(ms, starved=50.0):
    row = WaitRow(workload=NAME, line="train.py:8", call="item", ms_per_step=ms, calls_per_step=1.0, on_gpu=True)
    return [script(on_gpu=True, forward=100.0, starved=starved), row]


def ranks(own):
    """Three ranks, one of which takes so long for its own part."""
    return [
        replace(script(forward=ms), rank=at, times=dict.fromkeys(("own", "forward", "step"), Times(ms, ms, ms)))
        for at, ms in enumerate((100.0, 100.0, own))
    ]


def kernels(**shares):
    return [PROFILE, *(family(name, share) for name, share in shares.items())]


def growing(share):
    """Steps that grow by this share, from the median of the first tenth to that of the last."""
    samples = [100.0 + share * 100 * at / 45 for at in range(-2, 48)]
    return [replace(script(width=1.0), samples={"step": samples, "forward": samples})]


def mib(grown):
    return {"process_mib": [500.0 + grown * at / 45 for at in range(-2, 48)]}


GPU = {"on_gpu": True, "forward": 90.0}
CASES = [
    ("TOO-FEW-STEPS", [script(6)], [script(5)]),
    ("UNSTEADY", [script(width=0.49)], [script(width=0.5)]),
    ("UNSTEADY", [step(step_low_ms=80.0, step_high_ms=120.0)], [step(step_low_ms=70.0, step_high_ms=120.0)]),
    *(("DEBUG-ON", [script(), habit(0.4, name)], [script(), habit(0.5, name)]) for name in DEBUGGING),
    ("RECOMPILING", [script(), again(10)], [script(), again(11)]),
    ("RECOMPILING", [script(), habit(1, "finds-unused")], [script(), habit(1, "recompile-limit")]),
    ("STRAGGLER", ranks(104.0), ranks(105.1)),
    ("DATA-BOUND", [script(data=9.0)], [script(data=10.0)]),
    ("LAUNCH-BOUND", [script(starved=89.0, **GPU)], [script(starved=90.0, **GPU)]),
    ("LAUNCH-BOUND", [step(forward_issue_ms=28.0)], [step(forward_issue_ms=29.0)]),
    ("PYTHON-BOUND", lines(24.0), lines(25.0)),
    ("PYTHON-BOUND", lines(49.0, "loss"), lines(50.0, "loss")),
    ("PYTHON-BOUND", before_backward(19, 50.0), before_backward(20, 50.0)),  # of 40 samples before backward
    ("PYTHON-BOUND", before_backward(20, 49.0), before_backward(20, 50.0)),
    ("SYNC-BOUND", waits(9.0), waits(10.0)),
    ("SYNC-BOUND", waits(50.0, starved=9.0), waits(50.0, starved=10.0)),  # waits that cost the GPU nothing are none
    ("COPY-BOUND", [replace(script(**GPU), deep_copies_ms=9.0)], [replace(script(**GPU), deep_copies_ms=10.0)]),
    ("COMMUNICATION-BOUND", [script(communication=9.0)], [script(communication=10.0)]),
    ("COMMUNICATION-BOUND", *([script(), replace(PROFILE, profiled_step_ms=200.0, communication_ms=ms,
                                                 communication_overlapped_ms=0.0)] for ms in (19.0, 20.0))),
    ("COMPUTE-BOUND", [script(forward=20.0, backward=29.0)], [script(forward=20.0, backward=30.0)]),
    ("COMPUTE-BOUND", [step(), ceiling(61.0)], [step(), ceiling(60.0)]),
    ("COMPUTE-BOUND", kernels(matmul=0.49, softmax=0.3), kernels(matmul=0.5, softmax=0.3)),
    ("SLOWS-DOWN", growing(0.19), growing(0.21)),
    ("MEMORY-GROWS", [replace(script(), series=mib(15.0))], [replace(script(), series=mib(16.0))]),
    ("BANDWIDTH-BOUND", [script(optimizer=49.0)], [script(optimizer=50.0)]),
    ("BANDWIDTH-BOUND", kernels(elementwise=0.3, optimizer=0.19), kernels(elementwise=0.3, optimizer=0.2)),
]  # fmt: skip


BESIDE = ("SLOWS-DOWN", "MEMORY-GROWS")


def words(rows):
    return [each.word for each in judge(rows, findings(rows))[0]]


@pytest.mark.parametrize(("word", "below", "reached"), CASES)
def test_a_verdict_holds_from_its_threshold_on(word, below, reached):
    assert word not in words(below)
    assert words(reached)[word in BESIDE] == word


def test_every_word_has_a_case_and_one_rule():
    assert {word for word, *_ in CASES} == {rule.word for rule in RULES}
    assert len({rule.word for rule in RULES}) == len(RULES) == 15


def test_figures_that_do_not_stand_come_first_then_the_largest_loss_then_the_work():
    busy = script(data=20.0, communication=30.0, forward=50.0)
    assert words([busy]) == ["COMMUNICATION-BOUND", "DATA-BOUND"]
    assert words([busy, habit(1.0)])[:2] == ["DEBUG-ON", "COMMUNICATION-BOUND"]
    assert words([replace(busy, n=3), habit(1.0)])[:2] == ["TOO-FEW-STEPS", "DEBUG-ON"]
    assert words([script(forward=40.0, other=30.0)]) == [MIXED]
    assert words([replace(busy, times={}, n=0, status="failed", reason="why")]) == []


def test_a_cpu_is_never_bound_by_launches_waits_or_copies():
    cpu = [replace(each, on_gpu=False) for each in [*waits(50.0), script(starved=95.0, **GPU)]]
    assert words([replace(cpu[0], deep_copies_ms=50.0), *cpu[1:]]) == ["COMPUTE-BOUND"]


def test_steps_whose_batches_come_in_bursts_are_not_unsteady():
    bursts = script(width=2.0, data=0.0, forward=100.0)
    times = bursts.times | {"step": replace(bursts.times["step"], mean=200.0), "data": Times(0.0, mean=100.0)}
    assert words([bursts]) == ["UNSTEADY", "COMPUTE-BOUND"]
    assert words([replace(bursts, times=times)])[0] == "DATA-BOUND"


def test_a_verdict_names_the_line():
    rows = [script(data=42.0), lines(0.0, "data")[1], habit(1.0)]
    said = {each.word: each.says for each in judge(rows, findings(rows))[0]}
    assert said["DATA-BOUND"].endswith(" the DataLoader at train.py:39, which runs train.py:31 in log")
    assert said["DEBUG-ON"] == "anomaly detection is on at train.py:7"
    for line, code in (("train.py:9", "code at train.py:9"), (f"{LATE}train.py:9", f"{LATE}train.py:9")):
        rows = [lines(50.0)[0], replace(lines(50.0)[1], line=line)]
        assert judge(rows, findings(rows))[0][0].says == f"50% of each step runs your {code} in log"
