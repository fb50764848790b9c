"""Agreement of all ranks on the point they are at: they gather the same groups, and send the same gradients, in one
order.

A rank that calls other blocks than the others, or calls them in another order, takes part in collectives that are not
the ones it means: of one size, they fill its weights with those of another block, and training goes on.

Over Gloo a rank says what comes next before each collective, and every rank compares: the error is there before any
byte is mixed up. Over NCCL that would make the host wait. There a rank adds up what it does in a number, the ranks
exchange their numbers in one small call at the end of a pass, over Gloo where the group has it, and compare when the
answer is there: at the next forward, at the latest at the end of the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.base.errors import UsageError

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
