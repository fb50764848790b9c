"""Who is said to own the analysed step's peak: what its owner rows say, and without them no more than is known."""

import dataclasses
from dataclasses import replace

import pytest

from tests.report.test_findings import rung, step
from trainstep.report.subjects import findings
from trainstep.report.subjects.allocations import owner_findings
from trainstep.rows import MemoryTimelineRow, OwnerRow

CASE = {"workload": "m", "precision": "fp32", "attention": "eager", "optimizer": "adamw-foreach", "compile": "off",
        "loss": "dense", "batch": 4, "checkpointing": None}  # fmt: skip


PARTS = {
    "the loss": {"phase": "loss"},
    "attention": {"module": "blocks.*.attention"},
    "NllLoss of backward": {"operation": "NllLoss", "phase": "backward"},
    "Softmax of backward": {"operation": "Softmax", "phase": "backward"},
    "all": {},
}


def analysed(case, **values):
    return replace(step(**values), **CASE | case)


def timeline(case, shares, phase="backward"):
    own = CASE | case
    named = [(*name.partition("/"), share) for name, share in shares.items()]
    rows = [OwnerRow(**own, owner=owner, **PARTS[part or "all"], share=share) for owner, _, part, share in named]
    return [MemoryTimelineRow(**own, peak_phase=phase, peak_gib=4.0), *rows]


def peak(rows):
    (found,) = [each for each in findings(rows) if each.id == "memory.peak"]
    return found


def owned(case, shares, phase="backward", **values):
    """The finding about the peak, and its sentence from what owns it on."""
    found = peak([analysed(case, **values), *timeline(case, shares, phase)])
    return found, found.sentence.partition(" comes and goes with it. ")[2]


LOGITS = {"activations": 0.6, "activations/the loss": 0.4, "temporaries": 0.2, "optimizer state": 0.2}
SCORES = {"activations": 0.7, "activations/attention": 0.5, "parameters": 0.3}


@pytest.mark.parametrize(
    ("case", "shares", "remedies"),
    [
        ({}, {"parameters": 0.4998, "gradients": 0.4996, "temporaries": 0.0006}, "sharding shrinks it."),
        ({}, LOGITS, "a chunked loss, activation checkpointing or a smaller batch shrink it."),
        ({"loss": "chunked"}, LOGITS, "activation checkpointing or a smaller batch shrink it."),
        ({}, SCORES, "a fused attention, activation checkpointing or a smaller batch shrink it."),
        ({"attention": "sdpa", "checkpointing": "every-1"}, SCORES, "a smaller batch shrinks it."),
        ({}, {"temporaries": 0.6, "temporaries/NllLoss of backward": 0.3},
         "a chunked loss or a smaller batch shrink it."),
        ({}, {"temporaries": 0.6, "temporaries/Softmax of backward": 0.3},
         "a fused attention or a smaller batch shrink it."),
        ({}, {"unknown": 0.7, "parameters": 0.3}, ""),
        ({}, {"optimizer state": 0.6, "parameters": 0.4}, "sharding or a smaller optimizer state shrink it."),
    ],
)  # fmt: skip
def test_what_owns_the_peak_and_what_shrinks_that(case, shares, remedies):
    found, told = owned(case, shares)
    assert told.partition("peak. ")[2].lower() == remedies
    assert all(each in remedies for each in found.figures["remedies"])
    assert bool(found.figures["remedies"]) is bool(remedies)
    assert found.figures["owners"][0] == max(shares, key=shares.get)
    assert ("makes up" in told) is ("optimizer state" in found.figures["owners"])
    assert ("without a known owner" in told) is ("unknown" in shares)


@pytest.mark.parametrize(("optimizer", "advice"), [("adamw-foreach", ". The fused optimizer shrinks it"),
                                                   ("adamw-fused", "")])  # fmt: skip
def test_temporaries_of_the_optimizer_do_not_come_from_the_batch(optimizer, advice):
    found, sentence = owned({"optimizer": optimizer}, {"temporaries": 0.7}, "optimizer", optimizer_peak_gib=4.5)
    assert found.figures["phase"] == "optimizer"
    assert found.figures["remedies"] == (("the fused optimizer",) if advice else ())
    assert sentence == f"Temporaries make up most of the peak{advice}."


