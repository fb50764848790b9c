"""Which form collectives take, by what carries the tensors of a device in a group.

What the backends do, in torch 2.11 to 2.13 (lists: calls over several tensors, `*_coalesced`):

| | NCCL, on a GPU | Gloo, on a CPU | Gloo, on a GPU |
|---|---|---|---|
| all-reduce, broadcast, all-gather, all-to-all | yes | yes | copied to the host and back |
| all-reduce of a list | one launch | packed | refused |
| reduce-scatter, of a list too | one launch | all-reduce of each, cut in the wait | likewise |
| all-gather of a list | one launch | corrupts the heap now and then | the host reads the GPU's addresses |
| means | on the way | no | no |
| the host | goes on | waits | waits |

So what is on a GPU, and goes over Gloo, is copied to the host by us, a list in one (`staged`), and takes the form that
it takes on a CPU. Single tensors of a few bytes, such as a norm, may be left to Gloo's own copies. Its reduce-scatter
and all-to-all are not used, and its all-gather not between two ranks or within a host: there ranks send each other
messages (`over_gloo`).
"""

from __future__ import annotations

import weakref
from enum import Enum

import torch
import torch.distributed as dist

from trainstep.base.errors import UsageError


class Form(Enum):
    LISTS = "lists"  # one call over a list where it is, which makes means; only streams wait
    HOST = "host"  # the list is packed, an all-reduce adds what was divided before, and the host waits
    STAGED = "staged"  # as HOST, of copies in the host's memory


FORMS = {("gloo", "cpu"): Form.HOST, ("nccl", "cuda"): Form.LISTS, ("gloo", "cuda"): Form.STAGED}
"""By backend and type of device."""

_chosen: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Form]] = weakref.WeakKeyDictionary()


def form_of(group: dist.ProcessGroup, device: torch.device) -> Form:
    """The form of all collectives over tensors of this type of device, chosen once per group.

    Raises:
        UsageError: the group has no backend for the device, or one that there is no form for.
    """
    chosen = _chosen.setdefault(group, {})
    if device.type not in chosen:
        chosen[device.type] = _choose(group, device.type)
    return chosen[device.type]


def host_waits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the host has to wait for a collective before anything can follow it on the device."""
    return form_of(group, device) is not Form.LISTS


def _choose(group: dist.ProcessGroup, device_type: str) -> Form:
    devices = {device.type for device in group._device_types}
    backend = group._get_backend(torch.device(device_type)).name() if device_type in devices else None
    if form := FORMS.get((str(backend), device_type)):
        if form is Form.STAGED and device_type != "cpu":
            _choose(group, "cpu")  # where the copies are
        return form
    found = "no backend" if backend is None else backend
    known = ", ".join(f"{backend} for {device_type} tensors" for backend, device_type in FORMS)
    raise UsageError(
        f"the process group has {found} for {device_type} tensors (it has {dist.get_backend_config(group)}); expected "
        f'{known}: init_process_group("cpu:gloo,cuda:nccl") gives the first two, init_process_group("gloo") the others'
    )
