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


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (6, 4), (8, 8), (200, 8), (None, 1)])
def test_pages_are_locked_in_threads(monkeypatch, cores, threads):
    said = []
    monkeypatch.setattr(weights.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    weights.lock_pages_in_threads.__wrapped__()
    assert said == [f"pinned_use_cuda_host_register:True,pinned_num_register_threads:{threads}"]


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_how_the_environment_has_pages_locked_stays(monkeypatch, variable):
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", pytest.fail)
    monkeypatch.setenv(variable, "pinned_use_cuda_host_register:False")
    weights.lock_pages_in_threads.__wrapped__()


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("limit", [weights.BUFFER, 128])
def test_copies_of_a_gpus_tensors_are_page_locked(monkeypatch, limit):
    monkeypatch.setattr(weights, "BUFFER", limit)
    copies = check_copies(tensors("cuda"))
    assert all(each.is_pinned() for each in copies.values() if each.numel())
    buffers = {each.untyped_storage().data_ptr() for each in copies.values() if each.numel()}
    assert (len(buffers) == 1) == (limit == weights.BUFFER)
