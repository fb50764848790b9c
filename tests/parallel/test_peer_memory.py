"""A list of copies does what they do one by one, wherever its tensors' memory has gone to in between."""

import ctypes
from functools import partial
from unittest import mock

import pytest
import torch

from trainstep.parallel.transport import peer_memory
from trainstep.parallel.transport.peer_memory import Copies, PieceCopies, _batch_call

SIZES = (1, 256, 4099, 2**20)


def _copied_twice(device):
    """What two starts of one list make of its targets, whose storage is freed in between, and what they should be."""
    storage = torch.empty(sum(SIZES), dtype=torch.uint8, device=device)
    targets, sources = storage.split(SIZES), [torch.empty(size, dtype=torch.uint8, device=device) for size in SIZES]
    both, found = Copies(targets, sources), []
    memory, room = storage.untyped_storage(), storage.nbytes
    for call in range(2):
        memory.resize_(0)
        taken = [torch.empty(room, dtype=torch.uint8, device=device) for _ in range(1 + call)]  # what was free before
        memory.resize_(room)
        storage.fill_(99)
        for number, source in enumerate(sources):
            source.random_(generator=torch.Generator(device).manual_seed(10 * call + number))
        wanted = torch.cat(sources).clone()
        both.start()
        for source in sources:
            source.zero_()  # after the copies, in the stream's order
        found.append((storage.clone(), wanted))
        del taken
    return found


def _assert_copied(found):
    assert not torch.equal(found[0][1], found[1][1])
    for storage, wanted in found:
        assert torch.equal(storage, wanted)


def test_copies_reach_storage_that_was_freed_in_between():
    _assert_copied(_copied_twice(torch.device("cpu")))


def _pieces_of_others(device, back=False):
    """What pieces of two tensors, others each time, make of a row, or with `back` its places of them, and what they
    should be."""
    row = torch.zeros(64, dtype=torch.bfloat16, device=device)
    pieces, places = [(0, 0), (1, 30), (0, 17)], [(0, 17), (20, 10), (40, 3)]
    both, found = PieceCopies(pieces, [row[first : first + size] for first, size in places]), []
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        tensors = [torch.randn(5, 8, generator=generator).bfloat16() for _ in range(2)]
        there = [each.to(device) for each in tensors]
        wanted = torch.zeros(64, dtype=torch.bfloat16)
        if back:
            wanted = torch.randn(64, generator=generator).bfloat16()
            row.copy_(wanted)
        for (number, begin), (first, size) in zip(pieces, places, strict=True):
            piece, place = tensors[number].view(-1)[begin : begin + size], wanted[first : first + size]
            (piece if back else place).copy_(place if back else piece)
        if back:
            both.fill_pieces(there)
            found.append((torch.cat(there).cpu(), torch.cat(tensors)))
        else:
            both.fill_places(there)
            found.append((row.clone().cpu(), wanted))
    return found


def test_pieces_are_those_of_the_tensors_that_are_given():
    _assert_copied(_pieces_of_others(torch.device("cpu")))
    _assert_copied(_pieces_of_others(torch.device("cpu"), back=True))


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [2, 0])
@pytest.mark.parametrize("twice", [_copied_twice, _pieces_of_others, partial(_pieces_of_others, back=True)])
def test_a_gpu_gets_them_in_one_call_but_on_its_default_stream(twice, calls):
    assert _batch_call() is not None, "a driver of CUDA 12.8 or later"
    stream = torch.cuda.Stream() if calls else torch.cuda.default_stream()
    with mock.patch.object(peer_memory, "_batch_call", return_value=mock.Mock(side_effect=_batch_call())) as made:
        with torch.cuda.stream(stream):
            found = twice(torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
    assert made.return_value.call_count == calls
    _assert_copied(found)


def test_a_refusal_of_the_driver_is_an_error():
    def refuses(*_):
        return 1

    _batch_call.cache_clear()
    with mock.patch.object(ctypes, "CDLL", return_value=mock.Mock(cuMemcpyBatchAsync=refuses)):
        call = _batch_call()
    _batch_call.cache_clear()
    with pytest.raises(RuntimeError, match="refused 3 copies between GPUs, error 1"):
        call(None, None, None, 3, 7)


def test_a_driver_without_the_call_is_known():
    _batch_call.cache_clear()
    with mock.patch.object(ctypes, "CDLL", return_value=mock.Mock(spec=[])):
        assert _batch_call() is None
    _batch_call.cache_clear()
