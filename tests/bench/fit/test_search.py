"""A step is made to fit its budget, as predicted, with the gradients of the plain one; and what cannot fit is said."""

import dataclasses
from pathlib import Path

import pytest
import torch

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.bench.fit.search import Budget, fit_records
from trainstep.checkpointing.policies import Policy
from trainstep.step.training_step import build_step
from trainstep.step.workload import WorkloadSource, builtin_source

SOURCE = builtin_source("toy", ModelConfig(vocab_size=256, d_model=32, d_ff=80, num_layers=4, num_heads=2))
CONFIG = StepConfig(batch=8, context=64, attention="sdpa", device="cpu")
GIB = 2**30


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("fit") / "fit.json"
    beyond = Budget.parse("0.1MiB")  # not the only one: it is a row
    wanted = {
        Budget.parse("60%"): file,
        beyond: file.with_name("beyond.json"),
        Budget.parse("90%"): file.with_name("90"),
    }
    return list(fit_records(SOURCE, CONFIG, wanted, compare=True, steps=2)), file


def test_the_step_fits_as_predicted(rows):
    every, _ = rows
    again, in_backward, plain, fit = every[:4]
    assert [each.form for each in every[:4]] == ["all again", "all again", "plain", "fit"]
    assert [each.update_in_backward for each in every[:4]][:3] == [None, True, None]
    assert fit.status == plain.status == again.status == in_backward.status == "ok"
    assert in_backward.peak_gib <= again.peak_gib, "here the loss peaks, before there are gradients"
    assert fit.budget_gib == pytest.approx(0.6 * plain.peak_gib)
    assert again.peak_gib < fit.peak_gib <= fit.budget_gib
    assert all(abs(each.prediction_error) <= 0.03 for each in (again, in_backward, plain, fit))
    assert fit.blocks_kept + fit.blocks_again == 4
    assert fit.predicted_ms < again.predicted_ms
    assert fit.gap <= 0.02
    assert fit.gradient_error <= fit.error_budget


def test_several_budgets_share_what_comes_before_the_choice(rows):
    fit, beyond, roomy = (each for each in rows[0] if each.form == "fit")
    assert [each.form for each in rows[0][:4]] == ["all again", "all again", "plain", "fit"]
    assert roomy.status == "ok"
    assert roomy.budget_gib == pytest.approx(1.5 * fit.budget_gib)
    assert roomy.blocks_kept > fit.blocks_kept
    assert beyond.status == "unsupported"
    assert "MiB at least" in beyond.reason
    assert beyond.budget_gib == pytest.approx(0.1 / 1024, rel=1e-4)
    assert not Path(beyond.checkpointing[1:]).exists()


def test_policies_of_all_blocks_stand_beside_it(rows):
    alike = rows[0][6:]
    assert [each.form for each in alike] == ["every-1", "selective"]
    assert all(each.peak_gib and each.predicted_gib is None for each in alike)


def test_the_file_repeats_it(rows):
    every, file = rows
    assert set(Policy.load(file).blocks) == {f"blocks.{index}" for index in range(4)}

    def gradients(checkpointing):
        step = build_step(
            SOURCE, StepConfig(batch=8, context=64, attention="sdpa", device="cpu", checkpointing=checkpointing)
        )
        step.gradients(step.next_batch())
        return [parameter.grad for parameter in step.module.parameters()]

    plain, fitted = gradients("none"), gradients(f"@{file}")
    assert all(torch.equal(a, b) for a, b in zip(plain, fitted, strict=True))
    assert every[3].checkpointing == f"@{file}"


WEIGHTS = StepConfig(batch=1, context=8, attention="sdpa", device="cpu")  # and what belongs to them is most of it


def test_updates_in_backward_make_room_where_nothing_else_does(tmp_path):
    budget, file = {Budget.parse("82%"): tmp_path / "fit.json"}, tmp_path / "fit.json"
    *_, fit = fit_records(SOURCE, WEIGHTS, budget, steps=2)
    assert fit.status == "ok", fit.reason
    assert fit.update_in_backward
    assert fit.peak_gib <= fit.budget_gib
    assert abs(fit.prediction_error) <= 0.03
    assert fit.gradient_error <= fit.error_budget
    assert Policy.load(file).update_in_backward
    with pytest.raises(UsageError, match="the step does not fit"):
        list(fit_records(SOURCE, WEIGHTS, budget, update_after_backward=True, steps=2))


