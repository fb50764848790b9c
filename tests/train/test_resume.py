"""Where a run goes on from, case by case."""

from pathlib import Path

import pytest

from trainstep.errors import UsageError
from trainstep.train.resume import Asked, Choice, Found, choose

OUT = Path("runs/a")
UNDER_WAY = Found((4, 8))
FINISHED = Found((4, 8, 12), has_results=True)
WENT_BACK = Found((4, 8, 10), resumed_from="step-00000004")
"""As a command left it that had said --resume-from step-00000004."""


@pytest.mark.parametrize(
    ("found", "asked", "expected"),
    [
        pytest.param(None, Asked(12), Choice(None), id="no run yet"),
        pytest.param(None, Asked(12, is_restart=True), Choice(None), id="a worker died before the first update"),
        pytest.param(Found(), Asked(12), Choice(None), id="no checkpoint yet"),
        pytest.param(UNDER_WAY, Asked(12), Choice(8), id="the newest"),
        pytest.param(UNDER_WAY, Asked(12, is_restart=True), Choice(8), id="the newest, after a worker died"),
        pytest.param(UNDER_WAY, Asked(12, "step-00000008"), Choice(8), id="the newest, by name"),
        pytest.param(UNDER_WAY, Asked(12, "step-00000004"), Choice(4, (8,)), id="an older one"),
        pytest.param(UNDER_WAY, Asked(12, "runs/a/checkpoints/step-00000004/"), Choice(4, (8,)), id="by its path"),
        pytest.param(UNDER_WAY, Asked(12, "step-00000004", True), Choice(4, (8,)), id="died before it went back"),
        pytest.param(WENT_BACK, Asked(12, "step-00000004", True), Choice(10), id="died after it went back"),
        pytest.param(WENT_BACK, Asked(12, "step-00000008", True), Choice(8, (10,)), id="another command went back"),
        pytest.param(WENT_BACK, Asked(12, "step-00000004"), Choice(4, (8, 10)), id="a command that is given anew"),
        pytest.param(Found((4, 8, 12)), Asked(12), Choice(12), id="all updates made, and no results yet"),
        pytest.param(FINISHED, Asked(12), Choice(12, is_finished=True), id="finished"),
        pytest.param(FINISHED, Asked(12, "step-00000012"), Choice(12, is_finished=True), id="finished, by name"),
        pytest.param(FINISHED, Asked(12, "step-00000008"), Choice(8, (12,)), id="back from the end"),
    ],
)
def test_where_it_goes_on(found, asked, expected):
    assert choose(found, asked, OUT) == expected


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"--resume-from is 'step-00000005', but runs/a holds no run to go on with; leave it out to begin one"),
        (Found(), r"the checkpoints in runs/a are: none"),
        (UNDER_WAY, r"the checkpoints in runs/a are: step-00000004, step-00000008"),
    ],
)
@pytest.mark.parametrize("is_restart", [False, True])
def test_a_checkpoint_that_is_not_there(found, message, is_restart):
    with pytest.raises(UsageError, match=message):
        choose(found, Asked(12, "step-00000005", is_restart), OUT)
