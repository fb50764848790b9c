"""How gradients are laid out in the buffer they are sent in."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainstep.parallel.fsdp.group import GradientBuffer
from trainstep.parallel.fsdp.shards import ShardedParameter, cut_rows

RANKS = 4
# Rows that all ranks have alike; that leave the last ranks fewer, or none; that fill no words of 16 bytes.
SHAPES = [(8, 16), (13, 16), (9, 32), (8, 3), (2, 5), (5, 4, 4), (1, 16)]


def _buffer():
    parameters = []
    for shape in map(torch.Size, SHAPES):
        rows, padded_shape = cut_rows(shape, 0, RANKS)
        shard = nn.Parameter(torch.zeros(shape)[rows])
        parameters.append(ShardedParameter([str(shape)], [], shard, shape, padded_shape, rows))
    return GradientBuffer(parameters, SimpleNamespace(shard=SimpleNamespace(size=lambda: RANKS), replicate=None))


def _held(buffer, parameter):
    """What the ranks get of a parameter, one after another, as far as there are elements."""
    start, elements = buffer._starts[parameter], parameter.padded_shape.numel() // RANKS
    return buffer.send[:, start : start + elements].reshape(-1)[: parameter.shape.numel()].view(parameter.shape)


LAYOUTS = {
    "contiguous": torch.Tensor.clone,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "between others": lambda t: torch.stack([t, t + 1], dim=-1)[..., 0],
    "behind one element": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    "expanded": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_layout_are_in_their_places(layout, dtype):
    buffer, generator = _buffer(), torch.Generator().manual_seed(0)
    first, second = (
        {each: LAYOUTS[layout](torch.randn(each.shape, generator=generator).to(dtype)) for each in buffer.parameters}
        for _ in range(2)
    )
    for parameter, gradient in first.items():
        assert gradient.shape == parameter.shape
        buffer.add(parameter, gradient, accumulate=False)
    assert buffer.send.dtype == dtype
    for parameter, gradient in first.items():
        assert torch.equal(_held(buffer, parameter), gradient), parameter.name
    for parameter, gradient in second.items():
        buffer.add(parameter, gradient, accumulate=True)
    assert buffer.send.dtype == torch.float32
    for parameter in buffer.parameters:
        expected = first[parameter].float() + second[parameter]
        assert torch.equal(_held(buffer, parameter), expected), parameter.name


def test_a_narrow_gradient_beside_others_that_are_added_up():
    """Unused so far, it is copied where the buffer is wide already."""
    buffer = _buffer()
    used, unused = buffer.parameters[:2]
    buffer.add(used, torch.ones(used.shape).bfloat16(), accumulate=True)
    gradient = torch.randn(unused.shape).bfloat16()
    buffer.add(unused, gradient, accumulate=False)
    assert torch.equal(_held(buffer, unused), gradient.float())
    assert torch.equal(_held(buffer, used), torch.ones(used.shape))


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_gradient_takes_few_operations():
    """The host starts them for every parameter in every backward, and sets a GPU's pace."""
    buffer = _buffer()
    one, other = buffer.parameters[1], buffer.parameters[0]
    buffer.add(one, torch.randn(one.shape), accumulate=False)  # makes the buffer
    gradient = torch.randn(other.shape)
    with torch.no_grad(), _Operations() as operations:
        buffer.add(other, gradient, accumulate=False)
    called = [name for name in operations.names if name != "detach"]  # which view(dtype) does by itself
    assert sorted(called) == ["as_strided", "as_strided", "copy_", "view"]
