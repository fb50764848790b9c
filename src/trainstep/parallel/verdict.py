"""Who is to blame that a collective failed, by where every rank says that it is; words alone, without asking anyone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainstep.parallel.announced import BESIDE

UNEVEN = "Give every rank as many batches, and let all ranks make the same calls"


@dataclass(frozen=True, eq=False)
class Answer:
    """Place of a rank, by its own words or by those of its thread."""

    rank: int
    host: str
    doing: str = ""  # "update 12 of ddp"
    place: str = ""  # the innermost line of code
    calls: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Process group → number and name of the last collective that was started there, as torch counts and calls them."""
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)  # the same groups → their ranks
    is_waiting: bool = False  # in a collective, or failed in one
    waits_in: Sequence[Any] = ()  # its group, number and name: of the oldest that has not ended, else of the last
    is_beside: bool = False  # it failed in a group that threads use beside training, where checkpoints are written
    stopped: str = ""  # the error of its own by which it stopped
    has_left: bool = False  # in order

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host})"

    @property
    def at(self) -> str:
        return f"{self.place} of {self.doing}" if self.doing else self.place


def verdict(mine: Answer, answers: Mapping[int, Answer], silent: Mapping[int, str]) -> str:
    """Who is to blame that a collective of `mine` failed.

    Args:
        answers: of the ranks that answered, `mine` among them.
        silent: rank → host of the others.
    """
    told = [f"{each} stopped with {each.stopped}" for each in answers.values() if each.stopped]
    told += [f"{each} has left ({UNEVEN})" for each in answers.values() if each.has_left]
    if silent:
        who = ", ".join(f"rank {rank} (host {host})" for rank, host in silent.items())
        told.append(f"{who} {'do' if len(silent) > 1 else 'does'} not answer: killed, stopped, hung or cut off")
    if told:
        return " and ".join(told)
    if crossed := [found for each in answers.values() if (found := apart(each, mine))]:
        return crossed[0]
    behind = {each: lacking for each in answers.values() if (lacking := first_lacking(each, answers.values(), mine))}
    if mine.is_beside and behind:
        return " and ".join(f"{each} has not come to {lacking} of the checkpoint" for each, lacking in behind.items())
    if late := {each: lacking for each, lacking in behind.items() if not each.is_waiting}:
        return " and ".join(
            f"{each} hangs or is late: it is at {each.at} and has not come to {lacking}"
            for each, lacking in late.items()
        )
    if behind:
        which = ", ".join(f"{each} has not come to {lacking}" for each, lacking in behind.items())
        return f"the ranks wait for different collectives: {which}"
    return "all ranks answer and none is behind: the network between them is broken or too slow for the timeout"


def apart(one: Answer, other: Answer) -> str:
    """Say how two ranks came to collectives of one group in different orders; empty if they did not.

    Ranks run one program, so they start a group's collectives in one order, and a late rank has started fewer of all.
    """
    if not (one.waits_in and other.waits_in):
        return ""
    (*which, name), (*its_which, its_name) = one.waits_in, other.waits_in
    is_apart = which == its_which and name != its_name and one.groups[which[0]] == other.groups[which[0]]
    where = (f"{each} is in {each.waits_in[2]} no. {each.waits_in[1]} at {each.at}" for each in (one, other))
    return f"the ranks are in different collectives: {', '.join(where)}. {UNEVEN}" if is_apart else ""


def first_lacking(answer: Answer, everyone: Iterable[Answer], failed: Answer) -> str:
    """The first collective that another rank has started and this one not, though it takes part; empty if none is."""
    for other in everyone:
        for group, (number, name) in other.calls.items():
            mine = answer.calls[group][0] if group in answer.calls else 0
            takes_part = answer.rank in other.groups.get(group, ())
            if takes_part and mine < number and group.endswith(BESIDE) == failed.is_beside:
                return f"{name} no. {number}" if mine + 1 == number else f"no. {mine + 1} to {number} ({name})"
    return ""
