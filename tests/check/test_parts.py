"""Tensors in parts are the same tensors, whatever their shape."""

import math

import pytest
import torch

from trainstep.check import parts
from trainstep.check.gradients import Error
from trainstep.check.parts import PART, as_rows, in_parts, norm


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((5, 4), 8, [(2, 4), (2, 4), (1, 4)]),
        ((5, 4), 11, [(2, 4), (2, 4), (1, 4)]),
        ((3, 4), 3, [(1, 3), (1, 1)] * 3),
        ((2, 4), 4, [(1, 4)] * 2),
        ((2, 4), 8, [(2, 4)]),
        ((5, 4), 20, [(5, 4)]),
        ((2, 3, 4), 12, [(1, 12), (1, 12)]),
        ((2, 3, 4), 11, [(1, 11), (1, 1)] * 2),
        ((7,), 3, [(1, 3), (1, 3), (1, 1)]),
        ((1, 7), 3, [(1, 3), (1, 3), (1, 1)]),
        ((1, 2, 2), 3, [(1, 3), (1, 1)]),
        ((), 3, [(1, 1)]),
        ((0,), 3, [(1, 0)]),
        ((0, 3), 3, [(1, 0)]),
        ((3, 0), 3, [(3, 0)]),
        ((PART + 1,), PART, [(1, 2**15 - 1), (1, 1)]),
    ],
)
def test_parts_are_whole_rows_or_of_a_single_one(monkeypatch, shape, size, expected):
    monkeypatch.setattr(parts, "PART", size)
    values = drawn(*shape)
    found = [*in_parts(values, 2 * values)]
    assert [each.shape for _, (each, _) in found] == [torch.Size(each) for each in expected]
    assert torch.equal(torch.cat([each.flatten() for _, (each, _) in found]), values.flatten())
    assert all(torch.equal(other, 2 * each) for _, (each, other) in found)
    counts = torch.zeros(len(as_rows(values)), dtype=torch.int64)
    for rows, (each, _) in found:
        assert len(counts[rows]) == len(each)
        counts[rows] += each.shape[1]
    assert set(counts.tolist()) == {values.numel() // len(counts)}, "every row, whole, once"


@pytest.mark.parametrize(("one", "other"), [((4, 9), (9, 4)), ((7,), (4,)), ((4, 4), (9, 4)), ((1, 4), (4, 4))])
def test_tensors_of_other_shapes_are_refused(monkeypatch, one, other):
    monkeypatch.setattr(parts, "PART", 3)
    with pytest.raises(ValueError, match=r"shapes \(\d.* are not compared"):
        [*in_parts(drawn(*one), drawn(*other))]


@pytest.mark.parametrize("shape", [(64, 5000), (3, 100_000), (10**6,), (40, 2**15), (1, 2**16)])
def test_no_part_is_so_large_that_torch_divides_it_among_threads(shape):
    """Where other processes use the cores, threads that wait for each other take fifty times what they do."""
    sizes = [each.numel() for _, (each,) in in_parts(drawn(*shape))]
    assert sum(sizes) == math.prod(shape)
    assert 2**13 < max(sizes) < 2**15, "at::internal::GRAIN_SIZE"


@pytest.mark.parametrize("shape", [(50, 40), (20, 100), (2000,), (1, 2000), (1, 40, 50), (20, 10, 10), ()])
def test_what_is_found_in_parts_is_what_is_found_of_all(monkeypatch, shape):
    found, expected = drawn(*shape), drawn(*shape, seed=1)
    whole, size = Error.between(found, expected), norm(expected)
    monkeypatch.setattr(parts, "PART", 64)
    in_many = Error.between(found, expected)
    assert norm(expected) == pytest.approx(size, rel=1e-12) == pytest.approx(float(expected.double().norm()), rel=1e-12)
    difference = found.double() - expected.double()
    for error in (whole, in_many):
        assert error.norm == pytest.approx(float(difference.norm()), rel=1e-6)
        assert error.product == pytest.approx(float((difference * expected).sum()), rel=1e-5)
        assert error.rows.numel() == (shape[0] if len(shape) > 1 else 1)
    assert torch.allclose(in_many.rows, whole.rows, rtol=1e-6)
    assert math.hypot(*in_many.rows.tolist()) == pytest.approx(in_many.norm, rel=1e-5)


def test_what_is_no_number_is_none_in_parts(monkeypatch):
    monkeypatch.setattr(parts, "PART", 3)
    values = drawn(9)
    values[4] = math.nan
    assert math.isnan(norm(values))
    assert math.isnan(Error.between(values, drawn(9)).norm)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch finds none")
def test_on_a_gpu_all_is_one_part(monkeypatch):
    monkeypatch.setattr(parts, "PART", 3)
    found, expected = drawn(5, 4).cuda(), drawn(5, 4, seed=1).cuda()
    assert [(rows, each.shape) for rows, (each,) in in_parts(found)] == [(slice(0, 5), (5, 4))]
    assert Error.between(found, expected).norm == pytest.approx(Error.between(found.cpu(), expected).norm, rel=1e-6)
