"""AdamW in one launch: torch's updates, its state dicts both ways, 16-bit states, and stochastic rounding."""

import copy
import itertools

import pytest
import torch
from torch import nn

from tests.fused.places import DEVICE, DTYPES, HERE, draw
from trainstep.errors import UnsupportedError, UsageError
from trainstep.fused import AdamW
from trainstep.fused import adamw as module

pytestmark = HERE
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(5, 7), (3000,), (1,), (4, 2, 600), ()]


def parameters(dtype=torch.float32, shapes=SHAPES):
    return [nn.Parameter(draw(*shape, dtype=dtype, seed=seed, grad=False)) for seed, shape in enumerate(shapes)]


def take(optimizer, own, steps, first=0):
    """Steps with gradients that depend on the number alone; without one for the second parameter in the odd steps."""
    for step in range(first, first + steps):
        for place, parameter in enumerate(own):
            values = draw(*parameter.shape, seed=100 + 10 * step + place, grad=False).to(parameter.dtype)
            parameter.grad = None if place == 1 and step % 2 else values
        optimizer.step()


def assert_alike(own, others):
    """float32's tolerance: twenty roundings of the largest number."""
    for one, other in zip(own, others, strict=True):
        torch.testing.assert_close(one, other, rtol=20 * 2**-24, atol=20 * 2**-24)


def test_updates_are_torchs() -> None:
    own, theirs = parameters(), parameters()
    ours, torchs = AdamW(own, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS)
    for part in range(3):
        take(ours, own, 2, 2 * part)
        take(torchs, theirs, 2, 2 * part)
        assert_alike(own, theirs)
    for one, other in zip(own, theirs, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_alike([ours.state[one][name]], [torchs.state[other][name]])
        assert ours.state[one]["step"] == torchs.state[other]["step"]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_in_16_bits_it_is_within_twice_torchs_error(dtype) -> None:
    settings = SETTINGS | {"eps": 1e-4}  # float16 holds it
    own, theirs = parameters(dtype), parameters(dtype)
    exact = [nn.Parameter(each.detach().double()) for each in parameters(dtype)]
    for kind, every in ((AdamW, own), (torch.optim.AdamW, theirs), (torch.optim.AdamW, exact)):
        optimizer = kind(every, **settings)
        for step in range(4):
            for place, parameter in enumerate(every):
                gradient = draw(*parameter.shape, dtype=dtype, seed=10 * step + place, grad=False)
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    for one, other, reference in zip(own, theirs, exact, strict=True):
        errors = [
            float((each.detach().double() - reference.detach()).norm() / reference.detach().norm())
            for each in (one, other)
        ]
        assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps


def test_one_launch_for_all_that_are_alike(monkeypatch) -> None:
    launched = []
    original = module.launch_adamw
    monkeypatch.setattr(module, "launch_adamw", lambda *given, **named: (launched.append(1), original(*given, **named)))
    own = parameters()
    optimizer = AdamW([{"params": own[:2]}, {"params": own[2:], "weight_decay": 0.0}], **SETTINGS)
    take(optimizer, own, 1)
    assert len(launched) == 2, "one for each group"
    take(optimizer, own, 1, first=1)
    assert len(launched) == 4, "the one without a gradient is left out"
    take(optimizer, own, 1, first=2)
    assert len(launched) == 7, "which is then a step behind the others"


def test_layouts() -> None:
    """A parameter that is stored by columns, its gradient by rows."""
    stored = draw(6, 40, grad=False).t()
    own, theirs = nn.Parameter(stored.clone(memory_format=torch.preserve_format)), nn.Parameter(stored.clone())
    assert not own.is_contiguous()
    for optimizer, every in ((AdamW, own), (torch.optim.AdamW, theirs)):
        optimizer_of = optimizer([every], **SETTINGS)
        for seed in range(3):
            every.grad = draw(40, 6, seed=seed, grad=False)
            optimizer_of.step()
    assert_alike([own], [theirs])


@pytest.mark.parametrize("into", ["torch", "ours"])
def test_state_dicts_load_either_way(into) -> None:
    own, theirs = parameters(), parameters()
    ours, torchs = AdamW(own, **SETTINGS), torch.optim.AdamW(theirs, **SETTINGS)
    (source, first), (target, second) = ((ours, own), (torchs, theirs))[:: 1 if into == "torch" else -1]
    take(source, first, 3)
    with torch.no_grad():
        for one, other in zip(second, first, strict=True):
            one.copy_(other)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    for optimizer, every in ((source, first), (target, second)):
        take(optimizer, every, 3, first=3)
    assert_alike(first, second)


def test_states_stay_in_the_dtype_asked_for() -> None:
    own = parameters()
    ours = AdamW(own, **SETTINGS, state_dtype=torch.bfloat16, stochastic_rounding=True)
    torchs = torch.optim.AdamW(theirs := parameters(), **SETTINGS)
    take(torchs, theirs, 2)
    saved = torchs.state_dict()
    saved["state"][0]["step"] = torch.tensor(2.0, device=DEVICE)  # where torch's fused form has it
    ours.load_state_dict(saved)
    assert {ours.state[each]["exp_avg"].dtype for each in own} == {torch.bfloat16}
    assert ours.param_groups[0]["stochastic_rounding"] is True
    assert ours.state[own[0]]["step"].device.type == "cpu"
    wide = AdamW(sixteen := parameters(torch.bfloat16), **SETTINGS, state_dtype=torch.float32)
    wide.load_state_dict(saved)
    assert torch.equal(wide.state[sixteen[0]]["exp_avg"], torchs.state[theirs[0]]["exp_avg"]), "not rounded on the way"


def test_copies_and_pickles_go_on_alike() -> None:
    own = parameters()
    optimizer = AdamW(own, **SETTINGS)
    take(optimizer, own, 2)
    other = copy.deepcopy(optimizer)
    copied = other.param_groups[0]["params"]
    take(optimizer, own, 2, first=2)
    take(other, copied, 2, first=2)
    assert all(map(torch.equal, own, copied))


def test_what_another_optimizer_has_is_refused() -> None:
    own = parameters()
    for theirs in (
        torch.optim.AdamW(own, amsgrad=True),
        torch.optim.AdamW(own, maximize=True),
        torch.optim.Adam(own, decoupled_weight_decay=False),
    ):
        with pytest.raises(UnsupportedError, match="the fused AdamW has no"):
            AdamW(own).load_state_dict(theirs.state_dict())


def test_stochastic_rounding_has_the_exact_mean() -> None:
    """An exp_avg_sq that does not change when rounded to nearest: the mean of many moves by what it should."""
    count, steps, change = 2**13, 6, 1e-3
    finds = {}
    for stochastic in (False, True):
        parameter = nn.Parameter(torch.ones(count, device=DEVICE))
        optimizer = AdamW(
            [parameter], lr=0.0, betas=(0.9, 1 - change), state_dtype=torch.bfloat16, stochastic_rounding=stochastic
        )
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = optimizer.state[parameter]
        state["exp_avg_sq"].fill_(1.0)
        parameter.grad.fill_(2**0.5)  # squares of 2: from 1 on, v grows by about 1e-3 a step
        for _ in range(steps):
            optimizer.step()
        finds[stochastic] = state["exp_avg_sq"].double()
    expected = 2 - (1 - change) ** steps
    assert finds[False].mean() == 1.0
    # Each step rounds by less than 2⁻⁷ up or down, so that the mean of so many has a deviation below this.
    deviation = 2**-7 / 2 * (steps / count) ** 0.5
    assert abs(float(finds[True].mean()) - expected) < 5 * deviation
    assert set(finds[True].tolist()) > {1.0, 1 + 2**-7}


def test_stochastic_rounding_of_what_bfloat16_holds_changes_nothing() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**100, float("inf"), float("-inf"), float("nan")], device=DEVICE)
    parameter = nn.Parameter(values.bfloat16())
    optimizer = AdamW([parameter], lr=0.0, weight_decay=0.0, stochastic_rounding=True)
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        optimizer.step()
    assert torch.equal(parameter.detach().nan_to_num(7.0), values.bfloat16().nan_to_num(7.0))


