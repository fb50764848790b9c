"""Marks on a GPU, whose streams are simulated: each has a time, which work takes further."""

from unittest import mock

import pytest
import torch

from trainstep.bench.parallel import waits
from trainstep.bench.parallel.waits import Transfers, Waits


class Stream:
    """Its time in milliseconds; `priority` and a device are taken as torch's has them."""

    def __init__(self, *_, **__):
        self.time = 0.0

    def wait_event(self, event):
        self.time = max(self.time, event.time)


class Event:
    def __init__(self, *_, **__):
        self.time = None

    def record(self, stream):
        self.time = stream.time
        return self

    def elapsed_time(self, end):
        return end.time - self.time


class Gpu:
    """The stream that computes, and one beside it."""

    def __init__(self):
        self.computing, self.side = Stream(), Stream()
        self.current = self.computing

    def current_stream(self, *_):
        return self.current

    def stream(self, stream):
        gpu = self

        class Entered:
            def __enter__(self):
                self.before, gpu.current = gpu.current, stream

            def __exit__(self, *_):
                gpu.current = self.before

        return Entered()


@pytest.fixture
def gpu():
    made = Gpu()
    with (
        mock.patch.object(torch.cuda, "Stream", Stream),
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "stream", made.stream),
        mock.patch.object(torch.cuda, "current_stream", made.current_stream),
        mock.patch.object(waits, "_WAITS", ((Stream, "wait_event"),)),
    ):
        yield made


def no_phase(name):
    return mock.MagicMock()


CUDA = torch.device("cuda", 0)


def test_waits_of_the_stream_that_computes_are_its_own_and_no_other_streams(gpu):
    found = Waits(mock.Mock(device=CUDA))

    def step(phase):
        with phase("forward"):
            gpu.side.time += 4.0
            gpu.computing.wait_event(Event().record(gpu.side))  # 4 ms
            gpu.computing.time += 10.0
            gpu.side.wait_event(Event().record(gpu.computing))  # the other way round
        with phase("backward"):
            gpu.computing.wait_event(Event().record(gpu.side))  # nothing is left to wait for
            gpu.side.time += 7.0
            gpu.computing.wait_event(Event().record(gpu.side))
        with phase("communication"):
            gpu.side.time += 9.0
            gpu.computing.wait_event(Event().record(gpu.side))  # the phase is a wait as a whole

    with found.watching():
        found.around(step)(no_phase)
    assert found.ms(1) == [{"forward": 4.0, "backward": 7.0}]


def test_calls_are_under_way_from_where_their_stream_comes_to_them_until_they_are_over(gpu):
    found, works = Transfers(CUDA), []
    for start, end in ((2.0, 5.0), (4.0, 9.0), (20.0, 21.0)):
        gpu.computing.time = start
        told = found._call_begins(CUDA)
        work = mock.Mock()
        work.wait = lambda end=end: setattr(gpu.current, "time", max(gpu.current.time, end))
        told(work)
        works.append(work)
    assert found._call_begins(torch.device("cpu")) is None, "what Gloo carries beside NCCL"
    assert found.ms() == 8.0, "2 to 9 and 20 to 21"
    assert gpu.computing.time == 20.0, "nothing but the stream beside has waited"


def test_a_call_that_tells_nobody_when_it_is_over_is_left_out_until_it_was_waited_for():
    """Gloo's reduce-scatter has no future; one that nobody waits for must not be waited for here."""
    found = Transfers(torch.device("cpu"))
    with mock.patch.object(waits, "when_over", side_effect=RuntimeError("Work::getFuture not implemented.")):
        dropped, work = mock.Mock(), mock.Mock()
        for each in (dropped, work):
            found._call_begins(torch.device("cpu"))(each)
    assert found.ms() == 0
    found._ends_waited(lambda work: None)(work)
    assert found.ms() > 0
    found._call_begins(torch.device("cpu"))
    assert found.ms() > 0, "a call without a work"
