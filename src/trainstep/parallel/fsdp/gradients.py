"""Gradients of a group, from backward to the shards' `.grad`.

Gradients in the shards' own dtype are copied into a buffer, destination by destination (`Layout`), and
reduce-scattered. Gradients in another dtype, usually a narrower one, are *exchanged* as they are (an all-to-all: each
rank gets every rank's version of its own rows), and each rank then adds up its rows in the shards' dtype, in the order
of the ranks. For bfloat16 into float32 that is the sum which a reduce-scatter in float32 makes, for half the bytes.
Where copies carry them, they go from where backward left them straight to the other ranks, without a buffer here. What
is added up under `no_sync` is in a buffer and in the shards' dtype.

Ranks must send alike, though they need not have gradients of the same parameters. So what is sent, and how, follows
from what all ranks know: which groups had a gradient, and whether there was `no_sync`.

Where there are replicas, what a rank then has are the means over its own replica's ranks. They are all-reduced between
replicas in place, in the shards' dtype, on a stream of its own. So one group's gradients travel between replicas while
the next group's travel within them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainstep.parallel.collectives import all_reduce_mean, reduce_scatter_mean
from trainstep.parallel.fsdp.shards import ShardedParameter
from trainstep.parallel.gloo import host_waits
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.side_stream import Pending, SideStream
from trainstep.parallel.slices import resolved, slice_of
from trainstep.parallel.transport.by_collectives import Average, Collectives, Layout
from trainstep.parallel.transport.by_copies import PeerCopies


class GradientBuffer:
    """Gradients of sharded parameters that are computed in one dtype (`compute_dtype`) and trained in one dtype."""

    def __init__(self, parameters: Sequence[ShardedParameter], ranks: Ranks, compute_dtype: torch.dtype) -> None:
        self.parameters, self._process_group = parameters, ranks.shard
        self._compute_dtype, self._dtype = compute_dtype, parameters[0].shard.dtype
        self._is_narrow = self._compute_dtype != self._dtype
        self._device = device = parameters[0].shard.device
        self._host_waits = ranks.replicate is not None and host_waits(ranks.replicate, device)
        size = ranks.shard.size()
        slices = [parameter.padded_shape.numel() // size for parameter in parameters]
        self._layout = layout = Layout([parameter.shape.numel() for parameter in parameters], slices, size)
        self._places = {
            parameter: (start, list(layout.blocks(number)))
            for number, (parameter, start) in enumerate(zip(parameters, layout.starts, strict=True))
        }
        self._own = [(each, (each.shard.shape, each.shard.stride(), self._places[each][0])) for each in parameters]
        self._average = None if ranks.replicate is None else Collectives(ranks.replicate).average
        self.connect(Collectives(ranks.shard))
        self.discard()

    def discard(self) -> None:
        """Forget what it holds: gradients in a buffer, or, never at the same time, gradients where they are."""
        self.packed: Tensor | None = None  # (ranks, elements of a row)
        self._words: Tensor | None = None  # the same in words of 16 bytes, which strided copies are fast for
        self._written: set[ShardedParameter] = set()  # those in it
        self._loose: dict[ShardedParameter, Tensor] = {}

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of gradients that are exchanged at a time, not reduced."""
        return self._layout.ranks * self._layout.size * self._compute_dtype.itemsize if self._is_narrow else 0

    @property
    def is_averaged(self) -> bool:
        """True if a replica's means go on to the other replicas."""
        return self._average is not None

    def connect(self, transport: Collectives | PeerCopies) -> None:
        """Set the transport of gradients within a replica; before the first."""
        self._exchange_of = transport.exchange_of(self._layout)
        self._stay_loose = self._is_narrow and not transport.packs and self._layout.ranks > 1

    def add(self, parameter: ShardedParameter, gradient: Tensor, *, added_up: bool) -> None:
        """Take a gradient of the full parameter's shape, or add it to what is there of that parameter.

        It may be kept as it is until it has been sent, so nothing may write to it any more.

        Args:
            added_up: in the shards' dtype, as there is `no_sync` before they are sent.
        """
        gradient = resolved(gradient).contiguous()  # its memory is read
        if added_up or not self._stay_loose:
            if added_up:
                self._pack_loose()
            self._pack(parameter, gradient, self._dtype if added_up else self._compute_dtype)
        elif (before := self._loose.get(parameter)) is not None:
            self._loose[parameter] = before + gradient  # another parameter's may share the memory of either
        else:
            self._loose[parameter] = gradient

    def launch(self, stream: SideStream, between: SideStream, *, added_up: bool) -> Sending:
        """Send what it holds; parameters without a gradient on this rank are sent as zeros.

        Args:
            between: runs what goes between replicas.
            added_up: as for `add`; the same on all ranks, whatever they hold.
        """
        if added_up:
            self._pack_loose()
        if self.packed is None and (added_up or not self._stay_loose):
            self._make_buffer(self._dtype if added_up else self._compute_dtype)
        packed, loose, written = self.packed, self._loose, self._written | self._loose.keys()
        self.discard()
        ranks, size = self._layout.ranks, self._layout.size
        result = torch.empty(size, dtype=self._dtype, device=self._device)
        if packed is None:
            sent = [self._zeros(each) if (found := loose.get(each)) is None else found for each in self.parameters]
        else:
            sent = [packed]
            for parameter in self.parameters:
                if parameter not in written:
                    start = self._places[parameter][0]
                    packed[:, start : start + parameter.padded_shape.numel() // ranks].zero_()
        if ranks == 1:
            result, pending = sent[0][0].to(self._dtype), Pending()
        elif packed is not None and packed.dtype == self._dtype:
            group, own = self._process_group, slice_of(packed, self._process_group.rank(), ranks)
            pending = stream.run(lambda: reduce_scatter_mean(sent, group), after=lambda: result.copy_(own))
        else:
            exchange, add_up = self._exchange_of(sent, result)
            pending = stream.run(exchange, after=add_up)
        rows = [(each, result.as_strided(*layout)) for each, layout in self._own]
        return Sending(rows, written, result, pending, self._average, between, goes_on=not self._host_waits)

    def _zeros(self, parameter: ShardedParameter) -> Tensor:
        return torch.zeros(parameter.shape, dtype=self._compute_dtype, device=self._device)

    def _pack_loose(self) -> None:
        """Move gradients from where they are into the buffer."""
        loose, self._loose = self._loose, {}
        for parameter, gradient in loose.items():
            self._pack(parameter, gradient, self._dtype)

    def _make_buffer(self, dtype: torch.dtype) -> None:
        self.packed = torch.empty(self._layout.ranks, self._layout.size, dtype=dtype, device=self._device)
        self._words = self.packed.view(torch.complex128)

    def _pack(self, parameter: ShardedParameter, gradient: Tensor, dtype: torch.dtype) -> None:
        """Copy or add a contiguous gradient to its places in the buffer, which is of `dtype` from now on."""
        if self.packed is None:
            self._make_buffer(dtype)
        elif dtype != self.packed.dtype:
            self.packed = self.packed.to(dtype)
            self._words = self.packed.view(torch.complex128)
        assert self.packed is not None
        assert self._words is not None
        size, (start, blocks) = self._layout.size, self._places[parameter]
        first, word = gradient.storage_offset(), 16 // gradient.element_size()  # elements
        is_copied = parameter not in self._written
        alike = is_copied and gradient.dtype == self.packed.dtype
        for ranks, elements, before, skipped in blocks:
            place = start + before * size
            source = gradient.as_strided((ranks, elements), (elements, 1), first + skipped)
            if alike and elements % word == 0 and (first + skipped) % word == 0:
                target = self._words.as_strided((ranks, elements // word), (size // word, 1), place // word)
                target.copy_(source.view(torch.complex128))
                continue
            target = self.packed.as_strided((ranks, elements), (size, 1), place)
            if is_copied:
                target.copy_(source)
            else:
                target.add_(source)
        self._written.add(parameter)


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
        average: Average | None,
        between: SideStream,
        *,
        goes_on: bool,
    ) -> None:
        self._rows, self.written, self._result = rows, written, result
        self._within, self._between = pending, between
        self._average, self._replicated = average, Pending()
        if goes_on:
            self._start_between()

    def go_on(self) -> None:
        """Let the current stream wait until the buffer was sent within the replica, and give up its memory."""
        self._within.wait()
        self._start_between()

    def complete(self) -> list[tuple[ShardedParameter, Tensor]]:
        """Wait for the mean of this rank's rows over all ranks and attach what this rank had a gradient of (`written`).

        Returns what it sent zeros for, with means that are attached if another rank has a gradient.
        """
        self.go_on()
        self._replicated.wait()
        for each, gradient in self._rows:
            if each in self.written:
                each.attach_gradient(gradient)
        return [row for row in self._rows if row[0] not in self.written]

    def _start_between(self) -> None:
        if self._average is not None:
            start, self._average = self._average([self._result]), None
            self._replicated = self._between.run(start, before=self._within.join)


class ReplicatedGradients:
    """Gradients of replicated parameters, averaged in one flat call, and with them which parameters were used at all.

    A parameter that no rank used keeps no gradient, as without sharding; one that some rank used has one on every rank.
    """

    def __init__(self, parameters: Iterable[ShardedParameter], process_group: ProcessGroup) -> None:
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
