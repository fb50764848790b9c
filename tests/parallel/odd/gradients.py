"""Gradients that are changed between backward and the optimizer's step."""

import torch
from torch import nn

from tests.parallel.odd.nets import Net
from tests.parallel.odd.runs import STEPS, Scenario, steps


def grads(run):
    return [each.grad for each in run.parameters() if each.grad is not None]


def clip_in_two(run):
    total = nn.utils.get_total_norm(grads(run))
    nn.utils.clip_grads_with_norm_(run.parameters(), 0.05, total)


def normalise_gradients(run):
    for each in run.parameters():
        if each.grad is not None:
            each.grad /= each.grad.norm() + 1e-3


def clip_by_hand(run):
    total = torch.sqrt(sum(each.pow(2).sum() for each in grads(run)))
    for each in grads(run):
        each.mul_(torch.clamp(0.05 / total, max=1.0))


def centre_gradients(run):
    for each in run.parameters():
        if each.grad is not None and each.dim() > 1:
            each.grad -= each.grad.mean(0, keepdim=True)


def halve_gradients(run):
    for each in grads(run):
        each.mul_(0.5)


def drop_gradients(run):
    """One parameter's gradient is thrown away: nothing updates it."""
    for name, each in run.module.named_parameters():
        if name.endswith("head.weight"):
            each.grad = None


def halve_too_early(run, step):
    run.backward(step)
    halve_gradients(run)


def scaled(run):
    """torch's GradScaler; in the second step one rank's gradients overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    optimizer = run.optimizer
    for step in range(STEPS):
        run.backward(step, scale=scaler.get_scale() if scaler._scale is not None else 8.0)
        run.finish()
        scaler.scale(torch.zeros(()))
        if step == 1:
            last = run.parameters()[0].grad
            whole = run.scheme in ("alone", "ddp", "torch ddp")  # where all ranks have it
            if last is not None and (whole or run.rank == 1):
                last.mul_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _changed(what, change):
    return Scenario(what, Net, train=steps(change))


SCENARIOS = {
    "torch's clip": _changed(
        "torch's clip_grad_norm_ of the wrapper's parameters",
        lambda run: nn.utils.clip_grad_norm_(run.parameters(), 0.05),
    ),
    "torch's clip, inner": _changed(
        "torch's clip_grad_norm_ of the module's", lambda run: nn.utils.clip_grad_norm_(run.inner.parameters(), 0.05)
    ),
    "clip in two": _changed("torch's get_total_norm, clip_grads_with_norm_", clip_in_two),
    "own clip": _changed("the wrapper's clip_grad_norm_", lambda run: run.clip(0.05)),
    "clip values": _changed("torch's clip_grad_value_", lambda run: nn.utils.clip_grad_value_(run.parameters(), 0.001)),
    "clip by hand": _changed("a clip written by hand", clip_by_hand),
    "normalised by hand": _changed("each gradient divided by its norm", normalise_gradients),
    "centred by hand": _changed("each gradient's mean row subtracted", centre_gradients),
    "halved by hand": _changed("gradients halved", halve_gradients),
    "halved too early": Scenario(
        "gradients halved before finish_gradient_synchronization", Net, train=steps(backward=halve_too_early)
    ),
    "dropped by hand": _changed("a gradient set to None", drop_gradients),
    "GradScaler": Scenario("torch's GradScaler, one rank overflows", Net, train=scaled),
}
