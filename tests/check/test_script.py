"""What the judge of scripts says of runs whose differences are known."""

import dataclasses
import math

import pytest
import torch

from trainstep.check.buffers import Buffers
from trainstep.check.gradients import Gradients
from trainstep.check.script import ScriptCheck, _part
from trainstep.check.verdict import Deviation, Part
from trainstep.ladder.trial.capture import Captured

BASE = {"a": torch.linspace(0.5, 1.5, 4000).view(40, 100), "b": torch.linspace(-1, 1, 50)}


def run_of(noise=0.0, seed=0, *, factor=1.0, losses=(1.0, 0.9, 0.8), moved=1.0):
    """A run whose gradients are off by independent noise, and whose losses and weights drift apart with it."""
    generator = torch.Generator().manual_seed(seed)

    def shaken(value, by):
        return value * (1 + by * torch.randn(value.shape, generator=generator))

    gradients = {name: factor * shaken(value, noise) for name, value in BASE.items()}
    drifted = tuple(loss * (1 + noise * 10 * place) for place, loss in enumerate(losses))
    ends = {name: moved * shaken(value, 10 * noise) for name, value in BASE.items()}
    sizes = dict.fromkeys(BASE, 1.0)
    first = {name: moved * value for name, value in BASE.items()}
    return Captured(Gradients(drifted[0], gradients), "w", drifted, ends, first, sizes, len(losses), None)


def draws(precision, seed):
    """A run under random roundings."""
    return run_of(1e-6, 10 + seed)


def test_what_rounding_does_is_right_and_what_it_does_not_is_wrong():
    judge = ScriptCheck(run_of(), [run_of()], "fp32", draws)
    assert judge.of_repeat().is_right
    assert judge.judge(run_of(1e-6, 1), "fp32").is_right
    for wrong in (run_of(1e-6, 1, factor=1.001), run_of(1e-4, 1), run_of(math.nan)):
        assert not judge.judge(wrong, "fp32").is_right


@pytest.mark.parametrize(("off", "runs"), [(0.0, []), (3e-9, []), (1e-6, [0, 1, 2])])
def test_random_roundings_are_drawn_for_a_repeat_that_is_off_by_more_than_one(off, runs):
    drawn = []
    judge = ScriptCheck(
        run_of(), [run_of(off, 1)], "fp32", lambda precision, seed: drawn.append(seed) or draws("", seed)
    )
    assert judge.of_repeat().is_right
    assert drawn == runs
    assert judge.judge(run_of(1e-6, 2), "fp32").is_right
    assert drawn == [0, 1, 2], "a change is held against what roundings do"


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_what_roundings_make_no_number_is_not_judged(broken):
    """As where a learning rate is so large that training diverges in one run and not in another."""

    def diverging(precision, seed):
        ends = {name: math.nan * value for name, value in BASE.items()}
        run = draws(precision, seed)
        return dataclasses.replace(run, losses=(1.0, 0.9, math.nan), moved=ends) if seed == broken else run

    judge = ScriptCheck(run_of(), [run_of()], "fp32", diverging)
    other = run_of(1e-6, 1, losses=(1.0, 0.9, 7.0), moved=3.0)
    verdict = judge.judge(other, "fp32")
    assert (verdict.parts["moved"].allowed, verdict.is_right) == (math.inf, True)
    assert not judge.judge(dataclasses.replace(other, losses=(1.0, 1.1, 7.0)), "fp32").is_right, "the second was judged"
    assert not judge.judge(run_of(1e-6, 1, moved=math.nan), "fp32").is_right


FP32, BF16 = 2.0**-23, 2.0**-7
"""One rounding of each."""
SMALL = 2.0**-10
"""A difference that is exact in float32 beside 1."""
PLAIN = Captured(
    gradients=Gradients(2.0, {"u": torch.ones(1), "v": torch.ones(1)}),
    weights="w",
    losses=(2.0, 4.0, 8.0),
    moved={"u": torch.tensor([3.0]), "v": torch.tensor([4.0])},  # together 5
    first_moved={"u": torch.ones(1), "v": torch.ones(1)},
    sizes={"u": 1.0, "v": 1.0},
    updates=3,
    peak_gib=None,
)


