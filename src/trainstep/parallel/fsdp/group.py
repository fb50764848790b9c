"""Parameters that are gathered and freed together, and their gradients on the way to the shards' `.grad`.

The full parameters of a group are views of one storage, each contiguous and padded to equal shards. A gather casts this
rank's rows straight into their place there, and into the place that the others get them from, if the transport has one;
the transport fills in the other ranks' rows. Freeing gives the storage's memory back; the tensors stay, so what
autograd saved for backward is filled again by the next gather.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from trainstep.parallel.fsdp.gradients import GradientBuffer
from trainstep.parallel.fsdp.shards import ShardedParameter
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.side_stream import Pending, SideStream
from trainstep.parallel.slices import check_dense
from trainstep.parallel.transport.by_collectives import Collectives, Start
from trainstep.parallel.transport.by_copies import PeerCopies, padded


class GatherGroup:
    """A group whose parameters are gathered together, in order of definition."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        ranks: Ranks,
        compute_dtype: torch.dtype | None,
        device: torch.device,
        name: str = "",
    ) -> None:
        self.parameters, self._process_group, self.name = parameters, ranks.shard, name
        self.users = 0  # calls that are running in forward
        self.awaiting: WeakSet[Any] = WeakSet()  # calls not left by backward yet, of any graph
        self.unwatched: WeakSet[Any] = WeakSet()  # calls that backward comes through, and is not seen leaving
        self.is_unsent = False  # whether backward has come to it since its gradients were last sent
        self._pending: Pending | None = None
        self._is_installed = False  # whether the module sees the full parameters
        self._gathered_version = 0
        self._all_gather: Start | None = None
        self._trainable = [parameter for parameter in parameters if parameter.trainable]
        self._lay_out(compute_dtype, device)
        kinds: dict[tuple[torch.dtype, torch.dtype], list[ShardedParameter]] = defaultdict(list)
        for parameter in self._trainable:
            if parameter.rows is not None:
                kinds[parameter.compute_dtype(compute_dtype), parameter.shard.dtype].append(parameter)
        self.buffers = [GradientBuffer(members, ranks, computed) for (computed, _), members in kinds.items()]
        self._buffer_of = {parameter: buffer for buffer in self.buffers for parameter in buffer.parameters}

    def _lay_out(self, compute_dtype: torch.dtype | None, device: torch.device) -> None:
        """Place every full parameter in the group's storage, then give the memory back."""
        dtypes = [parameter.compute_dtype(compute_dtype) for parameter in self.parameters]
        sizes = [p.padded_shape.numel() * dtype.itemsize for p, dtype in zip(self.parameters, dtypes, strict=True)]
        *starts, self.full_bytes = accumulate(map(padded, sizes), initial=0)
        self._starts = starts
        memory = torch.empty(self.full_bytes, dtype=torch.uint8, device=device)
        self._places: list[Tensor] = []  # in the storage, of this rank's rows, and where the others get them from
        self._shards: list[Tensor] = []  # what is copied there
        self._gathered_bytes: list[Tensor] = []
        self._gathered_rows: list[tuple[Tensor, Tensor]] = []  # of each, this rank's rows, and their shard
        for parameter, dtype, start, size in zip(self.parameters, dtypes, starts, sizes, strict=True):
            rows = parameter.rows
            region = memory[start : start + size]
            whole = region.view(dtype).view(parameter.padded_shape)
            own = whole if rows is None else whole[rows]
            if own.numel() > 0:
                self._places.append(own)
                self._shards.append(parameter.shard)
            if rows is not None:
                self._gathered_bytes.append(region)
                self._gathered_rows.append((own, parameter.shard))
            # .data: gathering must not count as a change of what autograd saved
            full = whole.data if rows is None else whole.data[: parameter.shape[0]]
            parameter.full = nn.Parameter(full, requires_grad=parameter.trainable)
            for register, hook in parameter.hooks:
                getattr(parameter.full, register)(hook)
        self._storage = memory.untyped_storage()
        self._storage.resize_(0)

    @property
    def is_gathered(self) -> bool:
        """True if the storage is there; its values may still be on their way."""
        return self._storage.nbytes() > 0

    @property
    def is_ready(self) -> bool:
        """True if the values are there, too, for the current stream."""
        return self._pending is None and self._storage.nbytes() > 0

    def is_part_of(self, tensor: Tensor) -> bool:
        """True if a tensor shares memory with the full parameters."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        return plain and tensor.untyped_storage()._cdata == self._storage._cdata

    @property
    def communicates(self) -> bool:
        """True if gathering it takes a collective."""
        return self._all_gather is not None

    @property
    def transfer_bytes(self) -> tuple[int, int]:
        """Bytes at a time: of this rank's slices, as a transport lays them out, and of gradients that are exchanged."""
        slices = sum(padded(region.nbytes // self._process_group.size()) for region in self._gathered_bytes)
        return slices, max((buffer.exchanged_bytes for buffer in self.buffers), default=0)

    def connect(self, transport: Collectives | PeerCopies) -> None:
        """Set the transport of parameters and gradients within a replica; once, before the first gather."""
        if self._gathered_bytes and self._process_group.size() > 1:
            outbox = transport.outbox_of(self._gathered_bytes)
            self._all_gather = transport.gather_of(self._gathered_bytes, laid_out=outbox is not None)
            for slot, (place, shard) in zip(outbox or [], self._gathered_rows, strict=outbox is not None):
                if place.numel() > 0:
                    self._places.append(slot[: place.nbytes].view(place.dtype).view(place.shape))
                    self._shards.append(shard)
        for buffer in self.buffers:
            buffer.connect(transport)

    @property
    def version(self) -> int:
        """Number of times that this rank's shards were changed in place."""
        return sum(parameter.shard._version for parameter in self.parameters)

    @property
    def is_stale(self) -> bool:
        """True if it was gathered, and the shards were changed since."""
        return self.is_gathered and self.version != self._gathered_version

    def gather(self, stream: SideStream) -> None:
        if not self.is_gathered:
            self._gathered_version = self.version
            self._storage.resize_(self.full_bytes)
            self._pending = stream.run(self._all_gather, before=self._copy_own)

    def _copy_own(self) -> None:
        if self._places:  # a rank may have no row of any
            with torch.no_grad():
                torch._foreach_copy_(self._places, self._shards)

    def wait(self) -> None:
        """Let the current stream wait for the gather, and the module see the full parameters."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if not self._is_installed:
            self._is_installed = True
            for parameter in self.parameters:
                parameter.install_full()

    def hide(self) -> None:
        """Let the module see placeholders, so that whoever reads them is noticed."""
        if self._is_installed:
            self._is_installed, memory = False, self._storage.data_ptr()
            for parameter, start in zip(self.parameters, self._starts, strict=True):
                parameter.install_placeholder(memory + start)

    def free(self) -> None:
        """Give the full parameters' memory back, and the module its placeholders."""
        if not self.is_gathered:
            return
        if self._pending is not None:  # gathered ahead, and not used
            self._pending.wait()
            self._pending = None
        self.hide()
        self._storage.resize_(0)

    def take_gradient(self, parameter: ShardedParameter, *, added_up: bool) -> Tensor | None:
        """Move the full parameter's gradient into its buffer; a replicated parameter's is returned instead."""
        assert parameter.full is not None
        gradient, parameter.full.grad = parameter.full.grad, None
        assert gradient is not None, f"{parameter.name}: called without a gradient"
        check_dense(gradient, parameter.name)
        if gradient.requires_grad:  # create_graph: what arrives in the shards is a mean over ranks, without a graph
            gradient = gradient.detach()
        if parameter.rows is None:
            return gradient
        self._buffer_of[parameter].add(parameter, gradient, added_up=added_up)
        return None

    @property
    def has_frozen(self) -> bool:
        return len(self._trainable) < len(self.parameters)
