"""The list of schemes: its names are those of every row that was ever measured, and of what the commands offer."""

import math
from pathlib import Path
from typing import get_args

from trainstep.base.schemes import BENCH_SCHEMES, BUCKETS_MB, SCHEMES, STRATEGIES, TrainScheme
from trainstep.rows.records import read_records

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_every_scheme_that_was_measured_is_in_the_list():
    rows = [row for path in RESULTS.glob("h200-*.jsonl") for row in read_records(path) if "scheme" in row.case]
    measured = {row.case["scheme"] for row in rows if row.kind != "train"}
    assert measured == set(BENCH_SCHEMES)
    trained = {row.case["scheme"] for row in rows if row.kind == "train"}
    assert trained, "there are runs of train"
    assert trained <= {name for name, each in SCHEMES.items() if each.in_train}


def test_train_offers_what_the_list_says():
    assert get_args(TrainScheme) == ("auto", *(name for name, each in SCHEMES.items() if each.in_train))


def test_names_are_their_own_entries_and_families_differ_in_their_bucket_alone():
    assert all(each.name == name for name, each in SCHEMES.items())
    assert {each.planned_as for each in SCHEMES.values()} - {None} < set(STRATEGIES)
    buckets = {name: each.bucket_mb for name, each in SCHEMES.items() if name.startswith("bucketed-")}
    assert list(buckets.values()) == [1, 10, 25, 100, 1000]
    assert (SCHEMES["naive"].bucket_mb, SCHEMES["flat"].bucket_mb) == (0, math.inf)
    assert not SCHEMES["naive"].overlap
    assert SCHEMES["overlapped"].overlap


def test_a_peer_is_tuned_over_as_many_settings_as_ours():
    def settings(wrapper):
        return [
            (each.bucket_mb, each.overlap) for each in SCHEMES.values() if each.wrapper == wrapper and each.in_bench
        ]

    assert settings("torch-ddp") == [(mb, True) for mb in BUCKETS_MB]
    assert set(settings("torch-ddp")) == {each for each in settings("ddp") if each[0] in BUCKETS_MB}
    assert settings("torch-zero") == list(dict.fromkeys(settings("sharded-optimizer"))), (
        "torch's gathers overlap nothing"
    )
    assert len(settings("torch-fsdp2")) == len(settings("fsdp"))
    hybrid = [each.wrapper for each in SCHEMES.values() if each.is_hybrid]
    assert hybrid == ["fsdp", "torch-fsdp2"]
    for each in SCHEMES.values():
        assert (each.peer is not None) == each.wrapper.startswith("torch-")
        if each.peer is not None:
            assert SCHEMES[each.peer].wrapper == each.wrapper
            assert SCHEMES[each.peer].narrow_reduce == each.narrow_reduce
