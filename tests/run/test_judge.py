"""What the judge of scripts says of runs whose differences are known."""

import dataclasses
import math

import torch

from trainstep.bench.check.gradients import Gradients
from trainstep.run.capture import Captured
from trainstep.run.judge import MORE_DRAWS, ScriptJudge

BASE = {"a": torch.linspace(0.5, 1.5, 4000).view(40, 100), "b": torch.linspace(-1, 1, 50)}


def run_of(noise=0.0, seed=0, *, factor=1.0, losses=(1.0, 0.9, 0.8), grows=0.0, weights="w", moved=1.0):
    """A run whose gradients are off by independent noise, and whose losses and weights drift apart with it."""
    generator = torch.Generator().manual_seed(seed)

    def shaken(value, by):
        return value * (1 + by * torch.randn(value.shape, generator=generator))

    gradients = {name: factor * shaken(value, noise) for name, value in BASE.items()}
    drifted = tuple(loss * (1 + (noise + grows) * 10 * place) for place, loss in enumerate(losses))
    ends = {name: moved * shaken(value, 10 * noise + grows) for name, value in BASE.items()}
    sizes = dict.fromkeys(BASE, 1.0)
    first = {name: moved * value for name, value in BASE.items()}
    return Captured(Gradients(drifted[0], gradients), weights, drifted, ends, first, sizes, len(losses), None)


class Draws:
    """Runs under random roundings, counted."""

    def __init__(self, noise, plain=0.0, grows=0.0):
        self.noise, self.plain, self.grows, self.seeds = noise, plain, grows, []

    def __call__(self, precision, seed):
        if seed is None:
            return run_of(self.plain, 99)
        self.seeds.append(seed)
        if self.plain and precision == "fp32":
            return run_of(1e-6, 10 + seed)
        if self.plain:
            shaken, base = run_of(self.noise, 10 + seed), run_of(self.plain, 99)
            by = {name: base.gradients.by_name[name] + shaken.gradients.by_name[name] - BASE[name] for name in BASE}
            return dataclasses.replace(shaken, gradients=Gradients(shaken.losses[0], by))
        return run_of(self.noise, 10 + seed, grows=self.grows)


def judge_of(draws, repeat=None):
    return ScriptJudge(run_of(), [repeat or run_of()], "fp32", draws)


def test_what_rounding_does_is_right_and_what_it_does_not_is_wrong():
    judge = judge_of(Draws(1e-6))
    assert judge.of_repeat().is_right
    assert judge.judge(run_of(1e-6, 1), "fp32").is_right
    for wrong in (run_of(1e-6, 1, factor=1.001), run_of(1e-4, 1), run_of(math.nan)):
        assert not judge.judge(wrong, "fp32").is_right


def test_what_happens_after_the_first_update_is_seen():
    judge = judge_of(Draws(1e-6))
    late = dataclasses.replace(run_of(), losses=(1.0, 0.9, 0.81))
    assert "losses" in str(judge.judge(late, "fp32"))
    ends = dataclasses.replace(run_of(1e-9), moved={name: 1.01 * value for name, value in BASE.items()})
    assert str(judge.judge(ends, "fp32")).startswith("weights at the end off by 0.01 of")
    assert not judge.judge(dataclasses.replace(run_of(), losses=(1.0, 0.9)), "fp32").is_right


def test_an_optimizer_is_held_to_its_update_where_it_gets_equal_gradients():
    judge = judge_of(Draws(1e-3))  # so large that the weights at the end say little
    verdict = judge.judge(run_of(moved=1.005), "fp32")
    assert verdict.moved.is_right
    assert not verdict.is_right
    assert "from equal gradients off by 0.005" in str(verdict)
    assert judge.judge(run_of(1e-6, 1, moved=1.005), "fp32").update is None, "other gradients, another update"


def test_what_the_script_does_not_repeat_by_itself_is_found():
    assert not judge_of(Draws(1e-6), run_of(0.3, 1)).of_repeat().is_right
    assert not judge_of(Draws(1e-6), run_of(weights="others")).of_repeat().same_start
    barely = judge_of(Draws(1e-6), run_of(2e-6, 1))
    assert barely.of_repeat().is_right
    assert barely.judge(run_of(5e-6, 2), "fp32").is_right, "what it does not repeat is allowed too"


def test_a_budget_that_allows_anything_is_none():
    judge = judge_of(Draws(1e-6, grows=0.2))
    verdict = judge.judge(run_of(moved=1.5), "fp32")
    assert not verdict.moved.is_judged
    assert not judge_of(Draws(0.2)).of_repeat().is_judged


def test_what_is_just_over_its_budget_is_judged_with_more_draws():
    draws = Draws(1e-6)
    judge = judge_of(draws)
    judge.judge(run_of(1.5e-5, 1), "fp32")
    assert len(draws.seeds) == MORE_DRAWS
    judge.judge(run_of(1e-3, 1), "fp32")
    assert len(draws.seeds) == MORE_DRAWS, "what is far over it is wrong at once"


def test_a_precision_is_judged_by_its_own_roundings():
    draws = Draws(3e-3, plain=4e-3)
    judge = judge_of(draws)
    assert judge.judge(run_of(4e-3, 99), "bf16").is_right
    assert not judge.judge(run_of(4e-3, 99), "fp32").is_right
    assert not judge.judge(run_of(4e-3, 99, factor=1.05), "bf16").is_right


def test_a_precision_that_computes_something_else_is_wrong():
    judge = judge_of(Draws(1e-3, plain=0.3))
    assert not judge.judge(run_of(0.3, 99), "bf16").is_right, "its own error is not explained by roundings"
