"""Schedule of gathers, of freeing, and of sending gradients; `boundary` says when calls begin and end.

The order in which calls need groups is recorded in every pass (a forward of the wrapper and what follows it), and
predicts the next pass. A group is gathered when the call `prefetch` calls before it begins, or at its own call if that
was not foreseen. Backward runs the recorded order in reverse. The last groups of forward are the first of backward: as
many as backward would gather ahead are kept between the two.

Every decision follows from the order of calls and from which tensors require gradients, so all ranks issue the same
collectives in the same order as long as they call the same modules.

The module has its full parameters while a call that owns them is running, and in backward. At other times it has
placeholders: a read of one gathers the group and *holds* it until gradients have been synchronised.

`Agreement` finds ranks that call other blocks, or in another order: of one size, gathers would fill a rank's weights
with those of another block, and training would go on. Over Gloo each rank says what comes next before each collective,
and all compare. Over NCCL that would make the host wait. There a rank adds up its calls in a number, the ranks exchange
their numbers in one small call at the end of a pass, and they compare at the latest at the end of the next pass.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.base.errors import UsageError
from trainstep.parallel.collectives import weak_hook
from trainstep.parallel.fsdp.gradients import ReplicatedGradients, Sending
from trainstep.parallel.fsdp.group import GatherGroup
from trainstep.parallel.fsdp.shards import ShardedParameter
from trainstep.parallel.gloo import host_waits
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.side_stream import SideStream
from trainstep.parallel.units import in_backward


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
    node: weakref.ref[Any] | None = None  # of autograd, by which backward is seen leaving it
    backward: int = -1  # the last one that reached it, by autograd's number

    @property
    def is_ahead(self) -> bool:
        """True if the backward that is running leaves it. That the call is alive says nothing: a rank may keep an
        evaluation's loss, or an error's traceback with activations that were computed again."""
        node = self.node() if self.node is not None else None
        return node is not None and torch._C._will_engine_execute_node(node)

    def concerns(self, other: Call) -> bool:
        """True if the backward that is running has reached it, or it was made in the same pass."""
        reached = self.backward == torch._C._current_graph_task_id()
        return reached or self.recorded_in is other.recorded_in is not None

    def is_after(self, other: Call) -> bool:
        """True if it began after the other, in the same pass: then autograd is through with it before that one."""
        return self.recorded_in is other.recorded_in is not None and min(self.positions) > max(other.positions)


ADVICE = (
    "Every rank must call the same blocks in the same order in every pass, and then backward: choose between experts "
    "inside of a block, or call a block on all ranks and add its output times 0 where it is not wanted"
)


class Agreement:
    """Agreement of one wrapper's ranks.

    Args:
        names: of the groups, for errors.
        at_once: compare before each collective; otherwise once per pass.
    """

    def __init__(self, process_group: dist.ProcessGroup, names: Sequence[str], *, at_once: bool) -> None:
        self._process_group, self._names, self._at_once = process_group, names, at_once
        self._alone = process_group.size() == 1
        self._digest = 0
        self._answer: tuple[dist.Work | torch.cuda.Event, Tensor] | None = None

    def announce(self, act: str, group: int = -1) -> None:
        """This rank comes to a collective: `act` ("gather") of the group of this number, -1 for none.

        Raises:
            UsageError: another rank comes to another one; on every rank.
        """
        if self._alone:
            return
        if not self._at_once:
            self._digest = hash((self._digest, _ACTS.index(act), group))
            return
        mine = torch.tensor([_ACTS.index(act), group])
        everyone = mine.new_empty(self._process_group.size(), 2)
        self._process_group._allgather_base(everyone.view(-1), mine).wait()
        told: list[list[int]] = everyone.tolist()
        if any(one != told[0] for one in told):
            where = [f"rank {rank} comes to {self._words(*one)}" for rank, one in enumerate(told)]
            raise UsageError(f"the ranks are not at the same point: {', '.join(where)}. {ADVICE}")

    def end_pass(self) -> None:
        """All collectives of a pass were started: exchange the numbers, and look at those of the pass before."""
        if self._alone or self._at_once:
            return
        self.compare(wait=True)
        on_host = "cpu" in dist.get_backend_config(self._process_group)
        mine = torch.full((1,), self._digest, device="cpu" if on_host else "cuda")  # no copy that the host waits for
        everyone = mine.new_empty(self._process_group.size())
        work = self._process_group._allgather_base(everyone, mine)
        self._digest = 0
        if on_host:
            self._answer = work, everyone
            return
        work.wait()  # the stream waits, not the host
        pinned = torch.empty(everyone.shape, dtype=everyone.dtype, pin_memory=True)
        pinned.copy_(everyone, non_blocking=True)
        self._answer = torch.cuda.current_stream().record_event(), pinned

    def compare(self, *, wait: bool = False) -> None:
        """Compare the numbers of the last pass if they are there; `wait`: until they are.

        Raises:
            UsageError: they differ; on every rank.
        """
        if self._answer is None:
            return
        work, everyone = self._answer
        there = work.query() if isinstance(work, torch.cuda.Event) else work.is_completed()
        if not (there or wait):
            return
        if isinstance(work, torch.cuda.Event):
            work.synchronize()
        else:
            work.wait()
        self._answer = None
        if len(set(everyone.tolist())) > 1:
            raise UsageError(
                "in the last pass the ranks did not gather the same groups of parameters in the same order, so what "
                f"they computed is wrong, and so are the weights if the optimizer has stepped since. {ADVICE}"
            )

    def _words(self, act: int, group: int) -> str:
        words = _WORDS[_ACTS[act]]
        return f"{words} {self._names[group]}" if group >= 0 else words


_WORDS = {
    "gather": "gather",
    "send": "send the gradients of",
    "finish": "finish_gradient_synchronization()",
    "clip": "clip_grad_norm_()",
    "gather all": "gather_full_parameters()",
    "fill": "fill a parameter with random numbers",
}
_ACTS = tuple(_WORDS)


class Schedule:
    """Actions at the calls of units and at their parameters' gradients. Gathers run `prefetch` uses ahead."""

    def __init__(self, groups: Sequence[GatherGroup], ranks: Ranks, prefetch: int, device: torch.device) -> None:
        self.groups = groups
        self.synchronise = True
        self.added_up = False  # whether `synchronise` was off since gradients were last complete
        self.passes_running = 0  # forwards of the wrapper
        self.hooked: set[str] = set()  # names of parameters whose hooks are called when gradients are complete
        names = [group.name for group in groups]
        self.agreement = Agreement(ranks.everyone, names, at_once=host_waits(ranks.everyone, device))
        self._numbers = {group: number for number, group in enumerate(groups)}
        self._held: dict[GatherGroup, None] = {}  # by something outside of calls
        self._held_for_backward: set[GatherGroup] = set()
        self._awaits_backward = False  # whether there was a forward with gradients since then
        self._prefetch, self._device = prefetch, device
        self._gathers, self._reductions, self._between = (SideStream(device) for _ in range(3))
        self._recorded: dict[bool, Uses] = {}  # by whether gradients were enabled
        self._with_gradients = False
        self._pass = Pass(None)
        self._expected: list[GatherGroup] = []  # stay gathered after a call, for one that follows
        self._reached: set[GatherGroup] = set()  # by the backward that is running
        self._passing: dict[GatherGroup, None] = {}  # of those, in its order, the ones it is not seen leaving
        self._accumulates: dict[int, bool] = {}  # whether backwards, by number, bring parameters gradients
        self._under_way: deque[list[Sending]] = deque()  # of each group that was sent
        averaged = any(buffer.is_averaged for group in groups for buffer in group.buffers)
        self._at_once = 2 if averaged else 1  # one on its way within replicas, one between them
        self._undecided: list[tuple[ShardedParameter, Tensor]] = []
        self.used: set[ShardedParameter] = set()
        self.members = [(group, parameter) for group in groups for parameter in group.parameters]
        self._replicated = ReplicatedGradients([parameter for _, parameter in self.members], ranks.everyone)
        for number, (_, parameter) in enumerate(self.members):
            if parameter.trainable:
                assert parameter.full is not None
                parameter.full.register_post_accumulate_grad_hook(weak_hook(self, Schedule._on_gradient, number))

    @property
    def is_complete(self) -> bool:
        """True if no gradient has come since gradients were last synchronised."""
        return not self.used

    def check_complete(self, before: str) -> None:
        """See that gradients are complete before something that needs them.

        Raises:
            UsageError: some came and were not synchronised.
        """
        if not self.is_complete:
            raise UsageError(
                f"{before} before gradients were synchronised over the ranks; call finish_gradient_synchronization() "
                "of FullyShardedDataParallel first, after the last backward"
            )

    @property
    def may_read(self) -> bool:
        """True if parameters that are not gathered may be, for a read outside of calls: all ranks are in forward or
        backward."""
        return self.passes_running > 0 or in_backward()

    def begin_pass(self) -> None:
        """The wrapper's forward begins: shards may have changed, so nothing gathered before is used again."""
        if in_backward():
            return  # the forward is being computed again
        if self.hooked and torch.is_grad_enabled() and not self.added_up:
            self.check_complete("forward")  # its hooks would never be called
        self.agreement.compare()
        self._forget_backward()  # one that raised
        held = [group for group in self._held if group in self._held_for_backward]
        self._free_all()
        for group in held:  # an earlier forward's graph may need it
            self.hold(group)
        if self._pass.uses:
            self._recorded[self._with_gradients] = self._pass.uses
        self._with_gradients = torch.is_grad_enabled()
        self._awaits_backward |= self._with_gradients
        self._pass = Pass(self._recorded.get(self._with_gradients))

    def end_forward(self) -> None:
        """The wrapper's forward has ended, or raised: what was gathered for a call that did not come is freed, unless
        one that follows forward is expected to need it."""
        self.passes_running -= 1
        if self.passes_running == 0 and not in_backward():
            self._expected.clear()
            kept = self._pass.end_forward(self._prefetch)
            kept += [self._pass.uses.groups[position] for position in self._pass.with_backward]
            for group in self.groups:
                if group.users == 0 and group not in kept:
                    group.free()

    def enter(self, groups: Sequence[GatherGroup]) -> Call:
        """A call of a unit begins: gather what it needs, and what the calls after it will."""
        again = in_backward()
        positions = [] if again else list(map(self._pass.record, groups))
        call = Call(groups, None if again else self._pass, positions, [group.version for group in groups])
        upcoming = list(self._upcoming(call))
        if not again:
            self._free_expected(groups, upcoming)
            for group in groups if self.passes_running == 0 else ():
                if group.users == 0 and group.is_stale:
                    group.free()
        self.gather(groups, upcoming)
        for group in groups:
            group.users += 1
        return call

    def gather(self, groups: Sequence[GatherGroup], ahead: Iterable[GatherGroup] = ()) -> None:
        """Gather groups, and start with those that are needed next."""
        for group in (*groups, *ahead):
            if not group.is_gathered:
                if group.communicates:
                    self.agreement.announce("gather", self._numbers[group])
                group.gather(self._gathers)
        for group in groups:
            group.wait()

    def hold(self, group: GatherGroup) -> None:
        """Gather a group for something outside of its units' calls, and keep it until gradients are synchronised."""
        self.gather([group])
        if torch.is_grad_enabled():
            self._held_for_backward.add(group)
        if group not in self._held:
            self._held[group] = None
            group.users += 1

    def leave(self, call: Call, *, needs_backward: bool) -> None:
        """The call has ended: free its groups, unless backward needs them first of all or has begun."""
        self.abandon(call)
        if call.recorded_in is None:
            return
        predicted = call.recorded_in.predicted
        for group, position in zip(call.groups, call.positions, strict=True):
            if needs_backward:
                call.recorded_in.with_backward.add(position)
            among_last = predicted is not None and position >= len(predicted) - 1 - self._prefetch
            if needs_backward and call.node is None:
                group.unwatched.add(call)
            if group.users > 0:
                continue
            if self.passes_running and call.recorded_in.expects(group, max(call.positions), 1 + self._prefetch):
                group.hide()  # who reads it in between is to be noticed
                self._expected.append(group)
                continue
            if among_last and needs_backward:
                group.hide()
            else:
                group.free()

    def abandon(self, call: Call) -> None:
        """The call raised; what is gathered is freed when the next pass begins, or with the rest of backward."""
        for group in call.groups:
            group.users -= 1

    def before_backward(self, call: Call) -> None:
        """Backward reaches the call's outputs: gather what it needs, and what the calls before it will."""
        for group, version in zip(call.groups, call.versions, strict=True):
            self._reach(group)
            if group.version != version:
                raise UsageError(
                    f"the weights of {group.name} were changed between forward and backward, by an optimizer's step, "
                    "load_state_dict() or by hand, so the gradients would be of neither; change them after backward"
                )
        self._settle_passed(call)
        self.gather(call.groups, self._preceding(call))
        if call.backward != (number := torch._C._current_graph_task_id()):  # not left yet, also where it was before
            call.backward = number
            if call.node is None:
                self._passing |= dict.fromkeys(call.groups)
            for group in call.groups:
                (group.unwatched if call.node is None else group.awaiting).add(call)
        if torch.is_grad_enabled():  # create_graph: the gradients' own graph needs the weights later on
            for group in call.groups:
                self.hold(group)

    def after_backward(self, call: Call) -> None:
        """Backward has left the call.

        Where it had not come through the output, frozen weights may have been read before they were there.
        """
        if call.backward != torch._C._current_graph_task_id():
            for group in call.groups:
                if group.has_frozen and group.is_gathered and not group.is_ready:
                    raise UsageError(_not_entered(group.name))
        for group in call.groups:
            group.awaiting.discard(call)
            if not self._is_awaited(group) and not any(each.concerns(call) for each in group.unwatched):
                self._settle(group)

    def finish(self) -> None:
        """Send what has not been sent, and wait until every shard has its gradient (on a GPU, the stream waits)."""
        if not self.used:
            if self._awaits_backward:
                raise UsageError(
                    "no gradient came since the last step; call backward(), on a loss made from this wrapper's output, "
                    "before finish_gradient_synchronization()"
                )
            return
        self.agreement.announce("finish")
        for group in reversed(self.groups):
            self._send(group)
        self._complete()
        used = set(self._replicated.reduce(self.used, self._device))
        for parameter, gradient in self._undecided:
            if parameter in used:
                parameter.attach_gradient(gradient)
        self._start_over()
        self.agreement.end_pass()
        if self.hooked:
            with torch.no_grad():
                for _, parameter in reversed(self.members):  # about as backward comes to them
                    if parameter.name in self.hooked and parameter in used:
                        parameter.run_hooks()

    def discard(self) -> None:
        self._complete()
        for group in self.groups:
            group.is_unsent = False
            for buffer in group.buffers:
                buffer.discard()
        self._replicated.discard()
        self._start_over()

    def _start_over(self) -> None:
        """No gradient has come, and what backward needed is not needed any more."""
        self._undecided = []
        self.used.clear()
        self._forget_backward()
        self._awaits_backward, self.added_up = False, not self.synchronise
        for group in self.groups:
            group.unwatched.clear()
        self._free_all()

    def _free_expected(self, called: Sequence[GatherGroup], upcoming: Sequence[GatherGroup]) -> None:
        """Free the groups that a call was expected to need, unless this one does, or one of the next still may."""
        expected, self._expected = self._expected, [each for each in self._expected if each in upcoming]
        for group in expected:
            if group not in called and group not in upcoming and group.users == 0:
                group.free()

    def _upcoming(self, call: Call) -> Iterator[GatherGroup]:
        if self.passes_running and call.recorded_in is not None and call.recorded_in.predicted is not None:
            first = max(call.positions) + 1
            yield from call.recorded_in.predicted.groups[first : first + self._prefetch]

    def _preceding(self, call: Call) -> Iterator[GatherGroup]:
        if call.recorded_in is not None:
            last = min(call.positions)
            for position in reversed(range(max(0, last - self._prefetch), last)):
                if position in call.recorded_in.with_backward:
                    yield call.recorded_in.uses.groups[position]

    def _on_gradient(self, number: int) -> None:
        group, parameter = self.members[number]
        if not group.is_ready:
            raise UsageError(_not_entered(parameter.name))
        self._reach(group)
        group.is_unsent = True
        self.used.add(parameter)
        replicated = group.take_gradient(parameter, added_up=self.added_up)
        if replicated is not None:
            self._replicated.add(parameter, replicated)

    def _reach(self, group: GatherGroup) -> None:
        """Backward has come to a group, which is sent whether or not it has gradients on this rank: with experts in a
        block, that differs between ranks. A backward that gives no parameter a gradient (autograd.grad) sends nothing.
        """
        if not self._reached:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._reached.add(group)
        number = torch._C._current_graph_task_id()
        if number not in self._accumulates:
            self._accumulates[number] = any(parameter.is_accumulated for _, parameter in self.members)
        group.is_unsent |= self._accumulates[number]

    def _settle_passed(self, call: Call) -> None:
        """Backward has come to a call, and so is through with those that began after it, seen or not."""
        for group in list(self._passing):
            is_behind = all(each.is_after(call) for each in group.unwatched if each.concerns(call))
            if is_behind and not self._is_awaited(group) and not group.has_frozen and group not in call.groups:
                del self._passing[group]
                self._settle(group)

    def _is_awaited(self, group: GatherGroup) -> bool:
        """True if the backward that is running is still to leave a call of the group, or something holds it."""
        return group in self._held or any(call.is_ahead for call in group.awaiting)

    def _end_backward(self) -> None:
        """Settle the groups that backward was not seen leaving. Of backwards inside of one another, the outer ends."""
        reached = self._reached
        self._forget_backward()
        for group in reversed(self.groups):
            if group in reached:
                self._settle(group)

    def _forget_backward(self) -> None:
        self._reached, self._passing, self._accumulates = set(), {}, {}

    def _settle(self, group: GatherGroup) -> None:
        """All of a group's calls are behind us in backward, or backward has ended: free it, and send its gradients.

        A frozen weight has no gradient to tell that backward is through with it: where backward is not seen leaving a
        call either, as with a cache among its inputs, the group stays until gradients are synchronised.
        """
        is_read = group.has_frozen and any(call.backward >= 0 for call in group.unwatched)
        if group.users == 0 and not is_read:
            group.unwatched.clear()
            group.free()
        if self.synchronise:
            self._send(group)

    def _send(self, group: GatherGroup) -> None:
        """Send a group's gradients. Of those sent before, none is still on its way within the replica, and one group's
        shards at most are on their way between replicas; so two groups' gradients are alive at most."""
        if group.is_unsent and group.buffers:
            group.is_unsent = False
            self.agreement.announce("send", self._numbers[group])
            self._complete(self._at_once - 1)
            for sending in chain.from_iterable(self._under_way):
                sending.go_on()
            how = {"added_up": self.added_up}
            self._under_way.append([each.launch(self._reductions, self._between, **how) for each in group.buffers])

    def _complete(self, but: int = 0) -> None:
        """Complete all that were sent, `but` the last ones."""
        while len(self._under_way) > but:
            for sending in self._under_way.popleft():
                self._undecided += sending.complete()

    def _free_all(self) -> None:
        self._expected.clear()
        self._held.clear()
        self._held_for_backward.clear()
        for group in self.groups:
            group.users = 0
            group.free()


def _not_entered(name: str) -> str:
    return (
        f"backward came to {name} and had not gone through the output of the module that owns it, so its values were "
        "not there. A tensor that a module leaves elsewhere (in a closure, a global list, by a hook) cannot be "
        "differentiated: return it, or keep it in an attribute of the module"
    )
