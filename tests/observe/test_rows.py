"""Rows of logs that were written by hand: a GPU's, several ranks', and logs that end anywhere."""

import json
from types import MappingProxyType

import pytest

from trainstep.base import advice
from trainstep.ladder.scripts import seen_of
from trainstep.observe import rows
from trainstep.observe.lines import shown_line
from trainstep.observe.log import RankLog, log_path, read_log
from trainstep.observe.rows import how_it_ended, script_records, why_no_step
from trainstep.observe.steps import Step
from trainstep.report.page import Report, render
from trainstep.report.subjects import run as subject
from trainstep.rows import LineRow, RecompilationRow, ScriptRow, WaitRow
from trainstep.rows.records import of_kind
from trainstep.rows.run import LATE

ITEM = {"file": "train.py", "line": 31, "function": "main", "call": "item"}


def gpu_log(steps=20, *, rank=0, world_size=1, host=None, device=None, waits=MappingProxyType({}), **more):
    """A log of equal steps; `host` and `device` are milliseconds by phase."""
    host = host or {"data": 1.0, "forward": 3.0, "backward": 4.0, "optimizer": 2.0}
    device = device or {"data": 1.0, "forward": 10.0, "backward": 20.0, "optimizer": 5.0}
    phases = list(dict.fromkeys((*host, *device)))
    times = {"host": [host.get(name, 0.0) for name in phases], "device": [device.get(name, 0.0) for name in phases]}
    step = {"updated": ["AdamW"], "phases": phases, **times, "forwards": 1, "backwards": 1, "hooks_ms": 0.05, **more}
    header = {"rank": rank, "world_size": world_size, "launch": "one"}
    facts = {"on_gpu": True, "torch": "2", "environment": {"device": "GPU"}}
    numbered = [Step(number=number, waits=dict(waits), **step) for number in range(1, steps + 1)]
    return RankLog(header, facts, {0: ITEM}, numbered, ended={"how": "returned", "code": 0})


def ids(rows):
    return {finding.id: finding.figures for rule in subject.RULES for finding in rule(rows)}


def test_phases_are_the_device_s_and_issuing_is_the_host_s():
    rows = script_records([gpu_log(waits={0: [2, 3.0]})], "train.py", 0)
    (row,) = of_kind(rows, ScriptRow)
    assert row.step_ms == 36
    assert row.times["forward"].median == 10
    assert (row.times["wait"].median, row.times["issue"].median) == (3, 6)
    assert row.hooks_ms == 0.05
    (wait,) = of_kind(rows, WaitRow)
    assert (wait.line, wait.calls_per_step, wait.ms_per_step) == ("train.py:31", 2, 3)
    found = ids(rows)
    assert found["waits.line"]["share"] == pytest.approx(3 / 36)
    assert not {"launches.script", "data.bound"} & set(found)


@pytest.mark.parametrize(("count", "n", "step_ms", "instrumented"), [(5, 12, 36, 5), (20, 17, 10, 0)])
def test_steps_of_two_clocks_are_not_timed_together(count, n, step_ms, instrumented):
    """A script that profiles some steps itself has the device's times of the others; one that profiles all has none."""
    log = gpu_log()
    for step in log.steps[-count:]:
        step.device = []
    row = script_records([log], "train.py", 0)[0]
    assert (row.n, set(row.samples["step"]), row.instrumented) == (n, {step_ms}, instrumented)


def test_a_line_that_waits_for_little_is_no_finding():
    assert "waits.line" not in ids(script_records([gpu_log(waits={0: [1, 0.7]})], "train.py", 0))
    assert "waits.line" in ids(script_records([gpu_log(waits={0: [1, 0.73]})], "train.py", 0))


def test_lines_that_would_wait_on_a_gpu_are_one_sentence():
    log = gpu_log(waits={0: [1, 0.01], 1: [3, 0.01]})
    log.facts["on_gpu"], log.lines[1] = False, ITEM | {"file": "lib.py", "user_file": "train.py", "user_line": 40}
    lines = ids(script_records([log], "train.py", 0))["waits.would"]["lines"]
    assert set(lines) == {
        "train.py:31 (item, 1.00 times a step)",
        "lib.py:31 (item, 3.00 times a step, called from train.py:40)",
    }
    for step in log.steps[2:]:
        step.waits = {}
    assert "waits.would" not in ids(script_records([log], "train.py", 0)), "once in a while is not every step"


