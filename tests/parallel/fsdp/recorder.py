"""What the schedule does in a step: gathers, waits, frees and messages, in order."""

import contextlib
from unittest import mock

from trainstep.parallel.fsdp import gradients
from trainstep.parallel.fsdp.group import GatherGroup
from trainstep.parallel.transport import by_collectives

SENT = {by_collectives: ("all_gather_slices", "all_to_all"), gradients: ("reduce_scatter_mean", "all_reduce_mean")}


class Recorder:
    """What a step does: ("gather" | "wait" | "free", group), where a wait begins a use; and what it sends."""

    def __init__(self, groups):
        self.events, self.sent, self.most_gathered = [], [], 0
        self._groups, self._patches = groups, contextlib.ExitStack()

    def __enter__(self):
        for kind in ("gather", "wait", "free"):
            self._patches.enter_context(mock.patch.object(GatherGroup, kind, self._noting(kind)))
        for module, names in SENT.items():
            for name in names:
                self._patches.enter_context(mock.patch.object(module, name, self._sending(module, name)))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def _noting(self, kind):
        original = getattr(GatherGroup, kind)

        def note(group, *arguments):
            before = group.is_gathered
            original(group, *arguments)
            if kind == "wait" or group.is_gathered != before:
                self.events.append((kind, self._groups.index(group)))
            live = sum(each.full_bytes for each in self._groups if each.is_gathered)
            self.most_gathered = max(self.most_gathered, live)

        return note

    def _sending(self, module, name):
        original = getattr(module, name)

        def send(*arguments):
            tensors = arguments[1:2] if name == "all_to_all" else arguments[0]
            self.sent.append((name, sum(tensor.nbytes for tensor in tensors)))
            return original(*arguments)

        return send

    def of(self, kind):
        return [number for what, number in self.events if what == kind]


def halves(events):
    middle = events.index(("backward", None))
    return events[:middle], events[middle + 1 :]


def recorded(sharded, loss_of):
    """A step of `loss_of(sharded)`, whose events have ("backward", None) between forward and backward."""
    with Recorder(sharded._schedule.groups) as recorder:
        loss = loss_of(sharded)
        recorder.events.append(("backward", None))
        loss.backward()
        sharded.finish_gradient_synchronization()
    sharded.zero_grad()
    return recorder
