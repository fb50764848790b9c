import pytest
import torch

from trainstep.step import weights
from trainstep.step.weights import copied_to_host, load, tensors_of

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="copies of a GPU's tensors are what is looked at")


def tensors(device="cpu"):
    torch.manual_seed(0)
    return {
        "head": torch.randn(7, 3, device=device),
        "step": torch.tensor(4, device=device),
        "norm": torch.randn(5, device=device, dtype=torch.bfloat16),
        "mask": torch.rand(3, 3, device=device) > 0.5,
        "none": torch.empty(0, 2, device=device),
        "turned": torch.randn(4, 6, device=device, dtype=torch.float64).T,
    }


def check_copies(given):
    before = {name: each.cpu().clone() for name, each in given.items()}
    copies = copied_to_host(given)
    for each in given.values():
        each.zero_()
    assert list(copies) == list(given)
    for name, copy in copies.items():
        assert copy.device.type == "cpu"
        assert copy.dtype == before[name].dtype
        assert torch.equal(copy, before[name])
    return copies


def test_copies_have_the_names_types_and_values_and_share_nothing():
    check_copies(tensors())


def test_a_parameters_copy_takes_no_gradient():
    assert not copied_to_host({"weight": torch.nn.Parameter(torch.ones(2))})["weight"].requires_grad


@pytest.mark.parametrize(("limit", "expected"), [(10**6, [["a", "b", "c"]]), (64, [["a"], ["b"], ["c"]])])
def test_tensors_share_a_buffer_up_to_its_size(monkeypatch, limit, expected):
    monkeypatch.setattr(weights, "BUFFER", limit)
    given = {name: torch.empty(size) for name, size in {"a": 1, "b": 100, "c": 16}.items()}
    assert list(weights._shared(given)) == expected


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(("limit", "is_shared"), [(weights.BUFFER, True), (128, False)])
def test_copies_of_a_gpus_tensors_are_page_locked(monkeypatch, limit, is_shared):
    monkeypatch.setattr(weights, "BUFFER", limit)
    copies = check_copies(tensors("cuda"))
    assert all(each.is_pinned() for each in copies.values() if each.numel())
    buffers = {each.untyped_storage().data_ptr() for each in copies.values() if each.numel()}
    assert (len(buffers) == 1) is is_shared


class Caching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("cache", torch.zeros(0, 3))
        self.register_buffer("mask", None)

    def forward(self, x):
        self.cache = torch.cat([self.cache, x])
        self.mask = torch.ones(3) if self.mask is None else self.mask
        return self.norm(x) * self.mask


def test_buffers_are_put_back_whatever_forward_made_of_them():
    """The cache has grown, and the mask was not there."""
    module = torch.nn.Sequential(Caching())
    state = copied_to_host(tensors_of(module))
    mean = module[0].norm.running_mean
    module(torch.randn(4, 3))
    load(module, state)
    assert module[0].norm.running_mean is mean, "in place"
    found = tensors_of(module)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert torch.equal(found.pop("0.mask"), torch.ones(3))
    assert found.keys() == state.keys()
    module(torch.randn(4, 3))
    assert not state["0.cache"].numel(), "it is a copy"
