"""ShardedOptimizer: trains like the undivided optimizer, keeps its share of the state."""

import copy

import pytest
import torch
from torch import nn

from tests.parallel.mistakes import check, told
from tests.parallel.training import (
    EXCHANGE_MB,
    OPTIMIZERS,
    STEPS,
    SignDescent,
    build,
    differing,
    loss_of,
    reference,
    shares,
    state,
    step_of,
    train_steps,
    whole_batch,
)
from trainstep.base.errors import UsageError
from trainstep.measure.collectives import recorded_collectives
from trainstep.parallel import DistributedDataParallel, ShardedOptimizer
from trainstep.parallel.ddp.scattered import ScatteredGradient

pytestmark = pytest.mark.distributed

EVERY = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "SignDescent": (SignDescent, {}),
}


def wrap(process, name, optimizer_cls, options, scattered, *, seed=None, **settings):
    """A model whose ranks start from other weights, or those of `seed`, and its sharded optimizer."""
    model = build(name, process.rank if seed is None else seed, process.rank).to(process.device)
    of_ddp = {"bucket_mb": 600e-6, "allow_unused": name == "Unused"}
    if "transport" in settings:
        of_ddp["transport"] = settings.pop("transport")
    ddp = DistributedDataParallel(model, process_group=process.group, **of_ddp)
    ours = {"ddp": ddp} if scattered else {}
    return ddp, ShardedOptimizer(
        ddp.parameters(), optimizer_cls, exchange_mb=EXCHANGE_MB, **ours, **settings, **options
    )


def train(process, name, optimizer_cls, options, scattered, *, how=None, **settings):
    ddp, optimizer = wrap(process, name, optimizer_cls, options, scattered, **settings)
    return train_steps(process, ddp, optimizer, **how or {})


@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["Plain", "Tied", "Frozen", "Uneven", "Transposed", "Mixed", "Unused"])
def test_two_ranks_train_like_one_process(two, name, optimizer, scattered):
    first, second = two.run(train, name, *OPTIMIZERS[optimizer], scattered)
    assert not differing(second, first)
    assert not differing(first, reference(name, optimizer, 2))


@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("name", ["Plain", "Uneven"])
def test_four_ranks_train_like_one_process(four, name, scattered):
    by_rank = four.run(train, name, *OPTIMIZERS["AdamW"], scattered)
    assert not any(differing(each, by_rank[0]) for each in by_rank)
    assert not differing(by_rank[0], whole_batch(name, "AdamW", 4), relative=2e-5)


def _every(process):
    return {name: train(process, "Plain", *each, False, how={"steps": 3}) for name, each in EVERY.items()}


def test_every_optimizer_of_torch_and_an_unknown_one(two):
    for results in two.run(_every):
        for name, divided in results.items():
            expected = reference("Plain", EVERY[name], 2, steps=3)
            # vector instructions of a fused one round differently at the ends of a tensor
            assert not differing(divided, expected, relative=1e-6 if "fused" in name else 0.0), name


def _delayed(process, scattered):
    return [train(process, "Plain", *OPTIMIZERS["SGD"], scattered, how={"delays": each}) for each in range(5)]


@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_late_ranks_and_layers_change_nothing(two, scattered):
    expected = reference("Plain", "SGD", 2)
    for results in two.run(_delayed, scattered):
        assert not any(differing(each, expected) for each in results)


