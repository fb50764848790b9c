"""A larger batch and what makes room for it, tried by a ladder whose runs are given, with the memory of a GPU."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.run.test_judge import PLAIN
from tests.run.test_rungs import SETTINGS
from trainstep.batches import tensors_of
from trainstep.run.capture import bytes_of, of_all_ranks
from trainstep.run.ladder import Ladder
from trainstep.run.larger import needed_gib, why_memory_limits_not, why_no_room
from trainstep.run.log import RankLog
from trainstep.run.rungs import RUNGS
from trainstep.run.single import Taken

BY_NAME = {rung.name: rung for rung in RUNGS}
CHECKPOINTED, LARGER = BY_NAME["checkpointed blocks"], BY_NAME["larger batch"]
MODEL = {**SETTINGS["models"][0], "drops": False}
LOADER = {**SETTINGS["loaders"][0], "file": "train.py", "line": 7, "batch_size": 8}
FOUND = {**SETTINGS, "models": [MODEL], "loaders": [LOADER]}


def captured(peak, fixed=2.0, limit=10.0, **changes):
    return dataclasses.replace(PLAIN, peak_gib=peak, fixed_gib=fixed, limit_gib=limit, **changes)


ON_CPU = dataclasses.replace(PLAIN, peak_gib=None)


class Given:
    """A script on a GPU, with runs that are given.

    Args:
        peak: GiB of the script as it is; 2 of them are there between steps, and it could have 10.
        runs: names of rungs, divided by commas → what is other in a run with them.
    """

    def __init__(self, peak=4.0, **runs):
        self.command = SimpleNamespace(name="train.py")
        self.plain = {"step_ms": (10.0,) * 7, "captured": captured(peak), "samples_per_step": 8.0, "failure": ""}
        self.runs, self.asked, self.judged = runs, [], []

    def run(self, what, rungs=(), **more):
        names = ",".join(rung.name for rung in rungs)
        self.asked.append(names)
        self.judged.append(more.get("is_judged", True))
        log = RankLog({}, {"settings": FOUND})
        return Taken(Path(), 0, log, first_step_ms=10.0, **(self.plain | self.runs.get(names, {})))


def climbed(script, *rungs, **options):
    """The ladder, and its rows by rung."""
    ladder = Ladder(script, rungs, **options)
    return ladder, {row.rung: row for row in ladder.climb()}


def given(peak=4.0, larger=(), checkpointed=(), both=()):
    """The script, with twice the samples in 15 ms, and blocks computed again in 13 ms with 4 GiB."""
    runs = {
        "larger batch": {"step_ms": (15.0,) * 7, "samples_per_step": 16.0, **dict(larger)},
        "checkpointed blocks": {"step_ms": (13.0,) * 7, "captured": captured(4.0), **dict(checkpointed)},
        "checkpointed blocks,larger batch": {"step_ms": (16.0,) * 7, "samples_per_step": 16.0, **dict(both)},
    }
    return Given(peak, **runs)


@pytest.mark.parametrize("ms", [15.0, 5.0])
def test_a_larger_batch_is_another_step_and_never_a_faster_one(ms):
    """Even where its steps are shorter: gradients of other samples would be wrong ones of these."""
    others = {"captured": captured(6.0, losses=(3.0, 2.0, 1.0), weights="others")}
    ladder, rows = climbed(given(larger={"step_ms": (ms,) * 7, **others}), LARGER)
    row = rows["larger batch"]
    assert (row.verdict, row.status, row.kept) == ("another step", "ok", False)
    assert ladder.kept == []
    assert (dict(row.times), row.gain, row.speedup, row.gradient_error) == ({}, None, None, None)
    assert (row.samples_per_step_before, row.samples_per_step, row.runs) == (8, 16, 2)
    assert (row.samples_per_s_before, row.samples_per_s) == (800, pytest.approx(16e3 / ms))
    assert row.throughput == row.throughput_low == pytest.approx(20 / ms)
    assert row.peak_gib == 6.0
    assert row.lines.startswith("DataLoader(…, batch_size=2 * …) (another step: the learning rate may")
    assert row.lines.endswith("(train.py:7: 16 in place of 8)")


def test_samples_that_take_as_long_are_no_gain_in_throughput():
    row = climbed(given(larger={"step_ms": (20.0,) * 7}), LARGER)[1]["larger batch"]
    assert row.throughput == row.throughput_high == 1.0


def test_a_batch_fits_where_twice_what_grows_does():
    assert needed_gib(captured(5.5)) == 9.0
    assert why_no_room(captured(5.75)) == "", "9.5 of 10 GiB"
    assert "may need 9.52 GiB, more than 95% of the 10 GiB" in why_no_room(captured(5.76))
    assert "on a CPU no limit of memory is known" in why_no_room(ON_CPU)


def test_memory_limits_from_a_share_of_what_there_is():
    assert why_memory_limits_not(captured(6.01)) == ""
    assert "whose peak is 60% of what it could have" in why_memory_limits_not(captured(6.0))
    assert "on a CPU no limit of memory is known" in why_memory_limits_not(ON_CPU)


def test_blocks_are_computed_again_where_memory_limits_and_for_a_larger_batch_alone():
    script = given(peak=7.0)
    ladder, rows = climbed(script, CHECKPOINTED, LARGER, rounds=1)
    row = rows["checkpointed blocks"]
    assert (row.verdict, row.status, row.kept, ladder.kept) == ("slower", "ok", False, [])
    row = rows["larger batch"]
    assert (row.verdict, row.throughput, row.samples_per_s_before) == ("another step", pytest.approx(20 / 16), 800)
    assert row.lines.startswith(f"{CHECKPOINTED.lines}; DataLoader(")
    both = "checkpointed blocks,larger batch"
    assert script.asked[-4:] == [both, "", "", both], "in turns with what was kept, which has no checkpoints"
    assert "larger batch" not in script.asked


@pytest.mark.parametrize(
    ("script", "rungs", "why"),
    [
        (given(6.0), [CHECKPOINTED], "memory does not limit"),
        (given(7.0), [LARGER], "12 GiB, more than 95% of the 10 GiB"),
        (given(7.0, checkpointed={"captured": captured(6.4)}), [CHECKPOINTED, LARGER], "12 GiB, more than 95%"),
        (given(larger={"samples_per_step": 8.0}), [LARGER], "8 samples all the same"),
        (given(larger={"samples_per_step": None}), [LARGER], "how many samples a step takes is not known"),
    ],
)
def test_what_is_not_tried_says_why(script, rungs, why):
    row = list(climbed(script, *rungs)[1].values())[-1]
    assert (row.verdict, row.throughput, row.kept) == ("not tried", None, False)
    assert why in row.reason


@pytest.mark.parametrize("script", [given(7.0), given(7.0, checkpointed={"captured": ON_CPU})])
def test_what_is_named_is_tried_all_the_same(script):
    script.plain["captured"] = script.runs["checkpointed blocks"]["captured"]
    _, rows = climbed(script, CHECKPOINTED, LARGER, are_named=True)
    assert [row.verdict for row in rows.values()] == ["baseline", "slower", "another step"]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_no_numbers_are_wrong(loss):
    row = climbed(given(larger={"captured": captured(4.0, losses=(1.0, loss, 1.0))}), LARGER)[1]["larger batch"]
    assert (row.status, row.verdict, row.throughput) == ("wrong", "wrong", None)
    assert row.reason == f"the loss of update 2 is {loss}"


def test_a_lack_of_memory_is_a_row_and_what_needs_less_is_tried_then():
    words = "it was ended by OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    script = given(larger={"captured": None, "failure": words})
    row = climbed(script, LARGER)[1]["larger batch"]
    assert (row.status, row.verdict, row.reason) == ("out of memory", "out of memory", words)
    script.plain["captured"] = captured(5.5)
    _, rows = climbed(script, CHECKPOINTED, LARGER, are_named=True)
    assert rows["larger batch"].verdict == "another step"
    assert rows["larger batch"].lines.startswith(CHECKPOINTED.lines)
    script = given(7.0, checkpointed={"captured": None, "failure": words})
    assert climbed(script, CHECKPOINTED)[1]["checkpointed blocks"].status == "out of memory"


def test_of_several_ranks_the_one_with_the_least_room_counts():
    found = of_all_ranks([captured(4.0, 2.0, 10.0), captured(5.0, 3.0, 9.0)])
    assert (found.peak_gib, found.fixed_gib, found.limit_gib) == (5.0, 2.0, 9.0)
    found = of_all_ranks([ON_CPU, ON_CPU])
    assert (found.peak_gib, found.fixed_gib, found.limit_gib) == (None, None, None)


def test_what_is_smaller_counts_until_something_else_is_kept():
    """It was measured on top of what was kept then."""
    fused = BY_NAME["fused optimizer"]
    script = given(9.0)
    script.runs |= {
        "fused optimizer": {"step_ms": (8.0,) * 7, "captured": captured(9.0)},
        "fused optimizer,checkpointed blocks": {"step_ms": (12.0,) * 7, "captured": captured(9.0)},
    }
    ladder, rows = climbed(script, CHECKPOINTED, LARGER)
    assert rows["larger batch"].verdict == "another step", "checkpointed blocks leave room"
    ladder, rows = climbed(script, CHECKPOINTED, fused, LARGER)
    assert [rung.name for rung in ladder.kept] == ["fused optimizer"]
    assert rows["larger batch"].verdict == "not tried"


OPTIMIZER, WORKERS = BY_NAME["fused optimizer"], BY_NAME["loader workers"]


def test_against_a_script_that_does_not_train_nothing_is_held():
    script = Given()
    script.plain["captured"] = captured(4.0, losses=(2.0, math.nan, math.nan))
    _, rows = climbed(script, OPTIMIZER)
    assert list(rows) == ["baseline"]
    assert (rows["baseline"].status, rows["baseline"].verdict) == ("failed", "not judged")
    assert rows["baseline"].reason.startswith("the loss of update 2 is nan: nothing can be held")


def test_how_many_runs_are_left_is_counted_from_what_may_be_something():
    bf16, tf32 = BY_NAME["bf16 autocast"], BY_NAME["TF32 matmuls"]
    found = [climbed(Given(), *rungs, rounds=2)[0].runs_left for rungs in ([], [OPTIMIZER], [OPTIMIZER, WORKERS])]
    assert found == [(0, 0), (4, 8), (12, 24)]
    assert climbed(Given(), bf16)[0].runs_left == (4 + 4, 12 + 4), (
        "judged by it in bf16, and by three roundings of that"
    )
    assert tf32.why_not(FOUND | {"on_gpu": False})
    ladder, _ = climbed(Given(), tf32, OPTIMIZER)
    ladder.settings = FOUND | {"on_gpu": False}
    assert ladder.runs_left == (4, 12)


class Noisy(Given):
    """Runs take turns at being slower and faster by this share."""

    def __init__(self, share, **ms):
        super().__init__(**{names: {"step_ms": (each,) * 7} for names, each in ms.items()})
        self.share = share

    def run(self, what, rungs=(), **more):
        found = super().run(what, rungs, **more)
        self.share = -self.share
        return dataclasses.replace(found, step_ms=tuple(ms * (1 + self.share) for ms in found.step_ms))


@pytest.mark.parametrize(
    ("share", "fused", "workers", "both", "is_again"),
    [
        (0.01, 9.95, 5.0, 4.4, True),  # what may be a third of a millisecond is little of ten, and something of five
        (0.01, 9.95, 5.0, 4.98, True),  # and is not kept if it is nothing there
        (0.001, 9.99, 9.0, 1.0, False),  # it is nothing of nine either
        (0.001, 9.99, 9.99, 1.0, False),  # nothing was kept since
        (0.01, 11.0, 5.0, 1.0, False),  # it is slower
        (0.01, 8.0, 5.0, 4.0, False),  # it was kept
    ],
)
def test_what_brought_nothing_sure_is_tried_again_on_a_shorter_step(share, fused, workers, both, is_again):
    ms = {"fused optimizer": fused, "loader workers": workers}
    script = Noisy(share, **ms, **{"fused optimizer,loader workers": both, "loader workers,fused optimizer": both})
    ladder, rows = climbed(script, OPTIMIZER, WORKERS)
    assert ("fused optimizer, on the top" in rows) is is_again
    if is_again:
        again = rows["fused optimizer, on the top"]
        assert again.kept is (both < 4.5), again.verdict
        assert again.gain == pytest.approx(workers / both, rel=share)
        assert [rung.name for rung in ladder.kept] == ["loader workers", *["fused optimizer"] * again.kept]


def test_what_another_rung_took_the_place_of_is_not_tried_again():
    ms = {"compiled blocks": 9.95, "compiled model": 5.0, "compiled model,loader workers": 2.0}
    script = Noisy(0.01, **ms)
    ladder, rows = climbed(script, BY_NAME["compiled blocks"], BY_NAME["compiled model"], WORKERS)
    assert [rung.name for rung in ladder.kept] == ["compiled model", "loader workers"]
    assert not any(name.endswith("on the top") for name in rows)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_on_a_gpu_runs_that_are_only_timed_leave_nothing_to_judge(on_gpu, monkeypatch):
    """On a CPU what a judged run copies slows its steps, so that all have to copy."""
    monkeypatch.setitem(FOUND, "on_gpu", on_gpu)
    script = Given(**{"fused optimizer": {"step_ms": (8.0,) * 7}})
    _, rows = climbed(script, BY_NAME["fused optimizer"])
    assert rows["fused optimizer"].kept
    own = [judged for names, judged in zip(script.asked, script.judged, strict=True) if names]
    assert own == [True, not on_gpu], "the first one was judged"
    assert script.asked[-3:] == ["", "", "fused optimizer"]
    assert script.judged[-3:] == [not on_gpu] * 3
    assert all(script.judged[:-3])


def test_what_cannot_be_in_a_script_costs_no_run(monkeypatch):
    monkeypatch.setitem(FOUND, "operators", ["LogSoftmaxBackward0", "MmBackward0"])
    script = Given()
    before = len(script.asked)
    names = ("fused attention", "our FlashAttention", "fused loss", "late reads")
    ladder, rows = climbed(script, *(BY_NAME[name] for name in names))
    assert not any(script.asked[before:]), "no run with a change"
    assert [rows[name].verdict for name in names] == ["not tried"] * 4
    assert not ladder.settings["reads"], "the first run saw none"


class Failing(Given):
    """The script as it is runs so often, and no more."""

    left = 2

    def run(self, what, rungs=(), **more):
        found = super().run(what, rungs, **more)
        self.left -= not rungs
        return found if rungs or self.left >= 0 else dataclasses.replace(found, failure="no more", step_ms=())


@pytest.mark.parametrize("name", ["fused optimizer", "larger batch"])
def test_a_rung_without_a_run_beside_it_has_no_time(name):
    script = Failing(**given().runs, **{"fused optimizer": {"step_ms": (8.0,) * 7}})
    _, rows = climbed(script, BY_NAME[name])
    assert (rows[name].status, rows[name].kept, rows[name].speedup) == ("failed", False, None)
    assert "no run of one side came to its end" in rows[name].reason


def test_memory_is_counted_of_what_lies_somewhere():
    weight, sums = torch.zeros(10), torch.zeros(3, dtype=torch.float64)
    sparse = torch.eye(4).to_sparse()
    state = [{"exp_avg": weight, "step": 3}, sums, 7]  # most optimizers keep dicts, MADGRAD a tensor beside them
    assert bytes_of([weight, sparse, *tensors_of(state), weight[:10]]) == 10 * 4 + 3 * 8
