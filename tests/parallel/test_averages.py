"""Gradients averaged by copies: training is that by collectives, whatever the model, the buckets and the room."""

import copy
from unittest import mock

import pytest
import torch

from tests.parallel import test_ddp
from tests.parallel.training import OPTIMIZERS, build, differing, loss_of, reference, shares
from tests.parallel.zero import test_optimizer
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer
from trainstep.parallel.collectives import MB
from trainstep.parallel.ddp import averages
from trainstep.parallel.transport import by_copies
from trainstep.parallel.transport.peer_memory import PeerMemory

pytestmark = pytest.mark.distributed

COPIES = {"transport": "peer-copies"}
MODELS = ["Plain", "Tied", "Uneven", "Transposed", "Mixed", "Branches"]


def _train(process, room, names):
    """Every one of these models, under plain data parallel training and with a sharded optimizer."""
    found = {}
    with mock.patch.multiple(by_copies, OUTBOX_BYTES=room, INBOX_BYTES=room):
        for name in names:
            plain = test_ddp.train(process, name, "AdamW", "bucketed", **COPIES)
            sharded = test_optimizer.train(process, name, *OPTIMIZERS["AdamW"], True, **COPIES)
            found[name] = {"plain": plain, "sharded": sharded}
    return found


@pytest.mark.parametrize("room", [2**28, 256], ids=["at once", "in rounds"])
def test_two_ranks_train_as_one_process(two, room):
    first, second = two.run(_train, room, MODELS)
    for name, found in first.items():
        expected = reference(name, "AdamW", 2)
        for how, trained in found.items():
            assert not differing(second[name][how], trained), (name, how)
            assert not differing(trained, expected), (name, how, "two numbers have one sum in either order")


def test_four_ranks_train_alike_and_as_one_process(four):
    by_rank = four.run(_train, 256, ["Plain", "Uneven", "Transposed"])
    for name, found in by_rank[0].items():
        expected = reference(name, "AdamW", 4)
        for how, trained in found.items():
            assert not any(differing(each[name][how], trained) for each in by_rank), (name, how)
            assert not differing(trained, expected, relative=2e-5), (name, how)


def _barriers(process):
    """How many the averages of two steps have, each gradient in rounds; by whether a rank gets its slices alone."""
    found, original = {}, PeerMemory.barrier
    for scattered in (False, True):
        counted = mock.patch.object(PeerMemory, "barrier", autospec=True, side_effect=original)
        with mock.patch.multiple(by_copies, OUTBOX_BYTES=256, INBOX_BYTES=256), counted as barrier:
            ddp = DistributedDataParallel(torch.nn.Linear(16, 16, bias=False), bucket_mb=0, **COPIES)
            if scattered:
                ShardedOptimizer(ddp.parameters(), torch.optim.SGD, ddp=ddp, lr=0.1)
            for _ in range(2):
                ddp(torch.ones(2, 16)).sum().backward()
                ddp.finish_gradient_synchronization()
        found[scattered] = barrier.call_count
    return found


def test_a_round_has_two_barriers_and_the_first_has_one_more(two):
    """One when all is in the inboxes, one when it has been averaged; by then inboxes are free for the next. Slices are
    averaged and stay: there the second is before anything is written."""
    rounds = 2 * 16 * 16 * 4 // 256  # of two steps, in inboxes of 256 bytes
    assert two.run(_barriers) == [{False: 2 * rounds + 1, True: 2 * rounds}] * 2


def test_by_copies_a_bucket_is_a_sixteenth_of_all_unless_that_is_little():
    with mock.patch.object(averages, "LEAST_MB", 1e-3):
        assert [averages.default_bucket_mb(mb * MB, by_copies=True) for mb in (1, 1600)] == [1 / 16, 100.0]
        assert averages.default_bucket_mb(1600 * MB, by_copies=False) == 1e-3
    assert averages.default_bucket_mb(100 * MB, by_copies=True) == 25.0


def _calls(process):
    """Of a step with the default bucket, by transport."""
    found = {}
    for transport in ("collectives", "peer-copies"):
        torch.manual_seed(0)
        module = torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(64)])
        with mock.patch.object(averages, "LEAST_MB", 1e-3):  # less than one gradient
            ddp = DistributedDataParallel(module, transport=transport)
        with recorded_collectives() as calls:
            ddp(torch.ones(2, 16)).sum().backward()
            ddp.finish_gradient_synchronization()
        found[transport] = [call.bytes for call in calls if call.name == "all-reduce"]
    return found


def test_by_copies_there_are_sixteen_buckets_by_default(two):
    for found in two.run(_calls):
        assert found == {"collectives": [1024] * 64, "peer-copies": [4 * 1024] * 16}


SETTINGS = ["accumulated, bucketed", "clipped, kept at zero"]


def _otherwise(process):
    """With accumulation and zeros, in one bucket after backward, and with gradients that some lack."""
    flat = test_ddp.train(process, "Plain", "AdamW", "bucketed", overlap=False, **COPIES)
    unused = test_optimizer.train(process, "Unused", *OPTIMIZERS["SGD"], True, **COPIES)
    return flat, unused, [test_ddp.train_how(process, name, **COPIES) for name in SETTINGS]


def test_other_settings_keep_their_meaning(two):
    by_rank = two.run(_otherwise)
    for flat, unused, trained in by_rank:
        assert not differing(flat, reference("Plain", "AdamW", 2))
        assert not differing(unused, reference("Unused", "SGD", 2))
        for name, found, first in zip(SETTINGS, trained, by_rank[0][-1], strict=True):
            assert not differing(found, first), name
            test_ddp.check_how(name, found)


def _of_a_copy(process):
    """A wrapper and its copy average in turns; and what is sent."""
    ddp = DistributedDataParallel(build("Plain"), process_group=process.group, **COPIES)
    twin = copy.deepcopy(ddp)
    grads = []
    with recorded_collectives() as calls:
        for each in (ddp, twin, ddp):
            each.zero_grad()
            loss_of(each, shares(2, 0)[process.rank]).backward()
            each.finish_gradient_synchronization()
            grads.append([parameter.grad.clone() for parameter in each.parameters()])
    reduced = [(call.name, call.bytes, call.ranks) for call in calls if call.name == "all-reduce"]
    return grads, reduced, ddp.transport, ddp.uncounted_bytes


def test_a_copy_of_the_wrapper_averages_too_and_all_is_counted(two):
    (first, reduced, transport, staged), (second, *_) = two.run(_of_a_copy)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
        assert all(torch.equal(*pair) for pair in zip(one, first[0], strict=True))
    nbytes = sum(parameter.nbytes for parameter in build("Plain").parameters())
    assert reduced == [("all-reduce", nbytes, 2)] * 3
    assert transport == "peer-copies"
    assert staged > 1.5 * nbytes, "an inbox for all gradients, an outbox for half"
