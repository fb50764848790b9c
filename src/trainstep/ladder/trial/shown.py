"""Quantities that a run shows beside gradients, losses and trained weights: outputs in evaluation, the mode of each
model's call, and copies of the trained weights that no optimizer updates, such as moving averages.

An output is kept as evenly spaced elements, and a copy of the weights as it is when the run ends. Such a copy may be a
module, a dict or a list; it is known by the shapes of a model's trained weights, in their order.
"""

from __future__ import annotations

import gc
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.check.buffers import Buffers
from trainstep.observe.modules import is_module
from trainstep.step.batches import tensors_of

MOST_CALLS, MOST_ELEMENTS = 64, 2**14
"""Calls in evaluation whose outputs are kept, and elements of each output; of further calls the mode alone is."""
CONTAINERS = (dict, OrderedDict, list)
MOST_ENTRIES = 2**16
"""Entries of the largest container that is looked into."""
Initial = Mapping[str, tuple[Tensor, Tensor]]


class Shown:
    """Collects them in the script's process."""

    def __init__(self) -> None:
        self._modes: list[str] = []
        self._outputs: dict[str, Tensor] = {}
        self._kept = 0
        self._owners: list[Any] = []

    @property
    def modes(self) -> str:
        """Modes of the calls that were seen, in their order: `2 in training, 1 in evaluation`."""
        return ", ".join(f"{len(list(alike))} in {mode}" for mode, alike in itertools.groupby(self._modes))

    @property
    def is_full(self) -> bool:
        """True if outputs of further calls in evaluation are not kept."""
        return self._kept == MOST_CALLS

    def see_call(self, module: nn.Module, results: Any) -> None:
        """The outermost call of a module is over. Blocks that backward computes again are no such calls."""
        if torch._C._current_graph_task_id() >= 0 or next(module.parameters(), None) is None:
            return
        mode = "training" if module.training else "evaluation"
        self._modes.append(mode if torch.is_grad_enabled() else f"{mode} without gradients")
        if self._modes[-1] == "training" or self.is_full:
            return
        self._kept += 1
        floats = [each.detach() for each in tensors_of(results) if each.is_floating_point()]
        for number, each in enumerate(floats, 1):
            flat = each.reshape(-1)
            some = flat[:: max(1, -(-flat.numel() // MOST_ELEMENTS))]
            self._outputs[f"output {number} of evaluation call {self._kept}"] = some.to("cpu", copy=True)

    def hold(self, roots: Sequence[nn.Module], initial: Initial, own: Iterable[Tensor]) -> None:
        """Hold the copies that there are, and their owners, which may replace them: a script's last frame may be gone
        when the run ends. Arguments as in `found`."""
        for container, _ in _copies(roots, initial, own):
            owners = [each for each in gc.get_referrers(container) if type(each) not in (list, tuple, FrameType)]
            self._owners += owners or [container]

    def found(self, roots: Sequence[nn.Module], initial: Initial, own: Iterable[Tensor]) -> Buffers:
        """Return outputs and copies, beside zeros and the weights that training began with.

        Args:
            roots: the models.
            initial: name of a trained weight → the weight, and its first value.
            own: tensors that are no copies, such as the optimizers' states.
        """
        after, before = dict(self._outputs), {name: torch.zeros_like(each) for name, each in self._outputs.items()}
        copies = [copied for _, copied in _copies(roots, initial, own)]
        copies.sort(key=lambda copied: [float(each.double().norm()) for each in copied.values()])
        for number, copied in enumerate(copies, 1):
            for name, value in copied.items():
                shown = f"{name} in copy {number} of the weights"
                after[shown], before[shown] = value.to("cpu", copy=True), initial[name][1].clone()
        return Buffers(before, after, frozenset(), frozenset(name.rpartition(".")[0] for name in after))


def _copies(
    roots: Sequence[nn.Module], initial: Initial, own: Iterable[Tensor]
) -> Iterator[tuple[Any, dict[str, Tensor]]]:
    """Containers of a copy of some root's trained weights, and the copy by the weights' names."""
    names = {id(weight): name for name, (weight, _) in initial.items()}
    trained = [[each for each in root.parameters() if id(each) in names] for root in roots]
    taken = {each.data_ptr() for each in filter(_is_plain, own)}
    fewest = min(map(len, filter(None, trained)), default=MOST_ENTRIES)
    for each in gc.get_objects():
        found: Iterable[Any] = ()
        if type(each) in CONTAINERS and fewest <= len(each) <= MOST_ENTRIES:
            found = list(each.values() if isinstance(each, dict) else each)
        elif issubclass(type(each), nn.Module) and is_module(each):
            found = each.parameters()
        tensors = [tensor.detach() for tensor in filter(_is_plain, found)]
        for weights in filter(None, trained if tensors else ()):
            ahead = iter(tensors)
            copied = [next((each for each in ahead if each.shape == weight.shape), weight) for weight in weights]
            if taken.isdisjoint(tensor.data_ptr() for tensor in copied):
                yield each, {names[id(weight)]: value.detach() for weight, value in zip(weights, copied, strict=True)}


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
