"""Parameters that are gathered and freed together.

The full parameters of a group are views of one storage, each contiguous and padded to equal shards. A gather casts this
rank's rows straight into their place there, and the transport fills in the other ranks' rows. Freeing gives the
storage's memory back; the tensors stay, so what autograd saved for backward is filled again by the next gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.parallel.collectives import Pending, SideStream
from trainstep.parallel.fsdp.gradients import GradientBuffer
from trainstep.parallel.fsdp.shards import ShardedParameter
from trainstep.parallel.fsdp.transport import Start, Transport, padded


class GatherGroup:
    """One group.

    Attributes:
        parameters: in order of definition.
        buffers: of the gradients of its sharded, trainable parameters; one for each pair of dtypes.
        awaiting: calls whose backward has not reached the call's inputs. A call whose graph is gone leaves by itself.
        users: calls that are running in forward.
        full_bytes: of the storage, while gathered.
        arrived: parameters whose gradient backward has brought since the group's gradients were sent.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        process_group: dist.ProcessGroup,
        compute_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.parameters = parameters
        self.awaiting: WeakSet[object] = WeakSet()
        self.users = 0
        self._process_group = process_group
        self._pending: Pending | None = None
        self._all_gather: Start | None = None
        self.arrived: set[ShardedParameter] = set()
        self._trainable = [parameter for parameter in parameters if parameter.trainable]
        self._lay_out(compute_dtype, device)
        self.buffers: list[GradientBuffer] = []
        self._buffer_of: dict[ShardedParameter, GradientBuffer] = {}
        kinds: dict[tuple[torch.dtype, torch.dtype], list[ShardedParameter]] = {}
        for parameter in self._trainable:
            if parameter.rows is not None:
                kind = (parameter.compute_dtype(compute_dtype), parameter.shard.dtype)
                kinds.setdefault(kind, []).append(parameter)
        for members in kinds.values():
            buffer = GradientBuffer(members, process_group)
            self.buffers.append(buffer)
            self._buffer_of.update(dict.fromkeys(members, buffer))

    def _lay_out(self, compute_dtype: torch.dtype | None, device: torch.device) -> None:
        """Place every full parameter in the group's storage, then give the memory back."""
        dtypes = [parameter.compute_dtype(compute_dtype) for parameter in self.parameters]
        sizes = [p.padded_shape.numel() * dtype.itemsize for p, dtype in zip(self.parameters, dtypes, strict=True)]
        *starts, self.full_bytes = accumulate(map(padded, sizes), initial=0)
        memory = torch.empty(self.full_bytes, dtype=torch.uint8, device=device)
        self._copies: list[tuple[Tensor, nn.Parameter]] = []  # (place in the storage, shard)
        self._gathered_bytes: list[Tensor] = []
        for parameter, dtype, start, size in zip(self.parameters, dtypes, starts, sizes, strict=True):
            rows = parameter.rows
            region = memory[start : start + size]
            whole = region.view(dtype).view(parameter.padded_shape)
            own = whole if rows is None else whole[rows.start : rows.stop]
            if own.numel() > 0:
                self._copies.append((own, parameter.shard))
            if rows is not None:
                self._gathered_bytes.append(region)
            # .data: gathering must not count as a change of what autograd saved
            full = whole.data if rows is None else whole.data[: rows.shape[0]]
            parameter.full = nn.Parameter(full, requires_grad=parameter.trainable)
        self._storage = memory.untyped_storage()
        self._storage.resize_(0)

    @property
    def is_gathered(self) -> bool:
        """Whether the storage is there; its values may still be on their way."""
        return self._storage.nbytes() > 0

    @property
    def slice_bytes(self) -> int:
        """Of this rank's slices in a gather, each as a transport lays it out."""
        return sum(padded(region.nbytes // self._process_group.size()) for region in self._gathered_bytes)

    def connect(self, transport: Transport) -> None:
        """Choose what carries parameters and gradients; once, before the first gather."""
        if self._gathered_bytes and self._process_group.size() > 1:
            self._all_gather = transport.gather_of(self._gathered_bytes)
        for buffer in self.buffers:
            buffer.transport = transport

    def gather(self, stream: SideStream) -> None:
        """Start gathering, unless it has been started."""
        if self.is_gathered:
            return
        self._storage.resize_(self.full_bytes)
        self._pending = stream.run(self._all_gather, before=self._copy_own)

    def _copy_own(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_([place for place, _ in self._copies], [shard for _, shard in self._copies])

    def wait(self) -> None:
        """Let the current stream wait for the gather, and the module see the full parameters."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            for parameter in self.parameters:
                parameter.install_full()

    def free(self) -> None:
        """Give the full parameters' memory back, and the module its shards."""
        if not self.is_gathered:
            return
        if self._pending is not None:  # gathered ahead, and not used
            self._pending.wait()
            self._pending = None
        for parameter in self.parameters:
            parameter.install_shard()
        self._storage.resize_(0)

    def take_gradient(self, parameter: ShardedParameter, *, accumulate: bool) -> Tensor | None:
        """Move the full parameter's gradient into its buffer; a replicated parameter's is returned instead."""
        assert parameter.full is not None
        gradient, parameter.full.grad = parameter.full.grad, None
        assert gradient is not None, f"{parameter.name}: called without a gradient"
        self.arrived.add(parameter)
        if parameter.rows is None:
            return gradient
        self._buffer_of[parameter].add(parameter, gradient, accumulate=accumulate)
        return None

    @property
    def all_arrived(self) -> bool:
        """Whether backward has brought all gradients."""
        return len(self.arrived) == len(self._trainable) > 0