def _groups_and_schedule(process, scattered):
    """Groups with their own hyper-parameters, a scheduler, a group added later, closures; divided and undivided."""
    results = []
    for divided in (True, False):
        model = build("Plain")
        ddp = DistributedDataParallel(model, process_group=process.group)
        norm, last = list(model.norm.parameters()), list(model.last.parameters())
        rest = [p for p in model.parameters() if not any(p is q for q in norm + last)]
        groups = [{"params": rest, "lr": 0.02}, {"params": norm, "weight_decay": 0.0, "betas": (0.8, 0.9)}]
        if divided:
            options = {"ddp": ddp if scattered else None, "exchange_mb": EXCHANGE_MB}
            optimizer = ShardedOptimizer(groups, torch.optim.AdamW, lr=0.01, weight_decay=0.3, **options)
        else:
            optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        losses = []
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": last, "lr": 0.005})
                schedule.base_lrs.append(0.005)
                schedule.lr_lambdas.append(schedule.lr_lambdas[0])

            def closure(ddp=ddp, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = loss_of(ddp, shares(2, step)[process.rank])
                loss.backward()
                ddp.finish_gradient_synchronization()
                return loss.detach()

            losses.append(optimizer.step(closure))
            schedule.step()
        results.append((state(model), torch.stack(losses), [group["lr"] for group in optimizer.param_groups]))
    (ours, our_losses, our_rates), (theirs, their_losses, their_rates) = results
    return differing(ours, theirs), torch.equal(our_losses, their_losses), our_rates, their_rates


@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_groups_schedulers_closures_and_groups_added_later(two, scattered):
    for wrong, same_losses, our_rates, their_rates in two.run(_groups_and_schedule, scattered):
        assert not wrong
        assert same_losses
        assert our_rates == their_rates
        assert len(our_rates) == 3


def _share_of_state(process, optimizer_cls):
    ddp = DistributedDataParallel(build("Plain"), process_group=process.group)
    optimizer = ShardedOptimizer(ddp.parameters(), optimizer_cls)
    step_of(process, ddp, optimizer, 0)
    moments = [v for values in optimizer.state.values() for v in values.values() if v.dim()]
    return sum(moment.numel() for moment in moments), [tuple(p.shape) for p in optimizer.state]


class Unknown(torch.optim.AdamW):
    """Is given whole parameters."""


def test_state_is_divided_evenly(two, four):
    count = sum(p.numel() for p in build("Plain").parameters())
    for workers, world_size in ((two, 2), (four, 4)):
        sliced = [elements for elements, _ in workers.run(_share_of_state, torch.optim.AdamW)]
        assert sum(sliced) == 2 * count
        assert max(sliced) - min(sliced) <= 2 * 7, "all but the odd bias is in equal slices"
        by_rank = workers.run(_share_of_state, Unknown)
        assert sum(elements for elements, _ in by_rank) == 2 * count
        assert max(elements for elements, _ in by_rank) <= 2 * count / world_size + 2 * 128
        assert sorted(shape for _, shapes in by_rank for shape in shapes) == sorted(
            tuple(p.shape) for p in build("Plain").parameters()
        )


def _calls(process, optimizer_cls, scattered):
    ddp = DistributedDataParallel(build("Plain"), process_group=process.group, bucket_mb=float("inf"))
    ours = {"ddp": ddp if scattered else None, "exchange_mb": EXCHANGE_MB}
    optimizer = ShardedOptimizer(ddp.parameters(), optimizer_cls, lr=0.1, **ours)
    for step in range(2):
        with recorded_collectives() as calls:
            step_of(process, ddp, optimizer, step)
    return [(call.name, call.tensors, call.bytes) for call in calls]


def test_collectives_are_few_and_as_large_as_needed(two):
    total = 4 * sum(p.numel() for p in build("Plain").parameters())
    odd = 4 * 7
    for calls in two.run(_calls, torch.optim.SGD, False):
        reduced, *gathered = calls
        assert reduced == ("all-reduce", 9, total)
        assert [name for name, _, _ in gathered].count("broadcast") == 1
        assert sum(size for name, _, size in gathered if name == "all-gather") == total - odd
        assert sum(size for name, _, size in gathered if name == "broadcast") == odd
        assert len(gathered) == 4, "3 runs of slices, and the odd bias"
    for calls in two.run(_calls, torch.optim.SGD, True):
        assert sorted(calls[:2]) == [("all-reduce", 1, odd), ("reduce-scatter", 8, total - odd)]
        assert sum(size for _, _, size in calls[2:]) == total
    for calls in two.run(_calls, Unknown, False):
        assert {name for name, _, _ in calls[1:]} == {"broadcast"}
        assert sum(size for _, _, size in calls[1:]) == total
        assert len(calls) - 1 <= 2 * 4, "one call per run and owner"


def _clipped(process, scattered, norm_type):
    ddp = DistributedDataParallel(build("Plain"), process_group=process.group)
    options = {"lr": 0.125, "momentum": 0.5, "ddp": ddp if scattered else None}
    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, **options)
    norms = []
    for step in range(STEPS):
        step_of(process, ddp, optimizer, step, update=False)
        if scattered:
            assert isinstance(ddp.module.first.weight.grad, ScatteredGradient)
        norms.append(optimizer.clip_grad_norm_(0.1, norm_type).item())
        optimizer.step()
    return state(ddp.module), norms


