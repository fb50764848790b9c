"""DistributedDataParallel: every scheme trains like one process, and talks as much as it says."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.mistakes import check, told
from tests.parallel.training import (
    OPTIMIZERS,
    build,
    differing,
    loss_of,
    reference,
    shares,
    state,
    train_steps,
    whole_batch,
)
from tests.workers import WorkerError, Workers
from trainstep.base.errors import UsageError
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel import DistributedDataParallel, FullyShardedDataParallel

pytestmark = pytest.mark.distributed

INF = float("inf")
SCHEMES = {
    "naive": {"bucket_mb": 0, "overlap": False, "transport": "collectives"},
    "flat": {"bucket_mb": INF, "overlap": False, "transport": "collectives"},
    "overlapped": {"bucket_mb": 0, "transport": "collectives"},
    "bucketed": {"bucket_mb": 600e-6},
}


def train(process, name, optimizer, scheme, *, how=None, **settings):
    """Train on this rank's shares; returns the state afterwards. Ranks other than 0 start from other weights."""
    how = how or {}
    model = build(name, process.rank, process.rank).to(device=process.device, dtype=how.get("dtype"))
    ddp = DistributedDataParallel(model, process_group=process.group, **SCHEMES[scheme] | settings)
    optimizer_cls, options = OPTIMIZERS[optimizer]
    stepper = optimizer_cls([p for p in ddp.parameters() if p.requires_grad], **options)
    return train_steps(process, ddp, stepper, **how)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["Plain", "Tied", "Frozen", "Uneven", "Transposed", "Mixed", "Branches"])
def test_two_ranks_train_like_one_process(two, name, scheme, optimizer):
    first, second = two.run(train, name, optimizer, scheme)
    assert not differing(first, reference(name, optimizer, 2)), "two numbers have one sum in either order"
    assert not differing(second, first)
    if name != "Mixed":  # bfloat16 rounds a batch's gradient once, its halves' twice
        assert not differing(first, whole_batch(name, optimizer, 2), relative=2e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["Plain", "Uneven", "Branches"])
def test_four_ranks_train_like_one_process(four, name, scheme):
    by_rank = four.run(train, name, "AdamW", scheme)
    assert not any(differing(each, by_rank[0]) for each in by_rank), "all ranks have the same weights, to the bit"
    assert not differing(by_rank[0], whole_batch(name, "AdamW", 4), relative=2e-5)


def _train_delayed(process, scheme):
    return [train(process, "Branches", "SGD", scheme, how={"delays": repeat}) for repeat in range(5)]


@pytest.mark.parametrize("scheme", ["flat", "overlapped", "bucketed"])
def test_late_ranks_and_layers_change_nothing(two, scheme):
    expected = reference("Branches", "SGD", 2)
    for results in two.run(_train_delayed, scheme):
        assert not any(differing(each, expected) for each in results)


HOW = {  # how both train, and the scheme
    **{f"accumulated, {scheme}": ({"accumulate": 3}, scheme) for scheme in SCHEMES},
    "autocast-bf16": ({"autocast": torch.bfloat16}, "bucketed"),
    "bf16": ({"dtype": torch.bfloat16}, "bucketed"),
    "autocast-fp16": ({"autocast": torch.float16}, "bucketed"),
    "clipped, kept at zero": ({"clip": 0.1}, "bucketed"),
}


def train_how(process, name, **more):
    how, scheme = HOW[name]
    how = how | {"set_to_none": "kept at zero" not in name}
    return train(process, "Plain", "SGD", **{"scheme": scheme} | more, how=how)


def check_how(name, found):
    assert not differing(found, reference("Plain", "SGD", 2, **HOW[name][0])), name


@pytest.mark.parametrize("name", HOW)
def test_however_it_trains_it_trains_like_one_process(two, name):
    first, second = two.run(train_how, name)
    assert not differing(second, first)
    check_how(name, first)


def _calls(process, schemes):
    """Names, sizes and numbers of the collectives of the first and the second step, and of a step inside no_sync."""
    found = {}
    for scheme, options in schemes.items():
        ddp = DistributedDataParallel(build("Plain"), process_group=process.group, **options)
        steps = []
        for step in range(3):
            with recorded_collectives() as calls:
                loss_of(ddp, shares(2, step)[process.rank]).backward()
                during = len(calls)
                ddp.finish_gradient_synchronization()
            reduced = [(call.name, call.tensors, call.bytes) for call in calls if call.name == "all-reduce"]
            steps.append((during, reduced, len(calls)))
        with recorded_collectives() as calls, ddp.no_sync():
            loss_of(ddp, shares(2, 0)[process.rank]).backward()
        found[scheme] = (steps, len(calls))
    return found