@pytest.mark.parametrize(("starved", "is_bound"), [(32.5, True), (32.3, False)])
def test_a_step_that_the_host_cannot_issue_faster_is_bound_by_launches(starved, is_bound):
    log = gpu_log(host={"data": 0.0, "forward": 36.0}, starved_ms=starved)
    assert ("launches.script" in ids(script_records([log], "train.py", 0))) is is_bound, "nine tenths of 36 ms"


@pytest.mark.parametrize(("waited", "is_bound"), [(3.5, True), (3.7, False)])
def test_a_host_that_waits_in_a_line_meanwhile_launches_nothing_late(waited, is_bound):
    log = gpu_log(host={"data": 0.0, "forward": 36.0}, starved_ms=36.0, waits={0: [1, waited]})
    assert ("launches.script" in ids(script_records([log], "train.py", 0))) is is_bound


@pytest.mark.parametrize(("data", "is_bound"), [(4.0, True), (3.0, False)])
def test_a_step_that_waits_for_its_batch_is_bound_by_data(data, is_bound):
    device = {"data": data, "forward": 10.0, "backward": 20.0}
    assert ("data.bound" in ids(script_records([gpu_log(device=device)], "train.py", 0))) is is_bound


def test_synchronisations_that_a_step_was_looked_into_for_are_rows_too():
    log = gpu_log(waits={0: [1, 3.0]})
    log.lines[1] = ITEM | {"line": 31, "call": "a synchronising operation"}  # which the timed read stands for
    log.lines[2] = ITEM | {"line": 40, "call": "a synchronising operation"}
    log.syncs.update([1, 2, 2])
    rows = script_records([log], "train.py", 0)
    assert [(row.line, row.calls_per_step) for row in of_kind(rows, WaitRow)] == [
        ("train.py:31", 1),
        ("train.py:40", 2),
    ]
    assert ids(rows)["waits.seen"]["line"] == "train.py:40"


def ranks(*forwards, wait=10.0):
    longest = max(forwards)
    times = [{"forward": each, "backward": 20.0, "communication": wait + longest - each} for each in forwards]
    return [gpu_log(rank=rank, world_size=len(forwards), device=device) for rank, device in enumerate(times)]


def test_the_late_rank_is_the_one_that_waits_least():
    rows = script_records(ranks(10.0, 10.5, 10.2, 14.0), "train.py", 0)
    figures = ids(rows)["ranks.late"]
    assert (figures["rank"], figures["phase"]) == (3, "forward")
    assert figures["excess_ms"] == pytest.approx(14.0 - 10.2)
    assert [row.latest_share for row in of_kind(rows, ScriptRow)] == [0, 0, 0, 1]


def test_a_rank_that_waits_for_its_data_is_named_with_what_loads_more():
    times = [{"data": 0.5, "forward": 10.0, "backward": 20.0, "communication": 15.0} for _ in range(3)]
    times[2] |= {"data": 15.0, "communication": 0.5}
    rows = script_records([gpu_log(rank=at, world_size=3, device=each) for at, each in enumerate(times)], "train.py", 0)
    told = {each.id: each for each in Report(rows).findings}
    late = told["ranks.late_data"]
    assert late.sentence.startswith("Rank 2 is the straggler: data wait")
    assert late.claim.action == advice.loader_workers(4)
    assert told["data.bound"].sentence.startswith("Rank 2: ")
    assert told["script.phases"].sentence.startswith("Rank 0: ")


def test_even_ranks_have_no_late_one():
    found = ids(script_records(ranks(10.0, 10.5), "train.py", 0))
    assert "ranks.late" not in found
    assert found["ranks.even"]["ranks"] == 2


def test_a_step_that_one_rank_looks_into_is_timed_on_none():
    logs = ranks(10.0, 10.0)
    logs[0].steps[9].tags = {"recorded"}
    assert [row.n for row in of_kind(script_records(logs, "train.py", 0), ScriptRow)] == [16, 16]


def test_an_evaluation_that_most_steps_have_is_a_part_of_them():
    rows = script_records([gpu_log(evaluations=1, device={"forward": 1.0, "evaluation": 9.0})], "train.py", 0)
    (row,) = of_kind(rows, ScriptRow)
    assert (row.evaluated, row.n) == (0, 17)
    assert row.times["evaluation"].median == 9