@pytest.mark.parametrize("scattered", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_clipping_takes_the_norm_over_all_ranks(two, scattered):
    expected = reference("Plain", "SGD", 2, clip=0.1)
    (first, norms), (second, same) = two.run(_clipped, scattered, 2.0)
    assert norms == same
    assert min(norms) > 0.1, "every step was clipped"
    assert not differing(first, expected, relative=1e-6)
    assert not differing(first, second)
    (_, norms), _ = two.run(_clipped, scattered, float("inf"))
    model = build("Plain")
    gradients = []
    for rank in range(2):
        model.zero_grad()
        loss_of(model, shares(2, 0)[rank]).backward()
        gradients.append([p.grad for p in model.parameters()])
    largest = max(((a + b) / 2).abs().max().item() for a, b in zip(*gradients, strict=True))
    assert norms[0] == pytest.approx(largest, rel=1e-6)


class ByShape(torch.optim.SGD):
    """Takes parameters alone."""

    def __init__(self, parameters, **options):
        super().__init__(sorted(parameters, key=lambda each: each.ndim), **options)


def _mistakes(process):
    """All ranks make them."""

    def ddp_of(name="Plain"):
        return DistributedDataParallel(build(name), process_group=process.group)

    def made(optimizer_cls=torch.optim.SGD, params=None, **options):
        params = ddp_of().parameters() if params is None else params
        return ShardedOptimizer(params, optimizer_cls, process_group=process.group, **options)

    def both(name="Plain", scattered=True):
        ddp = ddp_of(name)
        return ddp, made(params=ddp.parameters(), ddp=ddp if scattered else None)

    def before_finish():
        ddp, optimizer = both()
        loss_of(ddp, shares(2, 0)[process.rank]).backward()
        optimizer.step()

    def moved():
        ddp, optimizer = both(scattered=False)
        ddp.module.double().float()
        optimizer.step()

    def unfrozen():
        ddp, optimizer = both("Frozen", scattered=False)
        ddp.module.odd.bias.requires_grad_(True).grad = torch.zeros(7)
        optimizer.step()

    def scaled():
        ddp, optimizer = both()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(ddp, shares(2, 0)[process.rank])).backward()
        ddp.finish_gradient_synchronization()
        scaler.step(optimizer)

    def other_groups():
        made().load_state_dict(torch.optim.SGD(list(ddp_of().parameters())[:2]).state_dict())

    return told(
        {
            "LBFGS couples all parameters": lambda: made(torch.optim.LBFGS),
            "call finish_gradient_synchronization()": before_finish,
            "parameter number 0 was moved or cast": moved,
            "parameter number 3 was frozen when this optimizer was made": unfrozen,
            "a GradScaler sees only this rank's slices": scaled,
            "parameter groups of [2] parameters, this optimizer of [9]": other_groups,
            "is not one of ddp; leave out ddp=": lambda: made(params=build("Plain").parameters(), ddp=ddp_of()),
            "rank 1 has lr of group 0 = 1.1 as setting, rank 0 lr of": lambda: made(lr=0.1 + process.rank),
            "params is empty": lambda: made(params=iter([])),
            "exchange_mb is -1": lambda: made(exchange_mb=-1),
            "optimizer_cls is 'AdamW'": lambda: made("AdamW"),
            "ByShape could not be made from parameter groups, of which ShardedOptimizer gives it a list": lambda: made(
                ByShape
            ),
            "ddp is a Plain": lambda: made(ddp=build("Plain")),
        }
    )


def test_mistakes_are_told_on_every_rank(two):
    check(two.run(_mistakes))


def _scaled(process):
    """Loss scaling with all-reduced gradients: every rank sees every overflow."""
    ddp = DistributedDataParallel(build("Plain").to(process.device), process_group=process.group)
    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.125, momentum=0.5)
    scaler = torch.amp.GradScaler(process.device.type, init_scale=8.0)
    before, kept = state(ddp.module), []
    for step in range(-1, STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, shares(2, max(step, 0))[process.rank])
        scaler.scale(loss * (float("inf") if step < 0 and process.rank else 1)).backward()
        ddp.finish_gradient_synchronization()
        scaler.step(optimizer)
        scaler.update()
        kept.append(not differing(state(ddp.module), before))
    return state(ddp.module), kept, scaler.get_scale()


def test_a_scaler_works_with_all_reduced_gradients(two):
    for trained, kept, scale in two.run(_scaled):
        assert kept == [True, False, False, False, False]
        assert scale == 4.0
        assert not differing(trained, reference("Plain", "SGD", 2))


def _moved_whole(process):
    """A parameter that cannot be cut, whose memory is another after the first step."""
    module = nn.Linear(3, 1)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.125, process_group=process.group)
    for _ in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        module.bias.data = module.bias.data.clone()
    return [parameter.detach().clone() for parameter in module.parameters()]


def test_a_whole_parameter_may_move_between_steps(two):
    first, second = two.run(_moved_whole)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def _deepcopied(process):
    ddp = DistributedDataParallel(build("Plain"), process_group=process.group)
    optimizer = ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.125, momentum=0.5, ddp=ddp)
    step_of(process, ddp, optimizer, 0)
    average = copy.deepcopy(ddp)
    step_of(process, average, optimizer, 1, update=False)
    return [parameter.grad is not None for parameter in average.parameters()]


def test_a_copy_of_the_wrapper_has_whole_gradients_again(two):
    assert all(all(whole) for whole in two.run(_deepcopied))


def test_parameters_without_a_group():
    with pytest.raises(UsageError, match="not initialised"):
        ShardedOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD)
