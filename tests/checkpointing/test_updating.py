"""Updates in backward: the same weights as after it, no more gradients at once than a block's, and what forbids it."""

import json
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from trainstep.base.config import ModelConfig, StepConfig
from trainstep.base.errors import UnsupportedError, UsageError
from trainstep.checkpointing.policies import BlockPolicy, Policy
from trainstep.checkpointing.updating import UpdatesInBackward
from trainstep.measure.memory import step_memory
from trainstep.step.training_step import Replica, TrainingStep, build_step
from trainstep.step.workload import builtin_source

SOURCE = builtin_source("toy", ModelConfig(vocab_size=256, d_model=32, d_ff=80, num_layers=4, num_heads=2))
AFTER = StepConfig(batch=2, context=16, device="cpu", optimizer="adamw-fused")


@pytest.fixture
def in_backward(tmp_path):
    """The same step, updated in backward."""
    Policy(update_in_backward=True).save(tmp_path / "policy.json")
    return replace(AFTER, checkpointing=f"@{tmp_path / 'policy.json'}")


def weights_after(step, steps=4):
    losses = [float(step(step.next_batch())) for _ in range(steps)]
    return losses, [parameter.detach() for parameter in step.module.parameters()]


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"compile": "blocks", "precision": "bf16"}, marks=pytest.mark.thorough)], ids=str
)
def test_weights_and_losses_are_those_of_updates_after_backward(in_backward, changes):
    if changes and shutil.which("g++") is None:
        pytest.skip("torch.compile on a CPU needs g++")
    after, during = (weights_after(build_step(SOURCE, replace(config, **changes))) for config in (AFTER, in_backward))
    assert after[0] == during[0]
    assert all(torch.equal(a, b) for a, b in zip(after[1], during[1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("change", [{}, {"precision": "bf16"}, {"precision": "bf16", "compile": "blocks"}], ids=str)
def test_on_a_gpu(in_backward, change):
    """Also with what waits in host memory and what is computed again, whose copies and runs are beside the updates."""
    blocks = {f"blocks.{index}": BlockPolicy(recompute=index % 2 == 0, host=(0,)) for index in range(4)}
    path = Path(in_backward.checkpointing[1:])
    found = []
    for is_in_backward in (False, True):
        Policy(blocks, is_in_backward).save(path)
        step = build_step(SOURCE, replace(in_backward, device="cuda", attention="sdpa-math", **change))
        found.append(weights_after(step))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_the_optimizer_stays_one_with_all_of_its_state(in_backward):
    after, during = build_step(SOURCE, AFTER), build_step(SOURCE, in_backward)
    for step in (after, during):
        weights_after(step, 2)
    expected, found = after.optimizer.state_dict(), during.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    assert all(torch.equal(found["state"][key]["exp_avg"], each["exp_avg"]) for key, each in expected["state"].items())


def test_gradients_are_freed_block_by_block(in_backward):
    """All gradients but those of the head, which come first, are never there at once with those of two blocks."""
    peaks = []
    for config in (AFTER, in_backward):
        step = build_step(SOURCE, replace(config, batch=1, context=2))  # activations are little beside gradients
        weights_after(step, 2)
        batch = step.next_batch()
        kept = [
            *step.module.parameters(),
            *(each for state in step.optimizer.state.values() for each in state.values()),
        ]
        peaks.append(
            step_memory(lambda phase, step=step, batch=batch: step(batch, phase=phase), step.device, kept).peak
        )
    of_a_block = sum(each.nbytes for each in step.module.blocks[0].parameters())
    assert peaks[0] - peaks[1] >= 2 * of_a_block


class Uneven(nn.Module):
    """Blocks of which one is not called, one has a frozen weight, and a weight that the first and the last share."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.blocks[3].weight = self.blocks[0].weight
        self.blocks[1].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        for index in (0, 1, 3):
            x = torch.tanh(self.blocks[index](x)) * self.scale
        return x


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, partial(torch.optim.RMSprop, momentum=0.9)])
def test_weights_that_are_shared_frozen_or_not_used(optimizer):
    found = []
    for is_in_backward in (False, True):
        torch.manual_seed(0)
        model = Uneven()
        groups = [{"params": [model.scale], "lr": 0.1}, {"params": list(model.blocks.parameters()), "lr": 0.01}]
        own = optimizer(groups)
        updates = UpdatesInBackward(model, own)
        for seed in range(3):
            loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean()
            if is_in_backward:
                with updates.on():
                    loss.backward()
            else:
                loss.backward()
                own.step()
            assert all(each.grad is None for each in model.parameters()) or not is_in_backward
            own.zero_grad()
        found.append([each.detach() for each in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())


class Noting(torch.optim.SGD):
    """Does something to each of its groups before it updates."""

    def __init__(self, parameters, note):
        super().__init__(parameters, lr=0.1)
        self.note = note
        self.param_groups[0]["in a tensor"] = torch.zeros(())

    def step(self, closure=None):
        for group in self.param_groups:
            self.note(group)
        return super().step(closure)


def counts(group):
    """Keeps how many updates there were in its groups, as schedule-free optimizers do."""
    group["k"] = group.get("k", 0) + 1


def counts_in_a_tensor(group):
    group["in a tensor"] += 1


@pytest.mark.parametrize(("note", "name"), [(counts, "k"), (counts_in_a_tensor, "in a tensor")])
def test_an_optimizer_that_counts_updates_in_its_groups_is_refused(note, name):
    model = Uneven()
    updates = UpdatesInBackward(model, Noting(model.parameters(), note))
    with pytest.raises(UnsupportedError, match=f"Noting counts '{name}' in its parameter groups"), updates.on():
        model(torch.ones(2, 8)).sum().backward()


def test_a_setting_that_is_written_anew_with_its_value_is_no_count():
    model = Uneven()
    with UpdatesInBackward(model, Noting(model.parameters(), lambda group: group.update(lr=float("0.1")))).on():
        model(torch.ones(2, 8)).sum().backward()
    assert not torch.equal(model.scale, torch.ones(8))


def test_hooks_around_the_step_would_run_for_each_block():
    model = Uneven()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="SGD has hooks around its step"):
        UpdatesInBackward(model, optimizer)
    hook.remove()
    UpdatesInBackward(model, optimizer)


def test_a_second_backward_is_refused_and_leaves_no_hook():
    model = Uneven()
    updates = UpdatesInBackward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    first, second = (model(torch.full((2, 8), value)).sum() for value in (1.0, 2.0))
    with updates.on(lambda parameters: None):
        first.backward()
        with pytest.raises(UnsupportedError, match="gradients came twice"):
            second.backward()
    assert not any(each._post_accumulate_grad_hooks for each in model.parameters())


def test_what_is_frozen_or_trained_later_is_looked_up_for_each_backward():
    model = Uneven()
    optimizer = torch.optim.SGD(list(model.blocks.parameters()), lr=0.1)
    updates = UpdatesInBackward(model, optimizer)
    model.blocks[0].bias.requires_grad_(False)
    model.blocks[1].bias.requires_grad_(True)
    optimizer.add_param_group({"params": [model.scale]})
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with updates.on():
        model(torch.ones(2, 8)).sum().backward()
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {"blocks.0.weight", "blocks.1.weight", "blocks.1.bias", "blocks.3.bias", "scale"}


def test_two_threads_as_of_two_devices_leave_the_groups_whole():
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(2))})
    optimizer, together = torch.optim.SGD(model.parameters(), lr=0.1), threading.Barrier(2)
    updates = UpdatesInBackward(model, optimizer)
    whole, inside = optimizer.param_groups, []

    def step(closure=None):
        inside.append(len(optimizer.param_groups[0]["params"]))
        time.sleep(0.05)

    optimizer.step = step

    def backward(block):
        together.wait(timeout=30)
        block(torch.ones(2, 8)).sum().backward()

    with updates.on():
        threads = [threading.Thread(target=backward, args=(block,)) for block in model["blocks"]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert inside == [2, 2]
    assert optimizer.param_groups is whole
    assert len(whole[0]["params"]) == 4


def test_the_norm_of_gradients_is_that_of_all_together(in_backward):
    def norms(config):
        step = build_step(SOURCE, config)
        return [step.accumulate([step.next_batch()], float("inf")) for _ in range(3)]

    for (loss, norm), (other_loss, other_norm) in zip(norms(AFTER), norms(in_backward), strict=True):
        assert torch.equal(loss, other_loss)
        torch.testing.assert_close(norm, other_norm)


def test_what_needs_all_gradients_at_once_is_refused(in_backward):
    step = build_step(SOURCE, in_backward)
    parts = [step.next_batch(), step.next_batch()]
    with pytest.raises(UsageError, match=r"updates in backward, .* a step in 2 parts adds them up"):
        step.accumulate(parts)
    with pytest.raises(UsageError, match=r"clipping to 1\.0 needs all"):
        step.accumulate(parts[:1], 1.0)

    def averaged(module, make_optimizer):
        return Replica(module, make_optimizer(module.parameters()), finish_gradient_synchronization=lambda: None)

    with pytest.raises(UnsupportedError, match="ranks average them before the update"):
        TrainingStep(SOURCE.build(in_backward), in_backward, averaged)


def test_the_file_says_it(tmp_path):
    path = tmp_path / "policy.json"
    Policy(update_in_backward=True).save(path)
    assert Policy.load(path) == Policy(update_in_backward=True)
    Policy().save(path)
    assert "update" not in path.read_text()
    path.write_text(json.dumps({"format": "trainstep checkpointing 1", "blocks": {}, "update_in_backward": "yes"}))
    with pytest.raises(UsageError, match="update_in_backward is 'yes': Expected `bool`, got `str`"):
        Policy.load(path)
