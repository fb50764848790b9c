"""Every formula against a simulation that moves chunks around a ring and counts, or goes through buckets in time."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainstep.base.errors import UsageError
from trainstep.parallel.collectives import MB
from trainstep.parallel.ddp import averages
from trainstep.parallel.transport import by_copies
from trainstep.plan import communication
from trainstep.plan.communication import (
    COLLECTIVES,
    Link,
    best_calls,
    bus_factor,
    bytes_sent,
    collective_seconds,
    passes,
    rank_bytes,
    sticking_out_s,
)


class Ranks:
    """Ranks of one process that hand chunks around a ring. What each sends, in elements, and computes is counted."""

    def __init__(self):
        self.flops, self.sent, self.rounds = Counter(), Counter(), 0

    def product(self, rank, a, b):
        self.flops[rank] += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    def reduce_scatter(self, held, axis):
        """rank → its addend, into rank → its chunk of the sum along `axis`, in the ranks' order."""
        ranks, n = list(held), len(held)
        chunks = {rank: np.array_split(tensor.copy(), n, axis) for rank, tensor in held.items()}
        for step in range(n - 1):
            moved = {i: chunks[ranks[i]][(i - 1 - step) % n] for i in range(n)}
            for i, chunk in self.handed(ranks, moved):
                to = chunks[ranks[(i + 1) % n]]
                to[(i - 1 - step) % n] = to[(i - 1 - step) % n] + chunk
        return {rank: chunks[rank][i] for i, rank in enumerate(ranks)}

    def all_gather(self, held, axis):
        """rank → its chunk, into rank → all chunks along `axis`."""
        ranks, n = list(held), len(held)
        found = {rank: {i: held[rank]} for i, rank in enumerate(ranks)}
        for step in range(n - 1):
            moved = {i: found[ranks[i]][(i - step) % n] for i in range(n)}
            for i, chunk in self.handed(ranks, moved):
                found[ranks[(i + 1) % n]][(i - step) % n] = chunk
        return {rank: np.concatenate([found[rank][i] for i in range(n)], axis) for rank in ranks}

    def all_reduce(self, held, axis):
        return self.all_gather(self.reduce_scatter(held, axis), axis)

    def broadcast(self, held):
        """The first rank's goes from rank to rank; the last one has nobody to send to."""
        ranks = list(held)
        for rank in range(len(ranks) - 1):
            list(self.handed(ranks, {rank: held[ranks[0]]}))
        return dict.fromkeys(ranks, held[ranks[0]])

    def handed(self, ranks, moved):
        """One round: the chunks that these ranks hand on, all at once."""
        self.rounds += 1
        for i, chunk in moved.items():
            self.sent[ranks[i]] += chunk.size
        return moved.items()


def simulate(collective, length, n):
    """Run a collective; returns the ranks after checking that everyone has what he should."""
    ranks = Ranks()
    held = {rank: 100 * rank + np.arange(length) for rank in range(n)}
    total = sum(held.values())
    if collective == "broadcast":
        found, expected = ranks.broadcast(held), [held[0]] * n
    elif collective == "all-gather":
        parts = {rank: np.array_split(tensor, n)[rank] for rank, tensor in held.items()}
        found, expected = ranks.all_gather(parts, 0), [np.concatenate(list(parts.values()))] * n
    elif collective == "all-reduce":
        found, expected = ranks.all_reduce(held, 0), [total] * n
    else:
        found, expected = ranks.reduce_scatter(held, 0), np.array_split(total, n)
    assert all(map(np.array_equal, found.values(), expected))
    return ranks


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("length", [48, 37, 5])
def test_bytes_and_passes_are_those_of_a_ring(collective, n, length):
    ranks = simulate(collective, length, n)
    assert ranks.sent.total() == bytes_sent(collective, length, n)
    assert ranks.rounds == passes(collective, n)
    if length % n == 0:
        assert max(ranks.sent.values(), default=0) == pytest.approx(bus_factor(collective, n) * length)