def like(run=PLAIN, **changes):
    """The run with other `gradients` (by name), losses or whatever else is named."""
    if "gradients" in changes:
        values = {name: torch.tensor([value]) for name, value in changes.pop("gradients").items()}
        run = dataclasses.replace(run, gradients=Gradients(run.gradients.loss, values))
    for name in ("moved", "first_moved"):
        if name in changes:
            changes[name] = {key: torch.tensor([value]) for key, value in changes[name].items()}
    return dataclasses.replace(run, **changes)


class Given:
    """Runs under random roundings that are given, again from the first after the last, and what was asked for."""

    def __init__(self, *rounded, plain=PLAIN):
        self.rounded, self.plain, self.asked = rounded or (PLAIN,), plain, []

    def __call__(self, precision, seed):
        self.asked.append((precision, seed))
        return self.plain if seed is None else self.rounded[seed % len(self.rounded)]


def judge_by(*rounded, reference=PLAIN, repeats=None, own="fp32", draw=None):
    return ScriptCheck(reference, [reference] if repeats is None else repeats, own, draw or Given(*rounded))


def deviation(**changes):
    """Of gradients that are right."""
    values = {f"{name}{end}": 0.1 for name in ("loss", "gradient", "scale", "worst") for end in ("", "_allowed")}
    return Deviation(**(values | {"worst_name": "v"} | changes))


@pytest.mark.parametrize(
    ("error", "allowed", "is_judged", "is_right"),
    [
        (0.25, 0.25, True, True),
        (0.2501, 0.25, True, False),
        (0.4999, 0.4999, True, True),
        (0.7, 0.4999, True, False),
        (0.7, 0.5, False, True),
        (0.0, 0.9, False, True),
        (math.nan, 0.25, True, False),
        (math.nan, 0.5, False, False),
        (math.inf, 0.5, False, False),
        (math.inf, math.inf, False, False),
    ],
)
def test_a_part_is_right_up_to_its_allowance_and_unjudged_from_a_half(error, allowed, is_judged, is_right):
    part = _part("losses", error, allowed)
    assert (math.isfinite(part.allowed), part.is_right) == (is_judged, is_right)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"first_moved": {"u": 1.0, "v": 2.0}}, "the first update of v from equal gradients off by"),
        ({"losses": (2.0, 4.5, 8.0)}, "losses off by 0.12 of 1.2e-07"),
        ({"moved": {"u": 3.0, "v": 3.5}}, "weights at the end off by 0.1 of 1.2e-07"),
        ({"weights": "others"}, "training starts from other weights"),
        *(({"losses": losses}, "losses off by inf of 0") for losses in ((2.0, 4.0), (2.0, 4.0, 8.0, 8.0), ())),
        ({"updates": 4}, "weights at the end off by inf of 1.2e-07"),
        ({"moved": {"u": 3.0}}, "weights at the end off by inf of 1.2e-07"),
        ({"moved": {"u": 3.0, "v": 4.0, "w": 0.0}}, "weights at the end off by inf of 1.2e-07"),
        ({"gradients": {"u": 1.0, "v": 1.5}}, "off by"),
    ],
)
def test_a_verdict_says_what_is_wrong_and_nothing_else(changes, said):
    found = judge_by().judge(like(**changes), "fp32")
    assert found.is_right is (said == "")
    assert said in str(found)
    assert ";" not in str(found)


BY_PRECISION = pytest.mark.parametrize(
    ("own", "factor", "rounding"), [("fp32", 6, FP32), ("bf16", 1, BF16), ("tf32", 1, 2.0**-10)]
)
"""Tensor cores lose more of float32, as was measured."""


