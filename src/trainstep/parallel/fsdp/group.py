"""Parameters that are gathered and freed together, and their gradients on the way to the shards' `.grad`.

The full parameters of a group are views of one storage, each contiguous and padded to equal shards. A gather casts this
rank's rows straight into their place there, and the transport fills in the other ranks' rows. Freeing gives the
storage's memory back; the tensors stay, so what autograd saved for backward is filled again by the next gather.

A buffer holds the gradients of a group, destination by destination: first all that rank 0 owns, then rank 1's, and so
on. Gradients in the shards' own dtype are reduce-scattered. Gradients in a narrower dtype are *exchanged* as they are
(an all-to-all: each rank gets every rank's version of its own rows), and each rank then adds up its rows in the shards'
dtype, in the order of the ranks. That is the sum which a reduce-scatter in the wide dtype makes, for as few bytes on
the wire as one in the narrow dtype: half of them for bfloat16 into float32.

Where there are replicas, what a rank then has are the means over its own replica's ranks. They are averaged between
replicas in place, in the shards' dtype, by an all-reduce on a stream of its own. So one group's gradients travel
between replicas while the next group's travel within them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainstep.errors import UsageError
from trainstep.parallel.collectives import Pending, SideStream, all_reduce_mean, reduce_scatter_mean, slice_of
from trainstep.parallel.forms import host_waits
from trainstep.parallel.fsdp.shards import ShardedParameter
from trainstep.parallel.fsdp.transport import Collectives, Start, Transport, padded
from trainstep.parallel.ranks import Ranks


class GatherGroup:
    """One group; its parameters are in order of definition."""

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
        self.awaiting: WeakSet[object] = WeakSet()  # calls not left by backward yet; without a graph they drop out
        self.unwatched: WeakSet[object] = WeakSet()  # calls that backward comes through, and is not seen leaving
        self.arrived: set[ShardedParameter] = set()  # whose gradient backward has brought since the last were sent
        self._pending: Pending | None = None
        self._is_installed = False  # whether the module sees the full parameters
        self._all_gather: Start | None = None
        self._trainable = [parameter for parameter in parameters if parameter.trainable]
        self._lay_out(compute_dtype, device)
        kinds: dict[tuple[torch.dtype, torch.dtype], list[ShardedParameter]] = defaultdict(list)
        for parameter in self._trainable:
            if parameter.rows is not None:
                kinds[parameter.compute_dtype(compute_dtype), parameter.shard.dtype].append(parameter)
        self.buffers = [GradientBuffer(members, ranks) for members in kinds.values()]
        self._buffer_of = {parameter: buffer for buffer in self.buffers for parameter in buffer.parameters}

    def _lay_out(self, compute_dtype: torch.dtype | None, device: torch.device) -> None:
        """Place every full parameter in the group's storage, then give the memory back."""
        dtypes = [parameter.compute_dtype(compute_dtype) for parameter in self.parameters]
        sizes = [p.padded_shape.numel() * dtype.itemsize for p, dtype in zip(self.parameters, dtypes, strict=True)]
        *starts, self.full_bytes = accumulate(map(padded, sizes), initial=0)
        memory = torch.empty(self.full_bytes, dtype=torch.uint8, device=device)
        self._places: list[Tensor] = []  # in the storage, of this rank's rows
        self._shards: list[Tensor] = []  # what is copied there
        self._gathered_bytes: list[Tensor] = []
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
            # .data: gathering must not count as a change of what autograd saved
            full = whole.data if rows is None else whole.data[: parameter.shape[0]]
            parameter.full = nn.Parameter(full, requires_grad=parameter.trainable)
            for register, hook in parameter.hooks:
                getattr(parameter.full, register)(hook)
        self._storage = memory.untyped_storage()
        self._storage.resize_(0)

    @property
    def is_gathered(self) -> bool:
        """Whether the storage is there; its values may still be on their way."""
        return self._storage.nbytes() > 0

    @property
    def is_ready(self) -> bool:
        """Whether the values are there, too, for the current stream."""
        return self._pending is None and self._storage.nbytes() > 0

    def is_part_of(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with the full parameters."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        return plain and tensor.untyped_storage()._cdata == self._storage._cdata

    @property
    def communicates(self) -> bool:
        """Whether gathering it takes a collective."""
        return self._all_gather is not None

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
        if not self.is_gathered:
            self._storage.resize_(self.full_bytes)
            self._pending = stream.run(self._all_gather, before=self._copy_own)

    def _copy_own(self) -> None:
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
            self._is_installed = False
            for parameter in self.parameters:
                parameter.install_placeholder()

    def free(self) -> None:
        """Give the full parameters' memory back, and the module its placeholders."""
        if not self.is_gathered:
            return
        if self._pending is not None:  # gathered ahead, and not used
            self._pending.wait()
            self._pending = None
        self.hide()
        self._storage.resize_(0)

    def take_gradient(self, parameter: ShardedParameter, *, accumulate: bool) -> Tensor | None:
        """Move the full parameter's gradient into its buffer; a replicated parameter's is returned instead."""
        assert parameter.full is not None
        gradient, parameter.full.grad = parameter.full.grad, None
        assert gradient is not None, f"{parameter.name}: called without a gradient"
        if gradient.layout != torch.strided:
            raise UsageError(f"{parameter.name} has a sparse gradient; only dense ones can be averaged")
        if gradient.requires_grad:  # create_graph: what arrives in the shards is a mean over ranks, without a graph
            gradient = gradient.detach()
        self.arrived.add(parameter)
        if parameter.rows is None:
            return gradient
        self._buffer_of[parameter].add(parameter, gradient, accumulate=accumulate)
        return None

    @property
    def all_arrived(self) -> bool:
        return len(self.arrived) == len(self._trainable) > 0

    @property
    def has_frozen(self) -> bool:
        return len(self._trainable) < len(self.parameters)


class GradientBuffer:
    """Gradients of sharded parameters that are computed in one dtype and trained in one dtype."""

    def __init__(self, parameters: Sequence[ShardedParameter], ranks: Ranks) -> None:
        self.parameters, self._process_group, self._ranks = parameters, ranks.shard, ranks.shard.size()
        self._replicate = ranks.replicate
        self._dtype = parameters[0].shard.dtype
        self._starts: dict[ShardedParameter, int] = {}  # its first element, the same one for every destination
        self._size = 0  # elements per destination
        for parameter in parameters:
            self._starts[parameter] = self._size
            self._size += -(-self._elements(parameter) // 16) * 16  # each starts at a multiple
        self._parts = {parameter: list(self._parts_of(parameter)) for parameter in parameters}
        self._own = [(each, (each.shard.shape, each.shard.stride(), start)) for each, start in self._starts.items()]
        self.transport: Transport = Collectives(ranks.shard)
        self.send: Tensor | None = None  # (ranks, size); None while it holds no gradients
        self._words: Tensor | None = None  # the same in words of 16 bytes, which strided copies are fast for
        self._written: set[ShardedParameter] = set()

    def exchange_bytes(self, compute_dtype: torch.dtype | None) -> int:
        """Bytes of the buffer when it is exchanged; 0 if its gradients are as wide as the shards, and reduced."""
        dtype = self.parameters[0].compute_dtype(compute_dtype)
        return 0 if dtype == self._dtype else self._ranks * self._size * dtype.itemsize

    def add(self, parameter: ShardedParameter, gradient: Tensor, *, accumulate: bool) -> None:
        """Put a gradient of the full parameter's shape in its place, or add it to what is there.

        `accumulate`: more will come before it is sent, so the buffer is in the shards' dtype.
        """
        if self.send is None:
            dtype = self._dtype if accumulate else gradient.dtype
            self.send = torch.empty(self._ranks, self._size, dtype=dtype, device=gradient.device)
            self._words = self.send.view(torch.complex128)
        elif accumulate and self.send.dtype != self._dtype:
            self.send = self.send.to(self._dtype)
            self._words = self.send.view(torch.complex128)
        assert self._words is not None
        gradient = gradient.contiguous()
        first, word = gradient.storage_offset(), 16 // gradient.element_size()  # elements
        is_copied = parameter not in self._written
        alike = is_copied and gradient.dtype == self.send.dtype
        for ranks, elements, start, skipped in self._parts[parameter]:
            source = gradient.as_strided((ranks, elements), (elements, 1), first + skipped)
            if alike and elements % word == 0 and (first + skipped) % word == 0:
                target = self._words.as_strided((ranks, elements // word), (self._size // word, 1), start // word)
                target.copy_(source.view(torch.complex128))
                continue
            target = self.send.as_strided((ranks, elements), (self._size, 1), start)
            if is_copied:
                target.copy_(source)
            else:
                target.add_(source)
        self._written.add(parameter)

    def _elements(self, parameter: ShardedParameter) -> int:
        """Of a shard, as the largest has them."""
        return parameter.padded_shape.numel() // self._ranks

    def _parts_of(self, parameter: ShardedParameter) -> Iterator[tuple[int, int, int, int]]:
        """Of a gradient: how many ranks get how many elements each, where the first rank's start in the buffer, and how
        many elements of the gradient are before them."""
        elements = self._elements(parameter)
        full, rest = divmod(parameter.shape.numel(), elements)  # ranks with all their rows; elements of the next
        if full:
            yield full, elements, self._starts[parameter], 0
        if rest:  # what stands behind them in their place is never looked at
            yield 1, rest, self._starts[parameter] + full * self._size, full * elements

    def discard(self) -> None:
        self.send, self._words, self._written = None, None, set()

    def launch(self, stream: SideStream, between: SideStream) -> Sending:
        """Send the buffer; parameters without a gradient on this rank are sent as zeros.

        `between` runs what goes between replicas.
        """
        assert self.send is not None
        send, written = self.send, self._written
        self.discard()
        for parameter in self.parameters:
            if parameter not in written:
                start = self._starts[parameter]
                send[:, start : start + self._elements(parameter)].zero_()
        result = torch.empty(self._size, dtype=self._dtype, device=send.device)
        if self._ranks == 1:
            result, pending = send[0].to(self._dtype), Pending()
        elif send.dtype == self._dtype:
            group, own = self._process_group, slice_of(send, self._process_group.rank(), self._ranks)
            pending = stream.run(lambda: reduce_scatter_mean([send], group), after=lambda: result.copy_(own))
        else:
            exchange, add_up = self.transport.exchange_of(send, result)
            pending = stream.run(exchange, after=add_up)
        rows = [(each, result.as_strided(*layout)) for each, layout in self._own]
        return Sending(rows, written, result, pending, self._replicate, between)


class Sending:
    """The gradients of a buffer under way: within this rank's replica, and then between replicas, where there are any.

    Over NCCL the second follows the first by itself. Over Gloo, where the host waits in between, `go_on` starts it.
    """

    def __init__(
        self,
        rows: list[tuple[ShardedParameter, Tensor]],
        written: set[ShardedParameter],
        result: Tensor,
        pending: Pending,
        replicate: dist.ProcessGroup | None,
        between: SideStream,
    ) -> None:
        self._rows, self._written, self._result = rows, written, result
        self._within, self._between = pending, between
        self._replicate, self._replicated = replicate, Pending()
        if replicate is not None and not host_waits(replicate, result.device):
            self._start_between()

    def go_on(self) -> None:
        """Let the current stream wait until the buffer was sent within the replica, and give up its memory."""
        self._within.wait()
        self._start_between()

    def complete(self) -> tuple[list[ShardedParameter], list[tuple[ShardedParameter, Tensor]]]:
        """Wait for the mean of this rank's rows over all ranks and attach what this rank had a gradient of.

        Returns those parameters, and what it sent zeros for, with means that are attached if another rank has a
        gradient.
        """
        self.go_on()
        self._replicated.wait()
        for each, gradient in self._rows:
            if each in self._written:
                each.attach_gradient(gradient)
        return list(self._written), [row for row in self._rows if row[0] not in self._written]

    def _start_between(self) -> None:
        if self._replicate is not None:
            group, result, self._replicate = self._replicate, self._result, None
            start = partial(all_reduce_mean, [result], group)
            self._replicated = self._between.run(start, before=self._within.join)


class ReplicatedGradients:
    """Gradients of replicated parameters, averaged in one flat call, and with them which parameters were used at all.

    A parameter that no rank used keeps no gradient, as without sharding; one that some rank used has one on every rank.
    """

    def __init__(self, parameters: Iterable[ShardedParameter], process_group: dist.ProcessGroup) -> None:
        self._trainable = [parameter for parameter in parameters if parameter.trainable]
        self._replicated = [parameter for parameter in self._trainable if parameter.rows is None]
        self._process_group = process_group
        self._gradients: dict[ShardedParameter, Tensor] = {}
        wide = any(parameter.shard.dtype == torch.float64 for parameter in self._replicated)
        self._dtype = torch.float64 if wide else torch.float32

    def add(self, parameter: ShardedParameter, gradient: Tensor) -> None:
        """Keep a gradient, or add it up in the wide dtype."""
        before = self._gradients.get(parameter)
        self._gradients[parameter] = gradient if before is None else before.to(self._dtype) + gradient

    def discard(self) -> None:
        self._gradients = {}

    def reduce(self, used: set[ShardedParameter], device: torch.device) -> set[ShardedParameter]:
        """Attach the means over the ranks. Returns the parameters that some rank used.

        The host waits for the device only if this rank left a parameter unused and must ask about it.
        """
        sizes = [*(parameter.shape.numel() for parameter in self._replicated), len(self._trainable)]
        flat = torch.zeros(sum(sizes), dtype=self._dtype, device=device)
        *means, flags = flat.split(sizes)
        places = dict(zip(self._replicated, means, strict=True))
        if self._gradients:
            targets = [places[parameter] for parameter in self._gradients]
            torch._foreach_copy_(targets, [gradient.reshape(-1) for gradient in self._gradients.values()])
        self.discard()
        all_used = len(used) == len(self._trainable)
        if all_used:
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor([float(parameter in used) for parameter in self._trainable]))
        if self._process_group.size() > 1:
            all_reduce_mean([flat], self._process_group).wait()
        if not all_used:
            used = {parameter for parameter, flag in zip(self._trainable, flags.tolist(), strict=True) if flag > 0}
        for parameter, mean in places.items():
            if parameter in used:
                parameter.attach_gradient(mean.view(parameter.shape).to(parameter.shard.dtype))
        return used
