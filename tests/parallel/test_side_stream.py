"""Work beside computation: its memory is held until it is through, and streams are known by their addresses."""

import weakref
from unittest import mock

import pytest
import torch

from trainstep.parallel.side_stream import Pending, current_stream


def test_memory_of_work_that_nobody_waited_for_is_freed_behind_it():
    event, held = mock.Mock(), []
    with mock.patch("trainstep.parallel.side_stream.current_stream") as current:
        wait = current.return_value.wait_event
        wait.side_effect = lambda _: held.append(kept() is not None)
        memory = torch.ones(3)
        kept = weakref.ref(memory)
        pending = Pending(event=event, holds=memory)
        del memory
        del pending
    wait.assert_called_once_with(event)
    assert held == [True], "it was held until then"
    assert kept() is None
    with mock.patch("trainstep.parallel.side_stream.current_stream") as current:
        pending = Pending(event=event)
        pending.wait()
        del pending
    current.return_value.wait_event.assert_called_once_with(event)


@pytest.mark.gpu
def test_the_current_stream_is_torchs():
    device, side = torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream()
    other = torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)
    for stream in (torch.cuda.default_stream(), side, other, side):
        with torch.cuda.stream(stream):
            assert current_stream() == current_stream(device) == torch.cuda.current_stream()
            assert current_stream() is current_stream(device)