@BY_PRECISION
def test_losses_may_be_off_by_twice_the_largest_rounding_so_far_as_single_numbers(own, factor, rounding):
    """Four standard deviations: 1 + 4/√2 = 3.828427."""
    judge = judge_by(like(losses=(2.0, 4.0 * (1 + SMALL), 8.0)), own=own)
    allowed = 2 * factor * 3.8284271247 * SMALL + rounding
    for place, budget in enumerate((rounding, allowed, allowed)):
        for share, is_right in ((0.99, True), (1.01, False)):
            losses = list(PLAIN.losses)
            losses[place] *= 1 + share * budget
            found = judge.judge(like(losses=tuple(losses)), own)
            assert found.parts["losses"].error == pytest.approx(share * budget)
            assert found.parts["losses"].allowed == pytest.approx(budget)
            assert found.is_right is is_right


@BY_PRECISION
def test_weights_at_the_end_may_be_off_by_twice_what_rounding_moves_them(own, factor, rounding):
    judge = judge_by(like(moved={"u": 3.0 + 5 * SMALL, "v": 4.0}), own=own)
    found = judge.judge(like(moved={"u": 3.0, "v": 3.5}), own)
    assert found.parts["moved"].error == pytest.approx(0.5 / 5)
    assert found.parts["moved"].allowed == pytest.approx(2 * factor * SMALL + rounding)
    assert not found.is_right


@BY_PRECISION
def test_gradients_may_be_off_by_twice_their_rounding(own, factor, rounding):
    found = judge_by(like(gradients={"u": 1 + SMALL, "v": 1 - SMALL}), own=own).judge(PLAIN, own)
    assert found.gradients.gradient_allowed == pytest.approx(2 * factor * SMALL + rounding)


def test_the_largest_of_several_runs_with_random_roundings_counts():
    large = like(losses=(2.0, 4.0, 8.0 * (1 + SMALL)), moved={"u": 3.0, "v": 4.0 + 5 * SMALL})
    for rounded in ((large, PLAIN, PLAIN), (PLAIN, PLAIN, large)):
        found = judge_by(*rounded).judge(like(losses=(2.0, 4.0, 8.1)), "fp32")
        assert found.parts["losses"].allowed == pytest.approx(12 * 3.8284271247 * SMALL + FP32)
        assert found.parts["moved"].allowed == pytest.approx(12 * SMALL + FP32)


def test_the_loss_that_uses_most_of_its_budget_is_told():
    judge = judge_by(like(losses=(2.0, 4.0 * (1 + SMALL), 8.0)))  # later ones may be off by 0.0449
    found = judge.judge(like(losses=(2.0 * (1 + 0.9 * FP32), 4.12, 8.0)), "fp32")
    assert found.is_right
    assert found.parts["losses"].error == pytest.approx(0.9 * FP32), "0.9 of its budget, and 0.03 is 0.67 of it"


def test_a_wrong_loss_is_not_hidden_by_a_later_one_that_cannot_be_judged():
    judge = judge_by(like(losses=(2.0, 4.0, 9.6)))  # the third may be off by nine times itself
    found = judge.judge(like(losses=(2.0, 4.0 * (1 + 1.5 * FP32), 104.0)), "fp32")
    assert not found.is_right
    assert str(found) == "losses off by 1.8e-07 of 1.2e-07"
    assert judge.judge(like(losses=(2.0, 4.0, 104.0)), "fp32").is_right, "nothing can be held against it"


def test_a_loss_that_cannot_be_judged_does_not_hide_behind_one_that_is_right():
    judge = judge_by(like(losses=(2.0, 4.0, 9.6)))
    losses = judge.judge(like(losses=(2.0, 4.0 * (1 + 0.9 * FP32), 80.0)), "fp32").parts["losses"]
    assert (losses.error, losses.allowed, losses.is_right) == (9.0, math.inf, True)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_wrong_even_where_nothing_can_be_judged(broken):
    judge = judge_by(like(losses=(2.0, 9.0, 9.0)))
    for losses in ((2.0, 4.0, broken), (2.0, broken, 8.0), (2.0, broken, 1e9)):
        found = judge.judge(like(losses=losses), "fp32")
        assert not found.is_right
        assert str(found).startswith(f"losses off by {broken} of ")


