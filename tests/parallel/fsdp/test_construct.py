"""Construction: every rank gets rank 0's values, from the meta device too, and never holds the whole model."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.nets import Net, build
from trainstep.base.config import ModelConfig
from trainstep.base.errors import UsageError
from trainstep.parallel import FullyShardedDataParallel
from trainstep.step.model.transformer import build_transformer, init_module

pytestmark = pytest.mark.distributed

CONFIG = ModelConfig(vocab_size=40, d_model=32, num_layers=6, num_heads=2, d_ff=64, max_context=8)


class PeakBytes(TorchDispatchMode):
    """The most bytes in storages that were alive after any operation; storages that were resized count as they are."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages = weakref.WeakSet()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self._storages.add(leaf.untyped_storage())
        live = {storage.data_ptr(): storage.nbytes() for storage in self._storages}
        self.peak = max(self.peak, sum(live.values()))
        return result


def _from_meta(process):
    """The same weights as without sharding, and the most memory that construction took."""
    torch.manual_seed(3)
    with PeakBytes() as memory:
        module = build_transformer(CONFIG, device="meta")
        sharded = FullyShardedDataParallel(module, compute_dtype=torch.bfloat16, initialize=init_module)
    group = max(group.full_bytes for group in sharded._schedule.groups)
    shards = sum(parameter.shard.nbytes for parameter in sharded.sharded_parameters())
    largest = max(parameter.shape.numel() * 4 for parameter in sharded.sharded_parameters())
    with torch.no_grad():
        logits = sharded(torch.zeros(1, 8, dtype=torch.long))
    return memory.peak, shards, group, largest, sharded.gather_full_parameters(), logits


def test_from_meta_no_rank_holds_the_model(two):
    torch.manual_seed(3)
    plain = build_transformer(CONFIG)
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    for peak, shards, group, largest, full, logits in two.run(_from_meta):
        assert 0.5 * whole <= shards < 0.51 * whole
        # Beside the shards: one matrix in full with the three temporaries of trunc_normal_, or one group's layout.
        assert shards <= peak <= shards + max(4 * largest, group) + 2048
        assert peak < 0.75 * whole
        for name, parameter in plain.named_parameters():
            assert torch.equal(full[name], parameter), name
        assert logits.isfinite().all(), "the rotary tables are there too"


class Custom(nn.Module):
    """Parameters without `reset_parameters`."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3, 3))


def _defaults(process):
    """`reset_parameters` of torch's own modules; a tied weight; a module that cannot be initialised."""
    torch.manual_seed(process.rank)  # rank 0's values count
    with torch.device("meta"):
        module = Net(tied=True)
        module.position = None
        module.scale = None
        lone = Custom()
    try:
        FullyShardedDataParallel(lone)
        message = "built"
    except UsageError as error:
        message = str(error)
    module.position = nn.Parameter(torch.zeros(8, 12))
    sharded = FullyShardedDataParallel(module)
    tied = sharded.module.head.weight is sharded.module.embedding.weight
    return message, tied, sharded.gather_full_parameters()


def test_reset_parameters_and_what_cannot_be_initialised(two):
    (message, tied, first), (_, _, second) = two.run(_defaults)
    assert "the module (Custom) is on the meta device and has no reset_parameters(); give initialize=" in message
    assert tied
    torch.manual_seed(0)
    with torch.device("meta"):
        Net(tied=True)
    assert all(torch.equal(first[name], second[name]) for name in first), "rank 0's values on all ranks"
    assert first["embedding.weight"].std() > 0.5, "an embedding's own initialisation, not the head's"
    assert first["head.weight"] is first["embedding.weight"] or torch.equal(
        first["head.weight"], first["embedding.weight"]
    )


def _ranks_differ(process):
    module = build(seed=process.rank)
    module.scale.fill_(process.rank + 2.0)
    marked = module.head.weight
    marked.mark = "kept"
    sharded = FullyShardedDataParallel(module)
    shard = sharded.module.head.weight
    kind = [type(sharded.module) is Net, type(sharded.module).__name__]
    return sharded.gather_full_parameters(), sharded.module.scale, marked.numel(), shard.mark, kind


def test_parameters_and_buffers_are_rank_0s(two):
    plain = build(seed=0)
    for full, scale, left, mark, kind in two.run(_ranks_differ):
        assert all(torch.equal(full[name], parameter) for name, parameter in plain.named_parameters())
        assert scale == 2.0
        assert left == 0, "the whole parameter's memory is given back"
        assert mark == "kept"
        assert kind == [False, "Net"], "a subclass of the same name"