@pytest.mark.parametrize(("steps", "is_said"), [((1, 1, 1), False), ((1, 1, 2), True)])
def test_what_the_first_step_alone_compiles_several_times_is_no_finding(steps, is_said):
    why = "2/2: dim == -2          # v = g.mean(dim)  # optim.py:165 in step\nUser stack trace:\n  File ..."
    log = gpu_log()
    each = {"function": "step", "called": ["optim.py", 9, "main"], "user": [None, None], "seconds": 1.0}
    log.recompilations += [{**each, "reason": why if n else None, "step": step} for n, step in enumerate(steps)]
    rows = script_records([log], "train.py", 0)
    (again,) = of_kind(rows, RecompilationRow)
    assert (again.compilations, again.reasons, again.why) == (3, 1, "dim == -2")
    said = [finding.sentence for finding in subject.compiled_again(rows)]
    assert len(said) == is_said
    assert all("compiled 3 times" in each and each.endswith("because: dim == -2") for each in said)
    assert seen_of(log)["recompiles"] is is_said


def test_the_page_shows_all_of_it():
    log = gpu_log(waits={0: [1, 3.0]}, backwards=4)
    again = {"function": "forward", "called": ["train.py", 9, "main"], "user": [None, None], "reason": "size"}
    log.recompilations += [{**again, "step": step, "seconds": 1.0} for step in (1, 2, 3)]
    log.notes.append("what could not be done")
    page = render(script_records([log], "train.py", 3))
    for text in (
        "loss and other",
        "train.py:31",
        "train.py:9",
        "What could not be done",
        "exit code 3",
        "Where the script",
    ):
        assert text in page or text == "loss and other", text


def test_a_log_that_was_cut_short_keeps_its_whole_lines(tmp_path):
    path = log_path(tmp_path, 0)
    step = {"is": "step", "number": 1, "updated": [], "phases": ["data", "other", "data"], "host": [1.0, 2.0, 4.0]}
    path.write_text(json.dumps({"is": "header", "rank": 0}) + "\n" + json.dumps(step) + "\n" + json.dumps(step)[:40])
    found = read_log(path)
    assert found.header == {"rank": 0}
    assert [each.host_ms for each in found.steps] == [{"data": 5.0, "other": 2.0}]
    assert read_log(tmp_path / "nothing").steps == []


@pytest.mark.parametrize(
    ("phases", "ahead", "starved"),
    [
        # (phase, milliseconds on the host, on the device), of two steps that are alike
        ([("forward", 10, 10), ("backward", 20, 20), ("optimizer", 5, 5)], 0, 35),  # the device does what just came
        ([("forward", 4, 10), ("backward", 8, 20), ("optimizer", 20, 2)], 0, 8),  # the update's launches find no room
        ([("forward", 4, 10), ("backward", 8, 20), ("optimizer", 2, 6)], 44, 6),  # further ahead with every step
        ([("data", 30, 30), ("copies", 6, 6), ("forward", 3, 9), ("other", 6, 0)], 0, 3),  # no launch was late
        ([("communication", 9, 9), ("forward", 2, 5), ("backward", 9, 8), ("other", 0.5, 0)], 3, 8),
    ],
)
def test_how_long_a_device_can_have_waited_for_launches(tmp_path, phases, ahead, starved):
    names, host, device = (list(each) for each in zip(*phases, strict=True))
    step = {"is": "step", "updated": [], "phases": names, "host": host, "device": device}
    log_path(tmp_path, 0).write_text("".join(json.dumps(step | {"number": number}) + "\n" for number in (1, 2)))
    first, second = read_log(log_path(tmp_path, 0)).steps
    assert second.ahead_ms == pytest.approx(ahead)
    assert first.starved_ms == pytest.approx(starved)
    assert second.starved_ms <= first.starved_ms, "and less where the host was ahead before"


def test_how_a_script_ended():
    assert how_it_ended(RankLog(), -11) == "it was ended by signal 11"
    assert how_it_ended(RankLog(), 0) == "it ended without Python's own end, as by os._exit or exec"
    assert how_it_ended(RankLog(), None) == "it goes on"
    returned, raised = {"how": "returned"}, {"how": "raised", "error": "KeyError", "place": " (train.py:3)"}
    stopped = [{"number": 15, "after_s": 3.21}]
    assert how_it_ended(RankLog(ended=returned), 0) == "it ran to its end"
    assert how_it_ended(RankLog(ended=returned), 7) == "it ended by sys.exit"
    assert how_it_ended(RankLog(ended=raised), 1) == "it was ended by KeyError (train.py:3)"
    assert how_it_ended(RankLog(ended=raised), 0) == "it ran to its end", "a console has the last error too"
    received = " after trainstep received signal 15 at 3.2 s"
    assert how_it_ended(RankLog(ended=returned, signals=stopped), 0) == f"it ran to its end{received}"
    assert how_it_ended(RankLog(signals=stopped), -15) == f"it was ended by signal 15{received}"