def test_seconds_are_overhead_and_bytes():
    link = Link(overhead_s=1e-5, bus_bytes_per_s=3e11)
    assert collective_seconds("all-reduce", 3 * 10**9, 2, link) == pytest.approx(0.01 + 1e-5)
    assert collective_seconds("all-reduce", 3 * 10**9, 4, link) == pytest.approx(0.015 + 1e-5)
    assert collective_seconds("broadcast", 3 * 10**9, 4, link) == pytest.approx(0.01 + 1e-5)
    assert collective_seconds("all-gather", 3 * 10**9, 1, link) == 0


def run_through(transfer, overhead, backward, buckets):
    """Bucket after bucket, so many alike or these shares of all: ready, sent when the one before is through; what is
    left when backward is done."""
    shares = [1 / buckets] * buckets if isinstance(buckets, int) else buckets
    end = ready = 0.0
    for share in shares:
        ready += share * backward
        end = max(end, ready) + share * transfer + overhead
    return end - backward


@settings(deadline=None)
@given(
    transfer=st.floats(1e-4, 1.0),
    overhead=st.floats(0, 1e-2),
    backward=st.floats(1e-4, 1.0),
    buckets=st.integers(1, 400),
    left=st.one_of(st.none(), st.floats(0.01, 1.0)),
)
def test_exposed_time_is_that_of_running_through_the_buckets(transfer, overhead, backward, buckets, left):
    """All alike, or full ones that leave the rest to the last."""
    full = None if left is None else 1 / (buckets - 1 + left)
    shares = buckets if full is None else [full] * (buckets - 1) + [left * full]
    expected = run_through(transfer, overhead, backward, shares)
    assert sticking_out_s(backward, transfer, buckets, overhead, full) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(transfer=st.floats(1e-3, 0.1), overhead=st.floats(1e-5, 1e-3), backward=st.floats(1e-3, 0.1))
def test_no_number_of_buckets_is_better_than_the_best(transfer, overhead, backward):
    best = best_calls(backward, transfer, overhead)
    tried = [run_through(transfer, overhead, backward, k) for k in {int(1.15**i) for i in range(67)}]
    around = [run_through(transfer, overhead, backward, max(1, k)) for k in (math.floor(best), math.ceil(best))]
    assert min(around) <= min(tried) * (1 + 1e-9) + 1e-12


def walk(scheme, parameters, n, *, replicas=1, frozen=0, weight=4, gathered=4, on_the_way=4, scattered=True):
    """Bytes that a rank keeps and sends, by walking over parameters and collectives one by one."""
    kept = {"weights": 0, "gradients": 0, "state": 0}
    sent, between = 0, 0
    for first in range(0, parameters, n):  # n parameters at a time, of which each rank owns one
        divided = {"ddp": 0, "sharded optimizer": 1, "zero-2": 2, "fsdp": 3, "hsdp": 3}[scheme]
        is_frozen = first < frozen
        for number, (name, size) in enumerate((("state", 8), ("gradients", weight), ("weights", weight)), 1):
            if name == "weights" or not is_frozen:
                kept[name] += size * (1 if divided >= number else n)
        moves = {
            "ddp": [("all-reduce", on_the_way)],
            "sharded optimizer": [
                ("reduce-scatter" if scattered else "all-reduce", on_the_way),
                ("all-gather", weight),
            ],
            "zero-2": [("reduce-scatter", on_the_way), ("all-gather", weight)],
            "fsdp": [("all-gather", gathered), ("all-gather", gathered), ("reduce-scatter", on_the_way)],
        }["fsdp" if scheme == "hsdp" else scheme]
        if is_frozen:
            moves = [move for move in moves if scheme in ("fsdp", "hsdp") and move[0] == "all-gather"]
        elif replicas > 1:  # each rank's one of the n
            between += simulate("all-reduce", replicas, replicas).sent.total() * weight / replicas
        for collective, size in moves:
            sent += simulate(collective, n, n).sent.total() * size
    return kept["weights"], kept["gradients"], kept["state"], sent // n + between / replicas


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("frozen", [0, 80])
@pytest.mark.parametrize("scheme", ["ddp", "sharded optimizer", "zero-2", "fsdp"])
def test_each_scheme_keeps_and_sends_what_a_walk_through_it_finds(scheme, frozen, n, scattered):
    found = rank_bytes(scheme, 240, n, frozen=frozen, compute_bytes=2, reduce_bytes=2, scattered=scattered)
    expected = walk(scheme, 240, n, frozen=frozen, gathered=2, on_the_way=2, scattered=scattered)
    assert (found.weights, found.gradients, found.optimizer_state, found.sent) == expected
    assert found.before_step == sum(expected[:3])