def test_runs_with_random_roundings_that_end_early_shorten_no_budget():
    late, short = like(losses=(2.0, 4.0, 8.0 * (1 + SMALL))), like(losses=(2.0, 4.0))
    for rounded in ((late, short, short), (short, short, late)):
        found = judge_by(*rounded).judge(like(losses=(2.0, 4.0, 8.1)), "fp32")
        assert found.parts["losses"].allowed == pytest.approx(12 * 3.8284271247 * SMALL + FP32)
        assert found.is_right
    other = judge_by(short, repeats=[like(losses=(2.0, 4.0, 8.1))])
    assert str(other.of_repeat()) == "losses off by 0.012 of 1.2e-07", "a loss after their last one is judged too"


def test_losses_are_relative_and_those_of_zero_absolute():
    assert judge_by().judge(like(losses=(2.0, 4.5, 8.0)), "fp32").parts["losses"].error == 0.125
    reference = like(losses=(2.0, 0.0, 8.0))
    assert judge_by(reference=reference).judge(like(losses=(2.0, 0.25, 8.0)), "fp32").parts["losses"].error == 0.25
    below = like(losses=(2.0, -4.0, 8.0))
    assert judge_by(reference=below).judge(like(losses=(2.0, -4.5, 8.0)), "fp32").parts["losses"].error == 0.125


def test_weights_that_never_move_must_not_move():
    still = like(moved={"u": 0.0, "v": 0.0})
    judge = judge_by(still, reference=still)
    assert judge.judge(still, "fp32").parts["moved"] == Part(0.0, FP32, "weights at the end")
    assert judge.judge(like(moved={"u": 0.0, "v": 1e-9}), "fp32").parts["moved"] == Part(
        math.inf, FP32, "weights at the end"
    )


def test_what_is_just_over_its_budget_is_judged_with_more_draws():
    """Without any rounding the gradient of one element may be off by one rounding."""
    for over, runs in ((1, 3), (2, 8), (4, 8), (5, 3), (7, 3)):
        draw = Given()
        found = judge_by(draw=draw).judge(like(gradients={"u": 1.0, "v": 1 + over * FP32}), "fp32")
        assert found.gradients.worst == over * FP32
        assert found.gradients.worst_allowed == FP32
        assert draw.asked == [("fp32", seed) for seed in range(runs)], f"{over} times as much as is allowed"


def test_further_draws_count():
    large = like(gradients={"u": 1.0, "v": 1 + 2 * FP32})
    draw = Given(PLAIN, PLAIN, PLAIN, PLAIN, large)
    judge = judge_by(draw=draw)
    for _ in range(2):
        assert judge.judge(like(gradients={"u": 1.0, "v": 1 + 4 * FP32}), "fp32").is_right
        assert len(draw.asked) == 8, "no more the second time"


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "others"},
        {"weights": "others", "gradients": {"u": 1.0, "v": 1 + 2 * FP32}},
        {"gradients": {"u": 1.0}},
        {"gradients": {"u": 1.0, "v": math.nan}},
    ],
)
def test_what_no_rounding_could_explain_is_wrong_at_once(changes):
    draw = Given()
    assert not judge_by(draw=draw).judge(like(**changes), "fp32").is_right
    assert len(draw.asked) == 3


def test_only_other_precisions_are_run_without_roundings_and_once():
    draw = Given()
    judge = judge_by(draw=draw)
    for precision in ("fp32", "bf16", "bf16", "fp32"):
        judge.judge(PLAIN, precision)
    assert draw.asked == [(name, seed) for name in ("fp32", "bf16") for seed in (None, 0, 1, 2)][1:]


def test_what_a_precision_is_off_by_counts_where_roundings_explain_it():
    for off, counted in ((2.0**-6, 2.0**-6), (0.25, 2.0**-7)):
        plain = like(gradients={"u": 1 + off, "v": 1 - off}, losses=(2.0, 4.0, 8.0 * (1 + off)))
        rounded = like(plain, gradients={"u": 1 + off + 2.0**-7, "v": 1 - off - 2.0**-7})
        judge = judge_by(draw=Given(rounded, plain=plain))
        for _ in range(2):
            found = judge.judge(PLAIN, "bf16")
            assert found.gradients.gradient_allowed == pytest.approx(2 * counted + BF16)
        found = judge.judge(like(losses=(2.0, 4.0, 8.01)), "bf16")
        assert found.parts["losses"].allowed == pytest.approx(2 * 3.8284271247 * off * (off == counted) + BF16)