def test_each_scheme_makes_the_calls_it_says(two):
    sizes = {name: 4 * p.numel() for name, p in build("Plain").named_parameters()}
    assert list(sizes.values()) == [512, 64, 448, 28, 448, 64, 64, 512, 32]
    for found in two.run(_calls, SCHEMES):
        for scheme, (steps, in_no_sync) in found.items():
            assert in_no_sync == 0, scheme
            for during, calls, _ in steps:
                assert sum(size for _, _, size in calls) == sum(sizes.values()), scheme
                assert during == (0 if scheme in ("naive", "flat") else len(calls)), scheme
        assert all(calls == [("all-reduce", 9, 2172)] for _, calls, _ in found["flat"][0])
        assert all(len(calls) == 9 for _, calls, _ in found["naive"][0] + found["overlapped"][0])
        _, calls, all_calls = found["bucketed"][0][2]
        assert all_calls == len(calls), "nothing else is sent once the order is known"
        assert sum(tensors for _, tensors, _ in calls) == 9
        assert all(size >= 600 for _, _, size in calls[:-1]), "a bucket is closed when it is full"
        assert len(calls) == 3


def _unused(process, allow):
    results = {}
    for scheme, options in SCHEMES.items():
        if allow:
            results[scheme] = train(process, "Unused", "AdamW", scheme, allow_unused=True)
            continue
        ddp = DistributedDataParallel(build("Unused"), process_group=process.group, **options)
        x = shares(process.world_size, 0)[1]  # the same on all ranks: `sometimes` is used
        loss_of(ddp, x).backward()
        try:
            ddp.finish_gradient_synchronization()
        except UsageError as error:
            results[scheme] = str(error)
    return results


def test_unused_parameters_are_named(two):
    for rank, messages in enumerate(two.run(_unused, False)):
        assert set(messages) == set(SCHEMES)
        for message in messages.values():
            assert f"2 parameters got no gradient on rank {rank}: spare.weight, spare.bias" in message
            assert "allow_unused=True" in message


def test_unused_parameters_are_allowed(two):
    expected = reference("Unused", "AdamW", 2)
    for results in two.run(_unused, True):
        for scheme, trained in results.items():
            assert not differing(trained, expected), scheme
            assert torch.equal(trained["spare.weight"], build("Unused").spare.weight), (
                "weight decay leaves it alone too"
            )


def _mistakes(process):
    """All ranks make them."""
    x = shares(2, 0)[process.rank]

    def wrap(model=None, **options):
        return DistributedDataParallel(model or build("Plain"), process_group=process.group, **options)

    def sparse():
        ddp = wrap(nn.Embedding(5, 3, sparse=True))
        ddp(torch.tensor([1])).sum().backward()

    def after_backward(ddp):
        loss_of(ddp, x).backward()
        return ddp

    def backward_twice():
        ddp = wrap(bucket_mb=0)
        loss = loss_of(ddp, x) + loss_of(ddp, x)
        loss.backward(retain_graph=True)
        loss.backward()

    def added_later():
        ddp = wrap()
        ddp.module.extra = nn.Linear(2, 2)
        ddp.module.middle.requires_grad_(False)
        after_backward(ddp).finish_gradient_synchronization()

    def emptied():
        ddp = after_backward(wrap(overlap=False))
        ddp.zero_grad()
        ddp.finish_gradient_synchronization()

    return told(
        {
            "still being averaged; call": lambda: after_backward(wrap(bucket_mb=0))(x),
            "was added to after it had been sent": backward_twice,
            "(extra.weight, extra.bias added, replaced or unfrozen; middle.weight removed, replaced or": added_later,
            "is gone: it was set to None between": emptied,
            "weight has a sparse gradient": sparse,
            "no gradient came since the last step; call": lambda: wrap().finish_gradient_synchronization(),
            "rank 1 has weight (float32 (3, 2)) as parameter 0, rank 0 weight (float32 (2, 2))": lambda: wrap(
                nn.Linear(2, 2 + process.rank)
            ),
            "wrap the plain module once": lambda: wrap(wrap()),
            "bucket_mb is -1": lambda: wrap(bucket_mb=-1),
            "bucket_mb is nan": lambda: wrap(bucket_mb=float("nan")),
            "no parameter that requires a gradient": lambda: wrap(build("Plain").requires_grad_(False)),
            "weight is on the meta device": lambda: wrap(nn.Linear(2, 2, device="meta")),
        }
    )


def test_mistakes_are_told_on_every_rank(two):
    check(two.run(_mistakes))


def test_without_a_group_it_says_how_to_start():
    with pytest.raises(UsageError, match="not initialised; start with torchrun"):
        DistributedDataParallel(build("Plain"))


