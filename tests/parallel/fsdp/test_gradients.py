"""Where gradients wait until they are sent: in their places in a buffer, or, for copies, where backward left them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainstep.parallel.fsdp.gradients import GradientBuffer
from trainstep.parallel.fsdp.shards import ShardedParameter, cut_rows
from trainstep.parallel.transport.by_collectives import Layout

RANKS = 4
# Rows that all ranks have alike; that leave the last ranks fewer, or none; that fill no words of 16 bytes.
SHAPES = [(8, 16), (13, 16), (9, 32), (8, 3), (2, 5), (5, 4, 4), (1, 16)]


def _parameters(rank=0, ranks=RANKS):
    parameters = []
    for shape in map(torch.Size, SHAPES):
        rows, padded_shape = cut_rows(shape, rank, ranks)
        shard = nn.Parameter(torch.zeros(shape)[rows])
        parameters.append(ShardedParameter([str(shape)], [], shard, shape, padded_shape, rows))
    return parameters


def _buffer(dtype=torch.float32):
    ranks = SimpleNamespace(shard=SimpleNamespace(size=lambda: RANKS), replicate=None, replicas=1)
    return GradientBuffer(_parameters(), ranks, dtype)


def _held(buffer, parameter):
    """What the ranks get of a parameter, one after another, as far as there are elements."""
    start, elements = buffer._places[parameter][0], parameter.padded_shape.numel() // RANKS
    return buffer.packed[:, start : start + elements].reshape(-1)[: parameter.shape.numel()].view(parameter.shape)


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
    buffer, generator = _buffer(dtype), torch.Generator().manual_seed(0)
    first, second = (
        {each: LAYOUTS[layout](torch.randn(each.shape, generator=generator).to(dtype)) for each in buffer.parameters}
        for _ in range(2)
    )
    for parameter, gradient in first.items():
        assert gradient.shape == parameter.shape
        buffer.add(parameter, gradient, added_up=False)
    assert buffer.packed.dtype == dtype
    for parameter, gradient in first.items():
        assert torch.equal(_held(buffer, parameter), gradient), parameter.name
    for parameter, gradient in second.items():
        buffer.add(parameter, gradient, added_up=True)
    assert buffer.packed.dtype == torch.float32
    for parameter in buffer.parameters:
        expected = first[parameter].float() + second[parameter]
        assert torch.equal(_held(buffer, parameter), expected), parameter.name


def test_a_narrow_gradient_beside_others_that_are_added_up():
    """Unused so far, it is copied where the buffer is wide already, for all ranks send alike."""
    buffer = _buffer(torch.bfloat16)
    used, unused = buffer.parameters[:2]
    buffer.add(used, torch.ones(used.shape).bfloat16(), added_up=True)
    gradient = torch.randn(unused.shape).bfloat16()
    buffer.add(unused, gradient, added_up=False)
    assert torch.equal(_held(buffer, unused), gradient.float())
    assert torch.equal(_held(buffer, used), torch.ones(used.shape))


def _for_copies():
    buffer = _buffer(torch.bfloat16)
    buffer.connect(SimpleNamespace(packs=False, exchange_of=lambda layout: None))
    return buffer


def test_for_copies_a_gradient_stays_where_it_is():
    buffer = _for_copies()
    gradients = {each: torch.randn(each.shape).bfloat16() for each in buffer.parameters}
    with _Operations() as operations:
        for parameter, gradient in gradients.items():
            buffer.add(parameter, gradient, added_up=False)
    assert operations.names == []
    assert buffer.packed is None
    assert all(buffer._loose[each] is gradient for each, gradient in gradients.items())


def test_what_comes_a_second_time_is_added_to_what_stayed():
    """Into new memory: another parameter's gradient may share the old one's."""
    buffer = _for_copies()
    one = buffer.parameters[0]
    first, second = (torch.randn(one.shape).bfloat16() for _ in range(2))
    kept = first.clone()
    buffer.add(one, first, added_up=False)
    buffer.add(one, second, added_up=False)
    assert torch.equal(buffer._loose[one], kept + second)
    assert torch.equal(first, kept)
    assert buffer.packed is None


def test_what_stayed_is_packed_in_the_wide_dtype_when_more_is_added_up():
    buffer = _for_copies()
    first, second = ({each: torch.randn(each.shape).bfloat16() for each in buffer.parameters[:3]} for _ in range(2))
    for parameter, gradient in first.items():
        buffer.add(parameter, gradient, added_up=False)
    one = buffer.parameters[1]
    buffer.add(one, second[one], added_up=True)
    assert buffer.packed.dtype == torch.float32
    for parameter, gradient in first.items():
        expected = gradient.float() + second[one] if parameter is one else gradient.float()
        assert torch.equal(_held(buffer, parameter), expected)
    buffer.discard()
    assert buffer.packed is None
    assert not buffer._loose


@pytest.mark.parametrize("room", [10**6, 48, 7])
def test_pieces_are_every_element_once_where_its_rank_has_it(room):
    parameters = _parameters()
    sizes = [(each.shape.numel(), each.padded_shape.numel() // RANKS) for each in parameters]
    layout = Layout(*zip(*sizes, strict=True), RANKS)
    for rank in range(RANKS):
        own = [torch.full(each.shard.shape, -1.0) for each in _parameters(rank)]
        for first in range(0, layout.size, room):
            row = torch.full((room,), -1.0)
            for piece in layout.pieces(rank, first, min(first + room, layout.size)):
                gradient = torch.arange(parameters[piece.number].shape.numel(), dtype=torch.float32)
                place = slice(piece.place, piece.place + piece.elements)
                assert (row[place] == -1).all(), "no element twice"
                row[place] = gradient[piece.offset : piece.offset + piece.elements]
            for shard, start in zip(own, layout.starts, strict=True):
                low, high = max(start, first), min(start + shard.numel(), first + room)
                if low < high:
                    shard.view(-1)[low - start : high - start] = row[low - first : high - first]
        for parameter, shard in zip(parameters, own, strict=True):
            whole = torch.arange(parameter.shape.numel(), dtype=torch.float32).view(parameter.shape)
            assert torch.equal(shard, whole[cut_rows(parameter.shape, rank, RANKS)[0]])


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
    buffer.add(one, torch.randn(one.shape), added_up=False)  # makes the buffer
    gradient = torch.randn(other.shape)
    with torch.no_grad(), _Operations() as operations:
        buffer.add(other, gradient, added_up=False)
    called = [name for name in operations.names if name != "detach"]  # which view(dtype) does by itself
    assert sorted(called) == ["as_strided", "as_strided", "copy_", "view"]
