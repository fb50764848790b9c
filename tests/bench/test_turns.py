"""What a row says of the passes that were timed."""

import pytest

from trainstep.bench.turns import pass_columns
from trainstep.measure.timing import Lap, Sample


def sample(wall, wait, device, forward, backward):
    laps = {name: Lap(host_ms=10.0, device_ms=each) for name, each in (("forward", forward), ("backward", backward))}
    return Sample(wall, wait, device, laps)


def test_on_a_gpu_both_have_the_gap_between_them_and_the_launches_are_told_apart():
    passes = [sample(9.0, 8.0, 5.0, 1.0, 3.0), sample(9.0, 6.0, 6.0, 2.0, 3.5), sample(9.0, 4.0, 7.0, 2.0, 4.0)]
    samples, values = pass_columns(passes)
    assert samples == {"forward": [1.0, 2.0, 2.0], "backward": [3.0, 3.5, 4.0], "both": [5.0, 6.0, 7.0]}
    assert values == {"n": 3, "issue_ms": pytest.approx(3.0)}


def test_on_a_cpu_both_is_their_sum_and_nothing_is_launched_ahead():
    laps = {"forward": Lap(2.0, None), "backward": Lap(5.0, None)}
    samples, values = pass_columns([Sample(7.5, 0.0, None, laps)])
    assert samples == {"forward": [2.0], "backward": [5.0], "both": [7.0]}
    assert values == {"n": 1}