def _in_groups(process):
    """Two pairs of ranks, each a group of its own; then every rank alone."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([rank]) for rank in range(4)]
    results = []
    for group in (pairs[process.rank // 2], alone[process.rank]):
        ddp = DistributedDataParallel(build("Plain", seed=process.rank), process_group=group, bucket_mb=600e-6)
        for step in range(2):
            ddp.zero_grad()
            loss_of(ddp, shares(4, step)[process.rank]).backward()
            ddp.finish_gradient_synchronization()
        results.append({name: parameter.grad for name, parameter in ddp.module.named_parameters()})
    return results


def _own_gradients(seed, share):
    model = build("Plain", seed=seed)
    loss_of(model, shares(4, 1)[share]).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_groups_are_separate_and_may_be_of_one(four):
    for rank, (in_pair, alone) in enumerate(four.run(_in_groups)):
        assert not differing(alone, _own_gradients(rank, rank))
        root = rank // 2 * 2
        pair = [_own_gradients(root, root), _own_gradients(root, root + 1)]
        assert not differing(in_pair, {name: pair[0][name] / 2 + pair[1][name] / 2 for name in in_pair})


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


def _alongside(process, what):
    """Training under DDP with a feature of torch on top."""
    model = build("Plain")
    if what == "compiled":
        model.compile(backend="aot_eager")
    elif what.startswith("checkpointed"):
        model = Checkpointed(model, reentrant="re-entrant" in what)
    ddp = DistributedDataParallel(model, process_group=process.group, bucket_mb=600e-6)
    if what == "compiled around":
        ddp.compile(backend="aot_eager")
    trained = train_steps(process, ddp, torch.optim.SGD(ddp.parameters(), lr=0.125, momentum=0.5))
    return {name.removeprefix("inner."): value for name, value in trained.items()}


@pytest.mark.parametrize("what", ["compiled", "compiled around", "checkpointed", "checkpointed, re-entrant"])
def test_works_with(two, what):
    first, second = two.run(_alongside, what)
    expected = reference("Plain", "SGD", 2)
    assert not differing(first, expected, relative=1e-6 if what.startswith("compiled") else 0.0)
    assert not differing(second, first)


def _infinite(process):
    """An overflow on one rank skips the step on all, and lowers the scale on all."""
    ddp = DistributedDataParallel(build("Plain").to(process.device), process_group=process.group)
    before = state(ddp.module)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1, fused=process.device.type == "cuda")
    scaler = torch.amp.GradScaler(process.device.type, init_scale=4.0)
    loss = loss_of(ddp, shares(2, 0)[process.rank]) * (float("inf") if process.rank else 1.0)
    scaler.scale(loss).backward()
    ddp.finish_gradient_synchronization()
    scaler.step(optimizer)
    scaler.update()
    return differing(state(ddp.module), before), scaler.get_scale()


def test_an_overflow_anywhere_skips_the_step_everywhere(two):
    assert two.run(_infinite) == [([], 2.0), ([], 2.0)]


def _start(process):
    """What every rank starts from: rank 0's parameters and buffers, of any dtype and layout."""
    torch.manual_seed(process.rank)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(6, 4).t())
    model.register_buffer("mask", torch.rand(5) > 0.5)
    model.register_buffer("count", torch.tensor(process.rank + 3))
    model.register_buffer("expanded", torch.full((1,), process.rank + 1.0).expand(4))
    model.register_buffer("strided", torch.randn(10)[::2])
    ddp = DistributedDataParallel(model, process_group=process.group)
    return state(model), list(ddp.state_dict())


def test_every_rank_starts_from_the_first_ones_tensors(two):
    (first, names), (second, _) = two.run(_start)
    assert names == [f"module.{name}" for name in first], "and nothing else is saved"
    assert not differing(first, second)
    assert first["count"] == 3
    assert first["expanded"].tolist() == [1.0] * 4


def _die_in_backward(process, wrap, how):
    wrapper = WRAPPERS[wrap](build("Plain"))

    def die(*_):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            time.sleep(4)
        else:
            raise ZeroDivisionError("one rank's mistake")

    if process.rank == 1:
        wrapper.module.first.register_full_backward_pre_hook(die)
    loss_of(wrapper, shares(2, 0)[process.rank]).backward()
    wrapper.finish_gradient_synchronization()


WRAPPERS = {"ddp": DistributedDataParallel, "fsdp": FullyShardedDataParallel}


@pytest.mark.parametrize(
    ("wrap", "how", "on_it", "on_the_other"),
    [
        ("ddp", "raised", "one rank's mistake", "finish_gradient_synchronization"),
        ("ddp", "killed", "exit code -9", "finish_gradient_synchronization"),
        ("ddp", "late", "", "Timed out"),
        ("fsdp", "killed", "exit code -9", "backward"),
    ],
)
def test_a_rank_that_dies_or_hangs_in_backward_is_an_error_on_both(wrap, how, on_it, on_the_other):
    with Workers(2, timeout_s=2 if how == "late" else 20) as workers:
        start = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            workers.run(_die_in_backward, wrap, how)
        assert time.monotonic() - start < 20 + 10
    assert on_it in caught.value.failures[1]
    assert on_the_other in caught.value.failures[0]
