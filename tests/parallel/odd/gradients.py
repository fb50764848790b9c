"""Gradients that are changed between backward and the optimizer's step."""

from __future__ import annotations

import torch
from torch import nn

from tests.parallel.odd.nets import Net
from tests.parallel.odd.runs import STEPS, Run, Scenario, steps


def clip_by_torch(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.parameters(), 0.05)


def clip_by_torch_inner(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.inner.parameters(), 0.05)


def clip_in_two(run: Run) -> None:
    total = nn.utils.get_total_norm([each.grad for each in run.parameters() if each.grad is not None])
    nn.utils.clip_grads_with_norm_(run.parameters(), 0.05, total)


def clip_own(run: Run) -> None:
    run.clip(0.05)


def clip_values(run: Run) -> None:
    nn.utils.clip_grad_value_(run.parameters(), 0.001)


def normalise_gradients(run: Run) -> None:
    for each in run.parameters():
        if each.grad is not None:
            each.grad /= each.grad.norm() + 1e-3


def clip_by_hand(run: Run) -> None:
    total = torch.sqrt(sum(each.grad.pow(2).sum() for each in run.parameters() if each.grad is not None))
    for each in run.parameters():
        if each.grad is not None:
            each.grad.mul_(torch.clamp(0.05 / total, max=1.0))


def centre_gradients(run: Run) -> None:
    for each in run.parameters():
        if each.grad is not None and each.dim() > 1:
            each.grad -= each.grad.mean(0, keepdim=True)


def halve_gradients(run: Run) -> None:
    for each in run.parameters():
        if each.grad is not None:
            each.grad.mul_(0.5)


def drop_gradients(run: Run) -> None:
    """One parameter's gradient is thrown away: nothing updates it."""
    for name, each in run.module.named_parameters():
        if name.endswith("head.weight"):
            each.grad = None


def halve_before_finish(run: Run) -> None:
    """What a user who scales gradients too early does."""
    for step in range(STEPS):
        run.backward(step)
        halve_gradients(run)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


def scaled(run: Run) -> None:
    """torch's GradScaler; in the second step one rank's gradients overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    assert run.optimizer is not None
    for step in range(STEPS):
        run.backward(step, scale=scaler.get_scale() if scaler._scale is not None else 8.0)
        run.finish()
        scaler.scale(torch.zeros(()))
        if step == 1:
            last = run.parameters()[0].grad
            whole = run.scheme in ("alone", "ddp", "torch ddp")  # where all ranks have it
            if last is not None and (whole or run.rank == 1):
                last.mul_(float("inf"))
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()


SCENARIOS: dict[str, Scenario] = {
    "torch's clip": Scenario("torch's clip_grad_norm_ of the wrapper's parameters", Net, train=steps(clip_by_torch)),
    "torch's clip, inner": Scenario("torch's clip_grad_norm_ of the module's", Net, train=steps(clip_by_torch_inner)),
    "clip in two": Scenario("torch's get_total_norm, clip_grads_with_norm_", Net, train=steps(clip_in_two)),
    "own clip": Scenario("the wrapper's clip_grad_norm_", Net, train=steps(clip_own)),
    "clip values": Scenario("torch's clip_grad_value_", Net, train=steps(clip_values)),
    "clip by hand": Scenario("a clip written by hand", Net, train=steps(clip_by_hand)),
    "normalised by hand": Scenario("each gradient divided by its norm", Net, train=steps(normalise_gradients)),
    "centred by hand": Scenario("each gradient's mean row subtracted", Net, train=steps(centre_gradients)),
    "halved by hand": Scenario("gradients halved", Net, train=steps(halve_gradients)),
    "halved too early": Scenario(
        "gradients halved before finish_gradient_synchronization", Net, train=halve_before_finish
    ),
    "dropped by hand": Scenario("a gradient set to None", Net, train=steps(drop_gradients)),
    "GradScaler": Scenario("torch's GradScaler, one rank overflows", Net, train=scaled),
}