@pytest.mark.parametrize(("precision", "factor", "rounding"), [("fp32", 6, FP32), ("bf16", 1, BF16)])
def test_what_a_script_does_not_repeat_by_itself_widens_every_budget(precision, factor, rounding):
    losses, moved = (2.0, 4.0, 8.0 * (1 + SMALL)), {"u": 3.0, "v": 4.0 + 5 * SMALL}
    repeat = like(gradients={"u": 1 + SMALL, "v": 1 - SMALL}, losses=losses, moved=moved)
    judge = judge_by(repeats=[repeat, PLAIN])
    found = judge.judge(repeat, precision)
    assert found.is_right
    assert found.gradients.gradient_allowed == pytest.approx(2 * factor * SMALL + rounding)
    assert found.parts["losses"].allowed == pytest.approx(2 * factor * 3.8284271247 * SMALL + rounding)
    assert found.parts["moved"].allowed == pytest.approx(2 * factor * SMALL + rounding)


def test_a_repeat_is_not_judged_by_itself():
    repeat = like(gradients={"u": 1 + SMALL, "v": 1 - SMALL})
    judge = judge_by(repeats=[repeat])
    before = judge.of_repeat()
    assert not before.is_right
    assert judge.judge(repeat, "fp32").is_right
    assert judge.of_repeat() == before, "also after a run was judged with what does not repeat"


@pytest.mark.parametrize("turn", [1, -1])
def test_the_worst_repeat_is_told(turn):
    off = [like(gradients={"u": 1.0, "v": 1 - share * FP32}) for share in (0.0, 0.5, 1.0)]
    assert judge_by(repeats=off[::turn]).of_repeat().gradients.worst == FP32, "of right ones that which uses most"
    wrong = [*off, like(losses=(2.0, 4.0, 8.1))]
    found = judge_by(repeats=wrong[::turn]).of_repeat()
    assert str(found) == "losses off by 0.012 of 1.2e-07", "what is wrong, although its gradients are equal"


def test_an_update_is_judged_from_gradients_that_are_all_equal():
    moved = {"first_moved": {"u": 1.5, "v": 1.0}}
    found = judge_by().judge(like(**moved), "fp32")
    assert found.parts["update"].error == 0.5
    assert found.parts["update"].name == "the first update of u from equal gradients"
    assert not found.is_right
    for gradients in ({"u": 1.0, "v": 1 + FP32}, {"u": 1 + FP32, "v": 1.0}, {"u": 1.0}, {"u": 1.0, "v": 1.0, "w": 1.0}):
        assert judge_by().judge(like(gradients=gradients, **moved), "fp32").parts.get("update") is None
    for names in ("u", "uvw"):
        first_moved = dict.fromkeys(names, 1.0)
        assert judge_by().judge(like(first_moved=first_moved), "fp32").parts.get("update") is None, (
            "other parameters were updated"
        )


def test_an_update_is_held_against_that_of_the_run_it_was_changed_from():
    off = {"u": 1.0, "v": 1 + FP32}
    kept = like(gradients=off, first_moved={"u": 2.0, "v": 1.0})
    found = judge_by().judge(like(gradients=off, first_moved={"u": 3.0, "v": 1.0}), "fp32", kept)
    assert found.parts["update"].error == 0.5
    assert judge_by().judge(like(first_moved={"u": 2.0, "v": 1.0}), "fp32", kept).parts.get("update") is None


def showing(value=4.0, other=3.0, *, names=("a", "b"), unchanged=("still",), run=PLAIN, **more):
    """The run with two values that are shown, of which b changes from 1."""
    after = {name: torch.tensor([other, value]) if name == "a" else torch.tensor([value]) for name in names}
    before = {name: torch.zeros_like(each) if name == "a" else torch.ones(1) for name, each in after.items()}
    shown = Buffers(before, after, frozenset(unchanged), frozenset({""} if names else ()))
    return dataclasses.replace(run, shown=shown, **more)