def test_the_seed_and_the_step_decide_the_rounding() -> None:
    def weights(seed, steps):
        own = parameters(torch.bfloat16, [(5000,)])
        take(AdamW(own, **SETTINGS, stochastic_rounding=True, seed=seed), own, steps)
        return own[0].detach()

    assert torch.equal(weights(1, 2), weights(1, 2))
    for one, other in itertools.combinations([weights(1, 2), weights(2, 2), weights(1, 1)], 2):
        assert not torch.equal(one, other)


def test_a_nan_in_a_gradient_stays_where_it_is() -> None:
    (own,) = parameters(shapes=[(5000,)])
    optimizer = AdamW([own], **SETTINGS)
    own.grad = torch.ones_like(own)
    own.grad[4321] = float("nan")
    optimizer.step()
    assert own.isnan().nonzero().tolist() == [[4321]]


def test_a_backward_through_the_parameters_before_an_update_is_an_error() -> None:
    own = parameters(shapes=[(5,), (7,)])
    loss = sum((each * each).sum() for each in own)
    loss.backward(retain_graph=True)
    AdamW(own, **SETTINGS).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_closure_is_called() -> None:
    (own,) = parameters(shapes=[(5,)])
    optimizer = AdamW([own], **SETTINGS)

    def closure():
        loss = own.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert optimizer.state[own]["step"] == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lr": torch.tensor(0.1)},
        {"eps": -1e-8},
        {"betas": (0.9, 1.0)},
        {"weight_decay": float("nan")},
        {"state_dtype": torch.float16},
        {"seed": -1},
    ],
)
def test_settings_out_of_range(settings) -> None:
    with pytest.raises(UsageError, match="expected"):
        AdamW(parameters(), **settings)
    with pytest.raises(UsageError, match="expected"):
        AdamW([{"params": parameters(), **settings}])


def test_bad_parameters() -> None:
    for values, gradient, error in (
        (torch.ones(4).double(), torch.ones(4).double(), "dense plain tensors of float32"),
        (torch.ones(1, 4).expand(3, 4), torch.ones(3, 4), "without gaps or overlaps"),
        (torch.ones(4), torch.ones(4).to_sparse(), "dense gradients"),
    ):
        parameter = nn.Parameter(values.to(DEVICE))
        parameter.grad = gradient.to(DEVICE)
        with pytest.raises(UnsupportedError, match=error):
            AdamW([parameter]).step()
