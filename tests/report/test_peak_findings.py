"""Who is said to own the analysed step's peak: what its owner rows say, and without them no more than is known."""

from dataclasses import replace

import pytest

from tests.report.test_findings import said, step
from trainstep.kinds import row_of

CASE = {"workload": "m", "precision": "fp32", "attention": "eager", "optimizer": "adamw-foreach", "compile": "off",
        "loss": "dense", "batch": 4, "checkpointing": None}  # fmt: skip


def analysed(case, **values):
    base = step(**values)
    return replace(base, case={**base.case, **CASE, **case})


def timeline(case, shares, phase="backward"):
    own = {**CASE, **case}
    rows = [
        row_of("owner", {**own, "owner": name.partition("/")[0], "part": name.partition("/")[2] or "all"},
               {"share": share})
        for name, share in shares.items()
    ]  # fmt: skip
    return [row_of("memory-timeline", own, {"peak_phase": phase, "peak_gib": 4.0}), *rows]


def owned(case, shares, phase="backward", **values):
    """The sentence about the peak, from what owns it on; the next one, of the timeline itself, left out."""
    sentence = said([analysed(case, **values), *timeline(case, shares, phase)], "memory")
    return sentence.partition(" comes and goes with it: ")[2].partition(" At its peak")[0]


LOGITS = {"activations": 0.6, "activations/the loss": 0.4, "temporaries": 0.2, "optimizer state": 0.2}
SCORES = {"activations": 0.7, "activations/blocks.*.attention": 0.5, "parameters": 0.3}


@pytest.mark.parametrize(
    ("case", "shares", "sentence"),
    [
        ({}, {"parameters": 0.4998, "gradients": 0.4996, "temporaries": 0.0006},
         "parameters and gradients make up most of the peak, so sharding shrinks it."),
        ({}, LOGITS, "activations make up most of the peak, so a chunked loss, activation checkpointing or a smaller "
                     "batch shrink it."),
        ({"loss": "chunked"}, LOGITS, "activations make up most of the peak, so activation checkpointing or a smaller "
                                      "batch shrink it."),
        ({}, SCORES, "activations make up most of the peak, so a fused attention, activation checkpointing or a "
                     "smaller batch shrink it."),
        ({"attention": "sdpa", "checkpointing": "every-1"}, SCORES,
         "activations make up most of the peak, so a smaller batch shrinks it."),
        ({}, {"temporaries": 0.6, "temporaries/NllLoss of backward": 0.3},
         "temporaries make up most of the peak, so a chunked loss or a smaller batch shrink it."),
        ({}, {"temporaries": 0.6, "temporaries/Softmax of backward": 0.3},
         "temporaries make up most of the peak, so a fused attention or a smaller batch shrink it."),
        ({}, {"unknown": 0.7, "parameters": 0.3}, "allocations without a known owner make up most of the peak."),
        ({}, {"optimizer state": 0.6, "parameters": 0.4},
         "optimizer state makes up most of the peak, so sharding or a smaller optimizer state shrink it."),
    ],
)  # fmt: skip
def test_what_owns_the_peak_and_what_shrinks_that(case, shares, sentence):
    assert owned(case, shares) == sentence


@pytest.mark.parametrize(("optimizer", "advice"), [("adamw-foreach", ", so the fused optimizer shrinks it"),
                                                   ("adamw-fused", "")])  # fmt: skip
def test_temporaries_of_the_optimizer_do_not_come_from_the_batch(optimizer, advice):
    sentence = owned({"optimizer": optimizer}, {"temporaries": 0.7}, "optimizer", optimizer_peak_gib=4.5)
    assert sentence == f"temporaries make up most of the peak{advice}."


def test_without_owners_no_more_is_said_than_is_known():
    (most,) = [said([step(at_rest_gib=1.5)], "memory")]
    assert most == (
        "Memory peaks in backward at 4.00 GiB; 1.50 GiB of that is there before the step (weights, optimizer state and "
        "the batch), 62% comes and goes with it (activations, gradients and temporaries)."
    )
    rest = said([step(at_rest_gib=3.0)], "memory")
    assert rest.endswith(
        "25% comes and goes with it: most of it stays, so sharding or a smaller optimizer state shrink it."
    )
    plain = said([step(at_rest_gib=3.0, optimizer_state_gib=0.0)], "memory")
    assert "(weights and the batch), 25% comes and goes with it: most of it stays, so sharding helps." in plain


def test_owners_of_another_step_or_of_another_phase_are_not_its_owners():
    shares = {"activations": 1.0}
    other = said([analysed({}), *timeline({"precision": "bf16"}, shares)], "memory")
    assert "(activations, gradients and temporaries). At its peak" in other
    elsewhere = said([analysed({}), *timeline({}, shares, "forward")], "memory")
    assert "(activations, gradients and temporaries). At its peak" in elsewhere
