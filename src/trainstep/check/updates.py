"""Does an optimizer update as the plain one does? Twelve updates from equal gradients, held against the plain one's.

Gradients are compared before the update, so an optimizer that does nothing, ascends or takes another learning rate
would pass. From the same weights and gradients two implementations differ by float32's rounding alone: that of the
weights, which are stored twice, and that of the update's own arithmetic, where 1 − β₂ᵗ loses most: with β₂ = 0.999 it
keeps ten bits less. The second update takes other gradients than the first: by then bias correction, momentum and the
second moment have something to be wrong about. The others take the second's: what an optimizer does otherwise once it
has taken ten steps shows there.

A weight in bf16 keeps three digits, so that twelve updates of it may be lost in its rounding, and with them any error:
the optimizer of such weights is held against the plain one in bf16, both from weights of zero, where an update is
rounded as itself. What it does to other weights is judged by its float32 form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainstep.base.tolerance import FLOAT32_ROUNDOFF, LOST_BITS
from trainstep.check.gradients import Error
from trainstep.check.parts import norm
from trainstep.check.verdict import Part
from trainstep.checkpointing.updating import UpdatesInBackward

UPDATES = 12
"""More than ten, so that what goes wrong after ten is among them."""


def take_updates(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[tuple[str, Tensor]],
    gradients: Sequence[Mapping[str, Tensor]],
    updates: int = UPDATES,
    *,
    from_zero: bool = False,
    in_backward: UpdatesInBackward | None = None,
    update: Callable[[], object] | None = None,
) -> dict[str, Tensor]:
    """Distances that each parameter moves, in float32, in updates of these gradients; weights and state are put back.

    Args:
        optimizer: as it is made, without state yet.
        gradients: of each update by parameter's name, the last for all further ones; one that is missing is None.
        from_zero: the weights are zero before: 16 bits then round an update, not a weight.
        in_backward: makes the updates in a backward pass in which these gradients come.
        update: makes an update from the gradients that are there, by default the optimizer's step.
    """
    named = dict(parameters)
    kept = {name: value.detach().clone() for name, value in named.items()}
    if from_zero:
        with torch.no_grad():
            torch._foreach_zero_(list(named.values()))
    before = {name: value.detach().clone() for name, value in named.items()} if from_zero else kept
    state = optimizer.state_dict()
    versions: dict[str, int] = {}  # of gradients as they were given: an optimizer may change them in place
    for number in range(updates):
        given = gradients[min(number, len(gradients) - 1)]
        for name, parameter in named.items():
            own = parameter.grad
            if number >= len(gradients) and own is not None and own._version == versions.get(name):
                continue  # copying it to a GPU again would take longer than the update
            parameter.grad = None
            if name in given:
                parameter.grad = torch.empty_like(parameter).copy_(given[name])  # its strides, as autograd has them
                versions[name] = parameter.grad._version
        if in_backward is None:
            (update or optimizer.step)()
        else:
            _update_in_backward(in_backward, named.values())
    moved = {name: (value.detach().double() - before[name].double()).float() for name, value in named.items()}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(kept[name])
            parameter.grad = None
    optimizer.load_state_dict(state)
    return moved


def _update_in_backward(updates: UpdatesInBackward, parameters: Iterable[Tensor]) -> None:
    """Updates from the gradients that are there: they come anew in backward of the weights' product with them."""
    given = [(each, each.grad) for each in parameters if each.grad is not None]
    for parameter, _ in given:
        parameter.grad = None
    with updates.on():
        torch.stack([(parameter * gradient).sum().float() for parameter, gradient in given]).sum().backward()


def compare_updates(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    sizes: Mapping[str, float],
    unit: float = FLOAT32_ROUNDOFF,
) -> Part:
    """The parameter whose change uses most of what is allowed.

    Args:
        found, expected: how far each parameter moved.
        sizes: ‖W‖ of each parameter, which is rounded after each of the `UPDATES` on either side.
        unit: unit roundoff of the format that weights are stored in.
    """
    worst = Part()
    for name, reference in expected.items():
        expected_there = reference.to(found[name].device)
        error, moved = Error.between(found[name], expected_there).norm, norm(expected_there)
        allowed = 2 * UPDATES * unit * (sizes[name] + moved) + 2 * LOST_BITS * FLOAT32_ROUNDOFF * moved
        worst = max(worst, Part(error / (moved or 1), allowed / (moved or 1), name), key=lambda each: each.share)
    return worst


def named(found: Part, count: str = f"{UPDATES} updates") -> Part:
    """Name the part by what it is of, for a sentence."""
    return replace(found, name=f"{count} of {found.name} from equal gradients")
