"""What a run is judged by, of all ranks together, and the memory that it took."""

import pytest
import torch
from torch import nn

from trainstep.check.gradients import Gradients
from trainstep.ladder.trial import capture
from trainstep.ladder.trial.capture import Capture, Captured, of_all_ranks, read_captured


def captured(gradient=1.0, weights="a", loss=1.0, updates=3, moved=2.0, peak=None):
    def one(value):
        return {"w": torch.tensor([value])}

    sizes, gradients = {"w": 1.0}, Gradients(loss, one(gradient))
    return Captured(gradients, weights, (loss, 2 * loss), one(moved), one(moved / 2), sizes, updates, peak)


def test_ranks_with_equal_weights_and_gradients_are_one():
    found = of_all_ranks([captured(loss=1.0, peak=2.0), captured(loss=3.0, peak=5.0)])
    assert found.gradients.loss == 2.0, "the mean over the ranks' data"
    assert found.losses == (2.0, 4.0)
    assert [list(each) for each in (found.gradients.by_name, found.moved, found.first_moved, found.sizes)] == [
        ["w"]
    ] * 4
    assert (found.weights, found.updates, found.peak_gib) == ("a a", 6, 5.0)


@pytest.mark.parametrize("other", [{"gradient": 1.5}, {"weights": "b"}, {"moved": 2.5}])
def test_what_differs_between_ranks_is_judged_on_each(other):
    found = of_all_ranks([captured(), captured(**other)])
    for each in (found.gradients.by_name, found.moved, found.first_moved, found.sizes):
        assert list(each) == ["w", "w on rank 1"]
    assert float(found.gradients.by_name["w on rank 1"]) == other.get("gradient", 1.0)


def run(folder, change=lambda model: None):
    """Take an update of a model, and a parameter beside it, as the ladder sees them."""
    torch.manual_seed(0)
    model, beside = nn.BatchNorm1d(3), nn.Parameter(torch.ones(2))
    change(model)
    optimizer, own = torch.optim.AdamW([*model.parameters(), beside]), Capture(folder)
    own.see_model(model)
    loss = model(torch.randn(4, 3)).square().sum() + beside.sum()
    own.see_loss(loss)
    loss.backward()
    own.before_optimizer(optimizer)
    optimizer.step()
    kept = list(own._kept())
    model.eval()(torch.zeros(4, 3))
    model.train()(torch.ones(4, 3))
    own.finish(1)
    return kept, [*model.parameters(), beside], [*model.buffers()], optimizer


def test_what_stays_between_steps_is_weights_buffers_gradients_and_states(tmp_path):
    kept, weights, buffers, optimizer = run(tmp_path)
    states = [each for state in optimizer.state.values() for each in state.values()]
    wanted = [*weights, *buffers, *states, *(each.grad for each in weights)]
    assert {each.data_ptr() for each in kept} == {each.data_ptr() for each in wanted}


def test_a_checksum_of_weights_sees_every_bit_of_them(tmp_path):
    found = []
    for number, value in enumerate((1.0, 1.0, 1.0 + 2**-23)):
        (folder := tmp_path / str(number)).mkdir()
        run(folder, lambda model, value=value: nn.init.constant_(model.bias[2:], value))
        found.append(read_captured(folder).weights)
    assert found[0] == found[1] != found[2]


def test_buffers_are_held_as_the_first_pass_made_them_and_as_the_run_left_them(tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "LARGEST_BUFFER", 3)
    run(tmp_path, lambda model: [model.register_buffer(f"b{size}", torch.zeros(size)) for size in (3, 4)])
    shown = read_captured(tmp_path).shown
    counts = {name: (int(shown.before[name]), int(each)) for name, each in shown.after.items() if "num" in name}
    assert counts == {
        f"num_batches_tracked {when}": (0, n) for n, when in enumerate(("in the first update", "at the end"), 1)
    }
    assert shown.unchanged == {"b3 in the first update", "b3 at the end"}, "as large as is looked at"
