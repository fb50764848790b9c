import pytest
import torch

from trainstep import weights
from trainstep.weights import copied_to_host

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
