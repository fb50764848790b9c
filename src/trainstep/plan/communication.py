"""Traffic between ranks, how long it takes, and what each scheme of data parallel training keeps on a rank.

Rings. A collective of P payload bytes over n ranks is cut into n chunks that travel around a ring, each rank sending to
the next (Patarasuk & Yuan 2009). The payload is the full tensor: what is reduced or sent, or comes out of a gather.

    collective       passes     bytes on each link     sent by all ranks
    all-reduce       2(n − 1)   2(n − 1)/n · P         2(n − 1) · P
    reduce-scatter   n − 1      (n − 1)/n · P          (n − 1) · P
    all-gather       n − 1      (n − 1)/n · P          (n − 1) · P
    broadcast        n − 1      P (all but the last)   (n − 1) · P

No algorithm sends less for the first three than the ring. *Bus* bandwidth is bytes on a link over time, comparable
between collectives and world sizes; *algorithm* bandwidth is P over time (the terms of nccl-tests).

Time. A call takes an overhead o, whatever its size, and then the bytes on a link at the bus bandwidth.

Overlap. Backward takes T and makes s bytes of gradients evenly, cut into k buckets. Bucket i is complete at i·T/k; its
call takes c = s/(k·w) + o, where w is the algorithm bandwidth, and starts when it is complete and the one before is
done. If c ≤ T/k, only the last bucket's call sticks out behind backward. Otherwise the calls follow one another without
a gap from the first bucket on, and end at T/k + k·c. So what is exposed is

    max( s/(k·w) + o,  T/k + s/w + k·o − T ).

The two are equal at k = 1 and at k = (T − s/w)/o; in between the first is the larger, and falls with k. The second is
least at k = √(T/o). Hence the best number of buckets is max( √(T/o), (T − s/w)/o ). Where nothing is known of T,
take T = s/w, backward as fast as the network: s/(k·w) + k·o is exposed, least for buckets of √(s·w·o) bytes.

Buckets that are sent when they are full, at a share b of all, leave 1 − (k − 1)·b to the last. Whichever bucket i it is
from which on calls follow without a gap, they end at i·b·T + (1 − (i − 1)·b)·s/w + (k − i + 1)·o, which is linear in i
up to i = k − 1: one of the first, the last but one and the last is the greatest.

Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from trainstep.base.errors import UsageError
from trainstep.base.schemes import DataParallel

CollectiveName = Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast"]
COLLECTIVES: tuple[CollectiveName, ...] = get_args(CollectiveName)


@dataclass(frozen=True)
class Link:
    """Cost of a call, as fitted to measurements by `trainstep bench collectives`."""

    overhead_s: float  # of each call, whatever its size
    bus_bytes_per_s: float  # on each link of the ring


def bus_factor(collective: CollectiveName, world_size: int) -> float:
    """Bytes on the busiest link of the ring per byte of payload."""
    steps = passes(collective, world_size)
    return float(steps > 0) if collective == "broadcast" else steps / world_size


def passes(collective: CollectiveName, world_size: int) -> int:
    """Number of times that a chunk is handed on, one after the other."""
    if world_size < 1:
        raise UsageError(f"world_size is {world_size}; expected at least 1")
    return (2 if collective == "all-reduce" else 1) * (world_size - 1)


def bytes_sent(collective: CollectiveName, payload: int, world_size: int) -> int:
    """Bytes sent by all ranks together."""
    return passes(collective, world_size) * payload


def collective_seconds(collective: CollectiveName, payload: int, world_size: int, link: Link) -> float:
    """Time of one call."""
    if world_size == 1:
        return 0.0
    return link.overhead_s + bus_factor(collective, world_size) * payload / link.bus_bytes_per_s


def sticking_out_s(work_s: float, transfer_s: float, calls: int, overhead_s: float, full: float | None = None) -> float:
    """By how much `calls` transfers outlast the work that they hide behind: the maximum derived above.

    `full` is the share of all that each call but the last one has; by default all have the same.

    The same holds where each call brings what a piece of the work needs, as a gather does: run backwards in time, it is
    a call that waits for its piece.
    """
    full = 1 / calls if full is None else full
    sticks_out = transfer_s * (1 - (calls - 1) * full) + overhead_s
    for first in {1, calls - 1} - {0, calls}:  # of those that follow one another without a gap
        ready = first * full * work_s
        follow = transfer_s * (1 - (first - 1) * full) + (calls - first + 1) * overhead_s
        sticks_out = max(sticks_out, ready + follow - work_s)
    return sticks_out


def best_calls(work_s: float, transfer_s: float, overhead_s: float) -> float:
    """The number of calls that sticks out least (see above)."""
    return max(math.sqrt(work_s / overhead_s), (work_s - transfer_s) / overhead_s)


OUTBOX_BYTES, INBOX_BYTES = 2**28, 2**29
"""Most that `parallel.transport` stages of a group that is gathered, and of gradients."""

LEAST_BUCKET_BYTES, MOST_BUCKETS = 25 * 10**6, 16
"""Gradients that our DistributedDataParallel averages in one call by default: so many bytes at least, and by copies a
sixteenth of all if that is more."""


def default_bucket(nbytes: int, largest: int) -> int:
    """Bytes of a bucket of gradients of so many, by copies, that is full with the `largest` of them."""
    return max(LEAST_BUCKET_BYTES, nbytes // MOST_BUCKETS) + largest


def staged_gradients(nbytes: int, bucket: int, ranks: int) -> int:
    """Bytes that averages by copies stage on a rank: a bucket of gradients as they come, and this rank's means."""
    inbox = min(nbytes, bucket, INBOX_BYTES)
    return inbox + -(-inbox // ranks)


@dataclass(frozen=True)
class RankBytes:
    """Bytes that a scheme keeps on one rank, and sends in a step."""

    weights: int
    gradients: int  # once backward is done
    optimizer_state: int
    buffers: int  # beyond these, at most, while communicating
    sent: int  # by each rank in one step, on average over the ranks
    staging: int = 0  # of the buffers, what stays allocated
    gradients_stay: bool = False  # whether gradients are views of buckets, which are there from the start and stay

    @property
    def start(self) -> int:
        """Before the first step."""
        return self.weights + self.staging + (self.gradients if self.gradients_stay else 0)

    @property
    def before_step(self) -> int:
        """Bytes when the optimizer is about to step, for the second time or later: weights, gradients and state.

        The same is there when it has, until gradients are set to None.
        """
        return self.weights + self.gradients + self.optimizer_state + self.staging


def rank_bytes(
    scheme: DataParallel,
    num_parameters: int,
    world_size: int,
    *,
    replicas: int = 1,
    frozen: int = 0,
    bytes_per_parameter: int = 4,
    state_per_parameter: int = 8,
    compute_bytes: int | None = None,
    reduce_bytes: int | None = None,
    largest_group: int = 0,
    not_again: int = 0,
    scattered: bool = True,
    copies: bool = False,
    peer_copies: bool = False,
    largest_bucket: int = 0,
    largest_gather: int = 0,
) -> RankBytes:
    """Memory and traffic of a rank, every parameter being divided evenly.

    Args:
        scheme: ddp: everything on every rank. sharded optimizer (ZeRO-1): state divided. zero-2: gradients too. fsdp
            (ZeRO-3): weights too (Rajbhandari et al. 2020, section 5). hsdp: the same within each of the `replicas`,
            whose ranks average their part of the gradients, as they are kept, with the other replicas'.
        replicas: of hsdp.
        frozen: how many of the parameters are not trained: they have no gradient and no state.
        bytes_per_parameter: of weights and gradients as they are kept.
        state_per_parameter: of the optimizer; AdamW has two moments of 4.
        compute_bytes: of a parameter as it is gathered (fsdp); as kept, by default.
        reduce_bytes: of a gradient on its way; as kept, by default.
        largest_group: parameters of the largest group that is gathered at once (fsdp) or reduced at once (zero-2).
        not_again: parameters that stay gathered from forward to backward, which begins with them (fsdp).
        scattered: the sharded optimizer gets its gradients reduce-scattered, not all-reduced.
        copies: gradients are copied into buckets that stay allocated (as torch's DDP does), not reduced where they lie.
        peer_copies: fsdp's parameters, and gradients narrower than the weights, go through buffers of shared memory;
            with ddp and the sharded optimizer, gradients do.
        largest_bucket: parameters whose gradients are averaged at once, at most (ddp, sharded optimizer).
        largest_gather: parameters that go through such buffers at once, too, at most (sharded optimizer).
    """
    if replicas < 1 or world_size % replicas or (replicas > 1 and scheme != "hsdp"):
        ranks = f"{world_size} ranks of {scheme}"
        raise UsageError(f"{ranks} do not divide into {replicas} replicas; choose another number")
    n, trained = world_size // replicas, num_parameters - frozen
    full, gradients = num_parameters * bytes_per_parameter, trained * bytes_per_parameter
    state = trained * state_per_parameter
    share, gradient_share, state_share = -(-full // n), -(-gradients // n), -(-state // n)
    gathered = bytes_per_parameter if compute_bytes is None else compute_bytes
    on_the_way = trained * (bytes_per_parameter if reduce_bytes is None else reduce_bytes)

    def sent(gradients_by: CollectiveName, gathers: int) -> int:
        """By each rank: its gradients, and so many bytes of weights gathered."""
        return (bytes_sent(gradients_by, on_the_way, n) + bytes_sent("all-gather", gathers, n)) // n

    if scheme in ("ddp", "sharded optimizer"):
        staging = 0
        if peer_copies and n > 1:
            gathered_slices = min(-(-min(trained, largest_gather) * bytes_per_parameter // n), OUTBOX_BYTES)
            staging = staged_gradients(gradients, largest_bucket * bytes_per_parameter, n) + gathered_slices
        buffers = (gradients if copies else 0) + staging
        if scheme == "ddp":
            moved = sent("all-reduce", 0)
        else:
            state, moved = state_share, sent("reduce-scatter" if scattered else "all-reduce", gradients)
        return RankBytes(full, gradients, state, buffers, moved, staging, gradients_stay=copies)
    if scheme == "zero-2":
        buffers = largest_group * bytes_per_parameter
        return RankBytes(full, gradient_share, state_share, buffers, sent("reduce-scatter", gradients))
    if scheme in ("fsdp", "hsdp"):
        # Weights: the group in use and two ahead. Gradients: a group's being collected, and one's sent and received.
        # Between replicas one group's part is on its way besides.
        group = largest_group * gathered
        outbox = min(-(-group // n), OUTBOX_BYTES) if peer_copies and n > 1 else 0
        inbox = min(group, INBOX_BYTES) if outbox and on_the_way < gradients else 0
        buffers, staging = group * (3 + 1 + 1) + (inbox or group) + outbox, outbox + inbox
        weights_gathered = (2 * num_parameters - not_again) * gathered
        moved = bytes_sent("all-gather", weights_gathered, n) // n + bytes_sent("reduce-scatter", on_the_way, n) // n
        if replicas > 1:
            buffers += -(-largest_group * bytes_per_parameter // n)
            moved += bytes_sent("all-reduce", gradient_share, replicas) // replicas
        return RankBytes(share, gradient_share, state_share, buffers, moved, staging)
    raise UsageError(f"scheme is {scheme!r}; expected one of {', '.join(get_args(DataParallel))}")
