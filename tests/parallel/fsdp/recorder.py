"""What the schedule does in a step: gathers, waits, frees and messages, in order."""

import functools

from trainstep.parallel.fsdp import gradients
from trainstep.parallel.fsdp.group import GatherGroup
from trainstep.parallel.transport import by_collectives


class Recorder:
    """What a step does: ("gather" | "wait" | "free", group), where a wait begins a use; and what it sends."""

    def __init__(self, groups):
        self.events = []
        self.sent = []
        self.most_gathered = 0
        self._groups = groups
        self._undo = []

    def __enter__(self):
        numbers = {group: number for number, group in enumerate(self._groups)}

        def note(kind, original, group, *arguments):
            before = group.is_gathered
            original(group, *arguments)
            if kind == "wait" or group.is_gathered != before:
                self.events.append((kind, numbers[group]))
            live = [g for g in self._groups if g.is_gathered]
            self.most_gathered = max(self.most_gathered, sum(g.full_bytes for g in live))

        for kind in ("gather", "wait", "free"):
            original = getattr(GatherGroup, kind)
            wrapped = functools.partialmethod(_bound(note, kind, original))
            self._replace(GatherGroup, kind, wrapped)
        for module, name in (
            (by_collectives, "all_gather_slices"),
            (gradients, "reduce_scatter_mean"),
            (gradients, "all_reduce_mean"),
        ):
            self._replace(module, name, functools.partial(self._send_list, name, getattr(module, name)))
        self._replace(by_collectives, "all_to_all", functools.partial(self._send_one, by_collectives.all_to_all))
        return self

    def __exit__(self, *_):
        for owner, name, original in self._undo:
            setattr(owner, name, original)

    def _replace(self, owner, name, replacement):
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)

    def _send_list(self, name, original, tensors, group, *slices):
        self.sent.append((name, sum(tensor.nbytes for tensor in tensors)))
        return original(tensors, group, *slices)

    def _send_one(self, original, receive, send, group):
        self.sent.append(("all_to_all", send.nbytes))
        return original(receive, send, group)

    def of(self, kind):
        return [number for what, number in self.events if what == kind]


def _bound(note, kind, original):
    def method(group, *arguments):
        note(kind, original, group, *arguments)

    return method


def halves(events):
    middle = events.index(("backward", None))
    return events[:middle], events[middle + 1 :]
