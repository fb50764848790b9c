"""Parameters gathered beside the next forward: the same training, and who reads them earlier waits or is told."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch import nn

from tests.parallel.mistakes import check, told
from tests.parallel.training import (
    EXCHANGE_MB,
    OPTIMIZERS,
    WIDTH,
    Stacked,
    build,
    differing,
    reference,
    shares,
    step_of,
    train_steps,
)
from tests.parallel.zero import test_optimizer
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer
from trainstep.parallel.zero import optimizer as zero_optimizer
from trainstep.parallel.zero import pieces

pytestmark = pytest.mark.distributed

MODELS = ["Plain", "Tied", "Uneven", "Transposed", "Mixed", "Unused"]


def _wrap(process, model, **settings):
    ddp = DistributedDataParallel(
        model, process_group=process.group, bucket_mb=600e-6, allow_unused=settings.pop("allow_unused", False)
    )
    cls, options = OPTIMIZERS["AdamW"]
    settings = {"exchange_mb": EXCHANGE_MB} | settings
    return ddp, ShardedOptimizer(ddp.parameters(), cls, ddp=ddp, overlap_gather=True, **settings, **options)


def _gathers(process):
    """How many gathers a step has by default, with and without the next forward beside them."""
    found = {}
    with mock.patch.multiple(zero_optimizer, EXCHANGE_MB=2e-4, OVERLAPPED_MB=2e-3):
        for overlap_gather in (False, True):
            ddp = DistributedDataParallel(build("Stacked"), process_group=process.group)
            optimizer = ShardedOptimizer(
                ddp.parameters(), torch.optim.SGD, ddp=ddp, overlap_gather=overlap_gather, lr=0.1
            )
            with recorded_collectives() as calls:
                step_of(process, ddp, optimizer, 0)
            found[overlap_gather] = sum(call.name == "all-gather" for call in calls)
    return found


def test_by_default_more_is_gathered_at_a_time_beside_forward(two):
    for found in two.run(_gathers):
        assert 1 < found[True] < found[False]


def test_beside_forward_there_are_eight_runs_unless_that_makes_them_small_or_large():
    default = ShardedOptimizer.default_exchange_mb
    assert [default(int(mb * 1e6), overlap_gather=True) for mb in (100, 2048, 4000, 13_600)] == [256, 256, 500, 1000]
    assert [default(int(mb * 1e6), overlap_gather=False) for mb in (100, 13_600)] == [256, 256]


def train(process, transport):
    settings = {"transport": transport, "overlap_gather": True}
    return {name: test_optimizer.train(process, name, *OPTIMIZERS["AdamW"], True, **settings) for name in MODELS}


@pytest.mark.parametrize("transport", ["collectives", "peer-copies"])
def test_two_ranks_train_as_one_process(two, transport):
    first, second = two.run(train, transport)
    for name, trained in first.items():
        assert not differing(second[name], trained), name
        assert not differing(trained, reference(name, "AdamW", 2)), name


@contextlib.contextmanager
def _lately(waited=None):
    """Inside, gathers start when they are waited for, which are then in `waited`."""
    exchange, waited = pieces.ParameterBucket.exchange, [] if waited is None else waited

    def late(bucket, group, beside=None):
        return [_Late(lambda: [call.wait() for call in exchange(bucket, group, beside)], waited)]

    with mock.patch.object(pieces.ParameterBucket, "exchange", late):
        yield


class _Late:
    """A gather that comes when it is waited for: until then this rank's slices alone are new."""

    def __init__(self, call, late):
        self.call, self.late = call, late

    def wait(self):
        self.late.append(self)
        self.call()


def _late(process, policy):
    """Gathers that really come late: what a forward reads before is old. Which were under way after each call."""
    waited = []
    with _lately(waited):
        model = build("Stacked")
        checkpointing = Checkpointing(model, policy)
        ddp, optimizer = _wrap(process, model, exchange_mb=0)
        seen = []
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda *_, number=number: seen.append((number, len(waited))))
        for step in range(3):
            step_of(process, ddp, optimizer, step)
        del checkpointing
        seen.clear(), waited.clear()
        with torch.no_grad():
            ddp(shares(2, 0)[process.rank])
        order = list(seen)
        optimizer.step()  # whose gradients stay as they were
        saved = {name: value.clone() for name, value in ddp.state_dict().items()}
        return order, len(waited), saved, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("policy", ["none", "every-1"])
def test_each_block_waits_for_its_own_parameters_when_it_is_called(two, policy):
    for order, waited, saved, inner in two.run(_late, policy):
        blocks = dict(order)
        assert list(blocks) == [0, 1, 2, 3]
        assert blocks[0] < blocks[2], "what the last blocks need was not waited for at the start"
        assert waited > blocks[3], "state_dict() waited for all"
        assert all(torch.equal(value, inner[name.removeprefix("module.")]) for name, value in saved.items())


