"""Lazy conjugates and negatives, tensors whose memory is not their value: their values are what ranks exchange."""

from functools import partial

import pytest

from tests.parallel import test_ddp
from tests.parallel.training import OPTIMIZERS, STEPS, Lazy, build, differing, loss_of, reference, shares, step_of
from tests.parallel.zero import test_optimizer
from trainstep.parallel import FullyShardedDataParallel

pytestmark = pytest.mark.distributed

KINDS = [each.__name__ for each in Lazy.__subclasses__()]
REAL = ["NegativeGradient", "NegativeParameters"]


def _fsdp(process, kind):
    sharded = FullyShardedDataParallel(build(kind, process.rank, process.rank))
    optimizer_cls, options = OPTIMIZERS["SGD"]
    optimizer = optimizer_cls(sharded.parameters(), **options)
    for step in range(STEPS):
        step_of(process, sharded, optimizer, step)
    return sharded.gather_full_parameters()


def _ddp(process, kind, scheme, **settings):
    return test_ddp.train(process, kind, "SGD", scheme, **settings)


def _zero(process, kind, **settings):
    return test_optimizer.train(process, kind, *OPTIMIZERS["SGD"], **settings)


TWICE = {"how": {"accumulate": 2, "set_to_none": False}}  # half of a gradient is kept apart
WRAPS = {scheme: partial(_ddp, scheme=scheme) for scheme in test_ddp.SCHEMES}
WRAPS["fsdp"] = _fsdp
WRAPS |= {"whole": partial(_zero, scattered=False), "scattered": partial(_zero, scattered=True, **TWICE)}
WRAPS |= {"gathered beside": partial(_zero, scattered=True, overlap_gather=True, **TWICE)}


def _trained(process, wrap, kinds):
    return {kind: WRAPS[wrap](process, kind) for kind in kinds}


@pytest.mark.parametrize("wrap", WRAPS)
def test_lazy_tensors_train_as_in_one_process(two, wrap):
    accumulate = 2 if "how" in getattr(WRAPS[wrap], "keywords", {}) else 1
    for found in two.run(_trained, wrap, REAL if wrap == "fsdp" else KINDS):  # it refuses complex parameters
        for kind, tensors in found.items():
            expected = reference(kind, "SGD", 2, accumulate=accumulate)
            assert not differing(tensors, expected, relative=4 * 2**-8 if wrap == "bfloat16" else 1e-6), kind


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_something_lazy(kind):
    net = build(kind, rank=1)
    loss_of(net, shares(2, 0)[0]).backward()
    tensors = [*net.parameters(), *net.buffers(), *(each.grad for each in net.parameters())]
    assert any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)