def test_steps_that_have_no_time_are_not_called_unseen():
    waiting = RankLog({"rank": 0}, {"torch": "2", "waiting": 33})
    assert why_no_step(waiting, -9).startswith("of 33 steps none has a time (it was ended by signal 9)")
    ended = RankLog({"rank": 0}, {"torch": "2"}, notes=["a", "the observation ended: KeyError"])
    assert why_no_step(ended, 1).startswith("the observation ended: KeyError (it ended")


def test_lines_are_shown_shortly():
    assert shown_line("/home/me/project/train.py", 3) == "train.py:3"
    assert shown_line("/usr/lib/python3/site-packages/transformers/trainer.py", 5) == "transformers/trainer.py:5"


@pytest.mark.parametrize(("late", "mark"), [(0, ""), (2, ""), (3, LATE)])
def test_a_line_most_of_whose_samples_came_late_is_not_blamed_itself(late, mark):
    log = gpu_log()
    log.lines = {at: {**ITEM, "call": call} for at, call in enumerate(("data", f"{LATE}data"))}
    for step in log.steps:
        step.seen = {0: 2, 1: late}
    (row,) = of_kind(script_records([log], "train.py", 0), LineRow)
    assert (row.line, row.phase, row.share) == (f"{mark}train.py:31", "data", 1.0)


def test_what_lay_ready_in_loaders_is_counted_by_how_it_shrank_in_timed_steps():
    log = gpu_log(batches=1)
    for step, ready in zip(log.steps, (7, 7, 8, *range(7, 1, -1), 8, *[1] * 10), strict=True):
        step.stock = (ready, 8)
    log.steps[9].evaluations = 1  # in which workers went on
    (row,) = of_kind(script_records([log], "train.py", 0), ScriptRow)
    assert (row.n, row.batches, row.from_stock) == (16, 16, 6 + 7), "eight to two, and eight to one"


@pytest.mark.parametrize(("ready", "expected"), [(8, 0), (0, 8)])
def test_at_the_end_of_the_data_nothing_is_asked_for_and_what_lies_ready_must_shrink(ready, expected):
    """Workers that keep up, and some that do not, up to the last eight batches of an epoch."""
    log = gpu_log(batches=1)
    for step, stock in zip(
        log.steps, ([8, 8],) * 3 + ([ready, 8],) * 9 + (*([n, n] for n in range(7, -1, -1)),), strict=True
    ):
        step.stock = (min(ready, stock[0]), stock[1]) if step.number > 3 else stock
    (row,) = of_kind(script_records([log], "train.py", 0), ScriptRow)
    assert row.from_stock == expected


def test_steps_in_which_code_is_compiled_are_timed_where_most_are_such():
    def compiled_in(*numbers):
        log = gpu_log()
        log.recompilations += [{"step": number} | NOTHING for number in numbers]
        (row,) = of_kind(script_records([log], "train.py", 0), ScriptRow)
        return row.n, row.compiled

    assert compiled_in(1, 2) == (17, 0), "among those that are left out anyway"
    assert compiled_in(1, 8, 8, 9) == (15, 2)
    assert compiled_in(*range(1, 11)) == (10, 7), "half of them are not most"
    assert compiled_in(*range(1, 12)) == (17, 0)


NOTHING = {"function": "forward", "called": ["train.py", 3, "main"], "user": ["", 0], "reason": None, "seconds": 1.0}


def test_a_new_count_of_a_step_is_a_column_once_the_row_has_it(monkeypatch):
    """Two files then: the step's class, which counts, writes and reads it, and the row's."""
    monkeypatch.setattr(rows, "_COUNTED", [*rows._COUNTED, "evaluations"])
    monkeypatch.setattr(rows, "ScriptRow", type("Longer", (ScriptRow,), {"__annotations__": {"evaluations": float}}))
    (row,) = of_kind(script_records([gpu_log(evaluations=2)], "train.py", 0), ScriptRow)
    assert (row.evaluations, row.forwards) == (2, 1)