def _trained_late(process, name, policy):
    with _lately():
        model = build(name, process.rank)
        checkpointing = Checkpointing(model, policy)
        trained = train_steps(process, *_wrap(process, model))
        del checkpointing
        return trained


@pytest.mark.parametrize(("name", "policy"), [("Stacked", "none"), ("Stacked", "every-1"), ("TiedAcross", "none")])
def test_gathers_that_come_late_change_nothing(two, name, policy):
    first, second = two.run(_trained_late, name, policy)
    assert not differing(first, second)
    assert not differing(first, reference(name, "AdamW", 2), relative=1e-5)


def _in_groups(process):
    """Norms and biases in a group without decay, as people have them: which gathers had been waited for by which block;
    and a second optimizer in place of the first, after which the first one waits by itself."""
    waited, seen = [], []
    with _lately(waited):
        model = build("Stacked")
        ddp = DistributedDataParallel(model, process_group=process.group)
        groups = [
            {"params": [each for each in model.parameters() if each.dim() > 1]},
            {"params": [each for each in model.parameters() if each.dim() == 1], "weight_decay": 0.0},
        ]
        settings = {"ddp": ddp, "overlap_gather": True, "exchange_mb": EXCHANGE_MB, "lr": 0.1}
        first = ShardedOptimizer(groups, torch.optim.SGD, **settings)
        step_of(process, ddp, first, 0)
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda *_, number=number: seen.append((number, len(waited))))
        with torch.no_grad():
            ddp(shares(2, 0)[process.rank])
        second = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, **settings)
        waited.clear()
        first.step()
        by_itself = len(waited)
        second.step()
        return seen, by_itself, len(waited)


def _loaded(process):
    """`load_state_dict` after a step, of a module in it: what is loaded stays."""
    with _lately():
        ddp, optimizer = _wrap(process, build("Stacked"), exchange_mb=0)
        step_of(process, ddp, optimizer, 0)
        zeros = {name: torch.zeros_like(value) for name, value in ddp.module.blocks[1].state_dict().items()}
        optimizer.step()
        ddp.module.blocks[1].load_state_dict(zeros)
        optimizer.wait_for_parameters()
        return [value.count_nonzero().item() for value in ddp.module.blocks[1].state_dict().values()]


def test_what_is_grouped_or_loaded(two):
    for seen, by_itself, after in two.run(_in_groups):
        blocks = dict(seen)
        assert blocks[0] < blocks[3], "the first block did not wait for all"
        assert by_itself > 0
        assert after == by_itself, "the second optimizer's gathers are waited for by the next forward"
    assert two.run(_loaded) == [[0, 0]] * 2


class Bypassed(Stacked):
    """Uses a block's weight without calling the block."""

    def forward(self, x):
        return self.end(nn.functional.linear(torch.tanh(self.start(x)), self.blocks[3].inner.weight))


def _mistakes(process):
    plain = DistributedDataParallel(build("Plain"), process_group=process.group)
    copied = []

    def made(**settings):
        ShardedOptimizer(plain.parameters(), torch.optim.SGD, **{"lr": 0.1, "overlap_gather": True} | settings)

    def made_after_one_that_raised():
        with pytest.raises(ValueError, match="momentum"):
            made(ddp=plain, momentum=-1.0)
        made(ddp=plain)

    def bypassed():
        with _lately():
            torch.manual_seed(0)
            ddp, optimizer = _wrap(process, Bypassed(), exchange_mb=0, allow_unused=True)
            step_of(process, ddp, optimizer, 0)
            try:
                step_of(process, ddp, optimizer, 1)
            finally:
                optimizer.wait_for_parameters()

    def copied_early():
        ddp, optimizer = _wrap(process, build("Plain"))
        step_of(process, ddp, optimizer, 0)
        try:
            copy.deepcopy(ddp)
        finally:
            optimizer.wait_for_parameters()
            twin = copy.deepcopy(ddp)
            step_of(process, ddp, optimizer, 1)
            copied.append(twin(shares(2, 0)[process.rank]).shape[-1])

    said = told(
        {
            "needs ddp=": made,
            "no error": made_after_one_that_raised,
            "blocks.3.inner.weight was used in forward before it had arrived": bypassed,
            "overlap_gather": lambda: made(ddp=plain, overlap_gather=process.rank == 0),
            "transport is 'nccl'; expected one of auto": lambda: DistributedDataParallel(
                build("Plain"), transport="nccl"
            ),
            "wait_for_parameters() of the optimizer": copied_early,
        }
    )
    return said, copied


def test_mistakes_are_told(two):
    for said, copied in two.run(_mistakes):
        check([said])
        assert copied == [WIDTH], "of a copy that was made later"
