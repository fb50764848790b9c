"""The calls of a pass: what groups they need, in which order, and whether backward comes through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainstep.parallel.fsdp.group import GatherGroup


@dataclass(eq=False)
class Uses:
    """The groups that calls needed, in order, each by one call, or by several in a row."""

    groups: list[GatherGroup] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # how many in a row
    in_forward: int = -1  # how many the wrapper's forward had needed when it ended

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(eq=False)
class Pass:
    """The groups that calls needed since the wrapper's forward began."""

    predicted: Uses | None  # what they needed in the pass before; None once it turns out otherwise
    uses: Uses = field(default_factory=Uses)
    with_backward: set[int] = field(default_factory=set)  # positions of the uses that backward comes through

    def record(self, group: GatherGroup) -> int:
        """Note that a call needs a group; the position of this use."""
        position = len(self.uses)
        if self.uses and self.uses.groups[-1] is group:
            self.uses.calls[-1] += 1
            return position - 1
        predicted = self.predicted
        if predicted is not None and (position >= len(predicted) or predicted.groups[position] is not group):
            self.predicted = None
        self.uses.groups.append(group)
        self.uses.calls.append(1)
        return position

    def end_forward(self, within: int) -> list[GatherGroup]:
        """The wrapper's forward has ended: the next groups, as many as `within`, if calls after it are expected to need
        some, such as those of a head that the loss calls."""
        self.uses.in_forward = ended = len(self.uses)
        is_expected = self.predicted is not None and self.predicted.in_forward == ended
        return self.predicted.groups[ended : ended + within] if self.predicted and is_expected else []

    def expects(self, group: GatherGroup, last: int, within: int) -> bool:
        """True if the group is expected to be needed within so many uses, `last` being the last of the call before."""
        if self.predicted is None or last < len(self.uses) - 1:
            return False
        following = last if self.uses.calls[last] < self.predicted.calls[last] else last + 1
        return group in self.predicted.groups[following : following + within]


@dataclass(eq=False)
class Call:
    """A call of a unit, which needs groups; of each the position of its use, and how often its shards had changed."""

    groups: Sequence[GatherGroup]
    recorded_in: Pass | None  # None for a call during backward, which computes activations again
    positions: list[int]
    versions: Sequence[int]
    is_watched: bool = False  # whether backward is seen leaving it
    backward: int = -1  # the last one that reached it, by autograd's number

    def is_after(self, other: Call) -> bool:
        """True if it began after the other, in the same pass: then autograd is through with it before that one."""
        return self.recorded_in is other.recorded_in is not None and min(self.positions) > max(other.positions)