def test_without_owners_no_more_is_said_than_is_known():
    most = peak([step(at_rest_gib=1.5)])
    assert most.figures == {"peak_gib": 4.0, "at_rest_gib": 1.5, "phase": "backward", "remedies": ()}
    rest = peak([step(at_rest_gib=3.0)])
    assert rest.figures["remedies"] == ("sharding", "a smaller optimizer state")
    plain = peak([step(at_rest_gib=3.0, optimizer_state_gib=0.0)])
    assert plain.figures["remedies"] == ("sharding",)
    assert "(weights and the batch). 25% comes and goes with it" in plain.sentence


@pytest.mark.parametrize(
    ("optimizer", "others", "remedies"),
    [
        ("adamw-foreach", 3.7, ("the fused optimizer",)),  # its temporaries make the peak, and go with them
        (None, 3.7, ("the fused optimizer",)),
        ("adamw-foreach", 3.85, ("sharding", "a smaller optimizer state")),  # they hardly do
        ("adamw-fused", 3.7, ("sharding", "a smaller optimizer state")),
    ],
)
@pytest.mark.parametrize("shares", [{}, {"parameters": 0.4, "optimizer state": 0.4}])
def test_a_peak_that_the_fused_optimizer_removes_needs_no_sharding(optimizer, others, remedies, shares):
    case = {"optimizer": optimizer}
    row = analysed(case, optimizer_peak_gib=4.0, backward_peak_gib=others, forward_peak_gib=3.5, at_rest_gib=3.4)
    found = peak([row, *(timeline(case, shares, "optimizer") if shares else [])])
    assert (found.figures["phase"], sorted(found.figures["remedies"])) == ("optimizer", sorted(remedies))
    assert found.figures.get("without_gib") == (others if "the fused optimizer" in remedies else None)
    assert (". The other phases peak at 3.70 GiB" in found.sentence) is ("the fused optimizer" in remedies)


def test_what_the_ladder_tried_is_given_by_its_result():
    row = analysed({}, optimizer_peak_gib=4.0, backward_peak_gib=3.5, at_rest_gib=3.4)
    tried = [
        rung("baseline", "baseline", peak_gib=4.0),
        rung("fused optimizer", "inconclusive", accepted=False, peak_gib=3.9),
        rung("fused optimizer, on the top", peak_gib=3.5),
    ]
    found = peak([row, *tried])
    assert (found.figures["remedies"], found.figures["peak with fused optimizer"]) == ((), 3.5)
    assert found.sentence.endswith("On the ladder, fused optimizer took the peak from 4.00 GiB to 3.50 GiB.")
    assert peak([row, *tried[:2]]).sentence.endswith("took the peak from 4.00 GiB to 3.90 GiB.")
    same = dataclasses.replace(tried[1], peak_gib=3.99)
    assert peak([row, tried[0], same]).sentence.endswith("On the ladder, fused optimizer left the peak at 3.99 GiB.")
    other = [dataclasses.replace(each, workload="another") for each in tried]
    assert peak([row, *other]).figures["remedies"] == ("the fused optimizer",)


@pytest.mark.parametrize(("after", "told"), [(49.0, "left the peak at 49.0 GiB"), (48.9, "from 50.0 GiB to 48.9 GiB"),
                                             (51.1, "from 50.0 GiB to 51.1 GiB")])  # fmt: skip
def test_a_peak_that_changes_by_what_runs_differ_by_is_left(after, told):
    row = analysed({}, optimizer_peak_gib=50.0, peak_gib=50.0, backward_peak_gib=3.5, at_rest_gib=3.4)
    tried = [rung("baseline", "baseline", peak_gib=50.0), rung("fused optimizer", accepted=False, peak_gib=after)]
    assert peak([row, *tried]).sentence.endswith(f"{told}.")
    (owners,) = owner_findings([*timeline({}, {"parameters": 1.0}), *tried])
    assert ("On the ladder" in owners.sentence) is (after == 48.9)


def test_owners_of_another_step_or_of_another_phase_are_not_its_owners():
    shares = {"activations": 1.0}
    assert "owners" in peak([analysed({}), *timeline({}, shares)]).figures
    for rows in (timeline({"precision": "bf16"}, shares), timeline({}, shares, "forward")):
        found = peak([analysed({}), *rows])
        assert "owners" not in found.figures
        assert found.sentence.endswith("(activations, gradients and temporaries).")