def test_they_are_not_chosen_where_they_bring_nothing(tmp_path):
    *_, roomy = fit_records(SOURCE, CONFIG, {Budget.parse("200%"): tmp_path / "fit.json"}, steps=2)
    assert roomy.status == "ok"
    assert roomy.blocks_kept == 4
    assert roomy.update_in_backward is False


def test_where_only_updates_in_backward_fit_they_are_chosen_from(tmp_path):
    def build(step):
        if step.checkpointing == "every-1":
            raise torch.OutOfMemoryError("no room for gradients")
        return SOURCE.build(step)

    source = WorkloadSource("large", build, SOURCE.model)
    rows = list(fit_records(source, WEIGHTS, {Budget.parse("1GiB"): tmp_path / "fit.json"}, steps=2))
    assert [(row.form, row.status, row.update_in_backward) for row in rows] == [
        ("all again", "out of memory", None),
        ("all again", "ok", True),
        ("plain", "ok", None),
        ("fit", "ok", True),
    ]


class Counting(torch.optim.AdamW):
    """Updates otherwise the more often it is called: what its groups do not show."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"], before = group["lr"] / self.count, group["lr"]
            super().step(closure)
            group["lr"] = before


@pytest.mark.parametrize("timed_out", [False, True], ids=["after backward", "in backward"])
def test_a_form_that_the_solver_had_no_time_for_may_fit(tmp_path, monkeypatch, timed_out):
    forms = []

    def choose(costs, limit):
        forms.append(costs)
        if (len(forms) == 2) is timed_out:
            raise UnsupportedError("no choice of activations was found within 30 s")
        raise UsageError("the step does not fit")

    monkeypatch.setattr("trainstep.bench.fit.search.choose", choose)
    with pytest.raises(UnsupportedError, match="within 30 s"):
        list(fit_records(SOURCE, WEIGHTS, {Budget.parse("1GiB"): tmp_path / "fit.json"}, steps=1))
    assert len(forms) == 2


def test_where_updates_in_backward_are_wrong_those_after_it_are_tried(tmp_path):
    def build(step):
        return dataclasses.replace(SOURCE.build(step), optimizer=Counting)

    source = WorkloadSource("counting", build, SOURCE.model)
    rows = []
    with pytest.raises(UsageError, match="the step does not fit"):  # after backward
        rows.extend(fit_records(source, WEIGHTS, {Budget.parse("82%"): tmp_path / "fit.json"}, steps=2))
    assert (rows[-1].form, rows[-1].status, rows[-1].update_in_backward) == ("fit", "wrong", True)
    assert not rows[-1].times


def test_a_frozen_block_has_no_moment_of_its_own(tmp_path):
    def build(step):
        made = SOURCE.build(step)
        made.module.embedding.requires_grad_(False)
        made.module.blocks[0].requires_grad_(False)
        return made

    source = WorkloadSource("frozen", build, SOURCE.model)
    *_, fit = fit_records(source, CONFIG, {Budget.parse("90%"): tmp_path / "fit.json"}, steps=2)
    assert fit.status == "ok", fit.reason


def test_a_budget_below_what_weights_need(tmp_path):
    with pytest.raises(UsageError, match=r"it needs \d+\.\d\d MiB at least"):
        list(fit_records(SOURCE, CONFIG, {Budget.parse("0.1MiB"): tmp_path / "fit.json"}, steps=1))


def test_budgets():
    assert Budget.parse("1.5GiB").of(0, torch.device("cpu")) == 1.5 * GIB
    assert Budget.parse("512MiB").of(0, torch.device("cpu")) == GIB / 2
    assert Budget.parse("65%").of(1000, torch.device("cpu")) == 650
    assert Budget.parse_all("65%,1GiB,65%") == [Budget(share=0.65), Budget(bytes=GIB)]
    for text in ("130", "GiB", "-1GiB", "0%", "much", "nanGiB"):
        with pytest.raises(UsageError, match="expected 130GiB"):
            Budget.parse(text)
    with pytest.raises(UsageError, match="on a CPU say how much"):
        Budget.parse("").of(0, torch.device("cpu"))