@BY_PRECISION
def test_what_else_a_run_shows_may_be_off_by_twice_what_rounding_does(own, factor, rounding):
    judge = judge_by(showing(4.0, 3 + 5 * SMALL), reference=showing(), own=own)
    stored = 2.0**-23 + 1e-5 * 4 * 2**0.5 / 5  # one rounding of the value, and sums in another order
    assert judge.judge(showing(), own).parts["shown"].error == 0.0
    found = judge.judge(showing(4.0, 3.5), own).parts["shown"]
    assert (found.name, found.error) == ("a", pytest.approx(0.1))
    assert found.allowed == pytest.approx(2 * factor * (1 + 4 / 2) * SMALL + rounding + stored, rel=1e-4)
    assert not found.is_right
    found = judge.judge(showing(4.5), own).parts["shown"]
    assert (found.name, found.error) == ("b", pytest.approx(0.5 / 3)), "a may be off by as much as that is of it"
    still = judge_by(showing(1.0), reference=showing(1.0), own=own).judge(showing(1.5), own).parts["shown"]
    assert (still.name, still.error) == ("b", pytest.approx(0.5)), "of what the reference leaves as it was, absolute"
    assert "shown" not in judge_by().judge(PLAIN, own).parts
    assert "shown" not in judge.judge(showing(4.0, 9.0), "fp16").parts, "a pass that overflows moves buffers again"


def test_the_largest_of_several_roundings_of_what_is_shown_counts_and_those_that_break_it_say_nothing():
    for drawn in ([5 * SMALL, 0, 0], [0, 0, 5 * SMALL]):
        judge = judge_by(*(showing(4.0, 3 + each) for each in drawn), reference=showing())
        assert judge.judge(showing(4.0, 3.5), "fp32").parts["shown"].allowed == pytest.approx(36 * SMALL, rel=1e-2)
    judge = judge_by(showing(4.0, 4.0), reference=showing())
    assert judge.judge(showing(4.0, 30.0), "fp32").is_right, "nothing can be held against it"
    assert not judge.judge(showing(5.0, 30.0), "fp32").is_right, "b stands still"


@pytest.mark.parametrize("names", ["a", "b", ""])
def test_what_a_run_no_longer_shows_is_wrong(names):
    found = judge_by(showing(), reference=showing()).judge(showing(names=names), "fp32")
    assert found.parts["shown"].error == math.inf
    assert not found.is_right


def test_what_the_script_leaves_alone_must_not_change():
    judge = judge_by(showing(), reference=showing(names="a", unchanged="b"))
    assert judge.judge(showing(names="a"), "fp32").is_right
    found = judge.judge(showing(), "fp32")
    assert str(found) == "b off by inf of 0"


def test_what_must_be_equal_is_told_in_words_where_the_script_repeats_it():
    reference = like(said={"calls": "2", "drops": "0.1"}, files=frozenset("abcdef"))
    judge = judge_by(reference=reference, repeats=[reference, like(reference, files=frozenset("abcde"))])
    for same in ({"calls": "2", "drops": "0.1"}, {"calls": "2"}):
        assert judge.judge(like(reference, said=same, files=frozenset("abcdexyz")), "fp32").is_right
    found = judge.judge(like(reference, said={"calls": "1"}, files=frozenset("ef")), "fp32")
    assert found.faults == ("calls: 1, in place of 2", "it does not write a, b, c and more")
    assert judge.judge(like(reference, files=frozenset("bde")), "fp32").faults == ("it does not write a, c",)
    assert judge.judge(like(reference, files=frozenset("de")), "fp32").faults == ("it does not write a, b, c",)
    for repeats in ([reference, like(reference, said={"calls": "3"})], [like(said={})]):
        judge = judge_by(reference=reference, repeats=repeats)
        assert judge.judge(like(reference, said={"calls": "1"}), "fp32").is_right, "which it does not repeat"