@pytest.mark.parametrize(("n", "replicas"), [(4, 2), (4, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("frozen", [0, 80])
def test_replicas_keep_and_send_what_a_walk_through_one_finds_and_their_parts_of_gradients(n, replicas, frozen):
    settings = {"frozen": frozen, "replicas": replicas}
    found = rank_bytes("hsdp", 240, n, compute_bytes=2, reduce_bytes=2, largest_group=40, **settings)
    expected = walk("hsdp", 240, n // replicas, gathered=2, on_the_way=2, **settings)
    assert (found.weights, found.gradients, found.optimizer_state, found.sent) == expected
    one = rank_bytes("fsdp", 240, n // replicas, compute_bytes=2, reduce_bytes=2, largest_group=40)
    assert found.buffers - one.buffers == (4 * 40 * replicas // n if replicas > 1 else 0), "a group's part between them"
    copies = rank_bytes("hsdp", 240, n, compute_bytes=2, reduce_bytes=2, largest_group=40, peer_copies=True, **settings)
    ranks = n // replicas
    assert copies.staging == (2 * 40 // ranks + 2 * 40 if ranks > 1 else 0)


@pytest.mark.parametrize("scheme", ["fsdp", "hsdp"])
def test_what_stays_gathered_for_backward_is_sent_once(scheme):
    replicas = 2 if scheme == "hsdp" else 1
    all_twice, kept = (rank_bytes(scheme, 240, 8, replicas=replicas, not_again=each) for each in (0, 40))
    ranks = 8 // replicas
    assert all_twice.sent - kept.sent == 4 * 40 * (ranks - 1) // ranks
    assert dataclasses.replace(kept, sent=all_twice.sent) == all_twice


def test_the_case_of_the_peers():
    """3.41 B parameters on two ranks: what was measured on two H200s, within what activations add."""
    gib = 2**30
    ours = rank_bytes("ddp", 3_410_000_000, 2)
    theirs = rank_bytes("ddp", 3_410_000_000, 2, copies=True)
    assert ours.before_step / gib == pytest.approx(50.8, abs=0.1)
    assert theirs.buffers / gib == pytest.approx(12.7, abs=0.1)
    assert ours.sent == rank_bytes("sharded optimizer", 3_410_000_000, 2).sent, "half each way"
    zero = rank_bytes("sharded optimizer", 3_410_000_000, 2)
    assert (ours.before_step - zero.before_step) / gib == pytest.approx(12.7, abs=0.1)
    sharded = rank_bytes("fsdp", 3_410_000_000, 2, compute_bytes=2, largest_group=105_000_000)
    assert sharded.before_step / gib == pytest.approx(25.4, abs=0.1)
    assert sharded.buffers == 6 * 2 * 105_000_000


def test_memory_before_the_first_step_and_when_the_optimizer_is_about_to():
    plain = rank_bytes("ddp", 1000, 2)
    assert (plain.start, plain.before_step) == (4000, 16000)
    views = rank_bytes("ddp", 1000, 2, copies=True)
    assert (views.start, views.before_step) == (8000, 16000), "buckets are there at once"
    scattered = rank_bytes("sharded optimizer", 1000, 2)
    assert (scattered.start, scattered.before_step) == (4000, 12000)
    assert rank_bytes("sharded optimizer", 1000, 2, scattered=False).before_step == scattered.before_step
    shards = {"compute_bytes": 2, "largest_group": 100}
    assert rank_bytes("fsdp", 1000, 2, reduce_bytes=2, **shards).start == 2000
    staged = rank_bytes("fsdp", 1000, 2, reduce_bytes=2, peer_copies=True, **shards)
    assert staged.start == 2000 + 100 + 200, "half of a group's parameters, and its gradients, in two bytes each"
    assert staged.before_step == 8000 + 300
    wide = rank_bytes("fsdp", 1000, 2, peer_copies=True, **shards)
    assert wide.start == 2000 + 100, "gradients as wide as the weights are reduced by collectives"


@pytest.mark.parametrize("scheme", ["ddp", "sharded optimizer"])
def test_gradients_that_go_by_copies_are_staged(scheme):
    settings = {"peer_copies": True, "largest_bucket": 100}
    staged, plain = rank_bytes(scheme, 1000, 4, **settings), rank_bytes(scheme, 1000, 4)
    assert staged.staging == 400 + 100, "an inbox for a bucket, and an outbox for a rank's means of it"
    assert (staged.start - plain.start, staged.before_step - plain.before_step) == (500, 500)
    assert (staged.sent, staged.gradients, staged.buffers) == (plain.sent, plain.gradients, plain.buffers + 500)
    assert rank_bytes(scheme, 1000, 1, **settings).staging == 0
    large = rank_bytes(scheme, 10**9, 4, peer_copies=True, largest_bucket=10**9)
    assert large.staging == by_copies.INBOX_BYTES * 5 // 4
    gathered = rank_bytes(scheme, 10**10, 4, peer_copies=True, largest_bucket=10**9, largest_gather=1000)
    assert gathered.staging - large.staging == 1000, "a rank's slices of what is gathered beside the next forward"
    gathered = rank_bytes(scheme, 10**10, 4, peer_copies=True, largest_bucket=10**9, largest_gather=10**10)
    assert gathered.staging - large.staging == by_copies.OUTBOX_BYTES
    frozen = rank_bytes(scheme, 1000, 4, frozen=900, largest_gather=1000, **settings)
    assert frozen.staging == staged.staging + 100, "what is trained is gathered"


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="world_size is 0"):
        bus_factor("all-reduce", 0)
    for scheme, ranks, replicas in (("hsdp", 4, 3), ("hsdp", 4, 0), ("fsdp", 4, 2)):
        with pytest.raises(UsageError, match=f"{ranks} ranks of {scheme} do not divide into {replicas}"):
            rank_bytes(scheme, 1, ranks, replicas=replicas)
    with pytest.raises(UsageError, match="expected one of ddp"):
        rank_bytes("zero-9", 1, 1)


def test_staging_of_a_large_group_is_as_small_as_the_transport_makes_it():
    assert (communication.OUTBOX_BYTES, communication.INBOX_BYTES) == (by_copies.OUTBOX_BYTES, by_copies.INBOX_BYTES)
    assert communication.LEAST_BUCKET_BYTES == averages.LEAST_MB * MB
    assert communication.MOST_BUCKETS == averages.MOST_BUCKETS
    groups = {"largest_group": 10**9, "compute_bytes": 2, "reduce_bytes": 2}
    staged = rank_bytes("fsdp", 10**10, 2, peer_copies=True, **groups)
    assert staged.staging == by_copies.OUTBOX_BYTES + by_copies.INBOX_BYTES
    plain = rank_bytes("fsdp", 10**10, 2, **groups)
    assert staged.buffers == plain.buffers - 2 * 10**9 + staged.staging
