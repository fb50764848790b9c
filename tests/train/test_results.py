"""A run's record: the whole curve, but the speed and the memory of the last start alone."""

import torch

from tests.train.runs import config
from trainstep.parallel.process import Process
from trainstep.train.results import WARMUP, run_record

ALONE = Process(0, 1, torch.device("cpu"), None)


def rows_of(*starts):
    """Metrics of starts one after the other, each so many updates of so many milliseconds."""
    found = []
    for count, milliseconds in starts:
        first = len(found)
        found += [
            {"step": first + number, "since_start": number, "step_ms": 1000.0 if number <= WARMUP else milliseconds,
             "loss": 9.0 - 0.01 * (first + number), "validation_loss": None, "utilisation": None,
             "tokens": 256 * (first + number)}
            for number in range(1, count + 1)
        ]  # fmt: skip
    found[-1]["validation_loss"] = 2.0
    return found


def test_updates_of_earlier_starts_are_in_the_curve_and_not_in_the_speed():
    values = run_record(config(), ALONE, rows_of((40, 8.0), (WARMUP + 9, 2.0)), 40, 2**30).values
    assert (values["n"], values["step_ms"], values["tokens_per_s"]) == (9, 2.0, 1e3 * 8 * 32 / 2.0)
    assert (values["first_loss"], values["tokens"], values["peak_gib"]) == (8.99, 256 * (40 + WARMUP + 9), 1.0)


def test_a_last_start_within_its_first_updates_has_those():
    record = run_record(config(), ALONE, rows_of((40, 8.0), (3, 2.0)), 40, None)
    assert (record.n, record.times["step"].median, record.peak_gib) == (3, 1000.0, None)


def test_a_start_after_the_last_update_measured_nothing():
    record = run_record(config(), ALONE, rows_of((40, 8.0)), 40, 2**30)
    assert (record.n, record.times) == (0, {})
    assert (record.tokens_per_s, record.peak_gib) == (None, None)
    assert record.validation_loss == 2.0
