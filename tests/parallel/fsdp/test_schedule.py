"""Groups are gathered in time, few at a time; every collective has its bytes; ranks that part ways are found."""

import pytest
import torch
from torch import nn

from tests.parallel.fsdp.recorder import Recorder, halves, recorded
from tests.parallel.fsdp.training import descend
from tests.parallel.nets import batch
from trainstep.base.config import ModelConfig
from trainstep.base.errors import UsageError
from trainstep.checkpointing.recomputing import Checkpointing
from trainstep.parallel import FullyShardedDataParallel
from trainstep.parallel.fsdp.schedule import Agreement
from trainstep.step.model.transformer import build_transformer, cross_entropy

pytestmark = pytest.mark.distributed

LAYERS = 6
CONFIG = ModelConfig(vocab_size=24, d_model=16, num_layers=LAYERS, num_heads=2, d_ff=24, max_context=8)
"""Groups in order of use: the embedding, six blocks, the last norm (replicated, so not communicated), the head."""


def _record(process, settings, policy="none", steps=3, frozen=(), in_pairs=False):
    """The last of a few steps: its events, its messages, and most bytes gathered at a time."""
    torch.manual_seed(0)
    module = build_transformer(CONFIG)
    for name in frozen:
        module.get_submodule(name).requires_grad_(False)
    if in_pairs:
        settings = {**settings, "groups": [module.blocks[first : first + 2] for first in range(0, LAYERS, 2)]}
    sharded = FullyShardedDataParallel(module, **settings)
    Checkpointing(sharded.module, policy)
    for step in range(steps):
        tokens = batch(step, vocabulary=24).chunk(process.world_size)[process.rank]
        recorder = recorded(sharded, lambda net, tokens=tokens: cross_entropy(net(tokens[:, :-1]), tokens[:, 1:]))
    groups = [(group.full_bytes, [p.name for p in group.parameters]) for group in sharded._schedule.groups]
    return recorder.events, recorder.sent, recorder.most_gathered, groups


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathers_run_ahead_by_the_prefetch_and_no_further(two, prefetch):
    (events, _, most, groups), other = two.run(_record, {"prefetch": prefetch})
    assert events == other[0], "every rank does the same in the same order"
    forward, backward = halves(events)
    count = len(groups)
    assert [number for kind, number in forward if kind == "gather"] == list(range(count)), "each once, in order"
    for events_of, order in ((forward, list(range(count))), (backward, list(reversed(range(count))))):
        begun = -1  # uses begun so far
        for kind, number in events_of:
            if kind == "wait":
                begun = max(begun, order.index(number))
            if kind == "gather":
                ahead = order.index(number) - begun
                assert ahead <= prefetch + 1, f"{number} is gathered {ahead} before its use"
    kept = set(range(count - 1 - prefetch, count))
    assert {number for kind, number in forward if kind == "free"} == set(range(count)) - kept
    assert {number for kind, number in backward if kind == "gather"} == set(range(count)) - kept
    assert sorted(number for kind, number in backward if kind == "free") == list(range(count))
    largest = max(size for size, _ in groups)
    assert most <= (prefetch + 1) * largest, "as many at a time as run ahead, and the one that is used"
    events, _, most, _ = two.run(_record, {"prefetch": prefetch}, "none", 1)[0]
    assert [number for kind, number in halves(events)[0] if kind == "gather"] == list(range(count)), "at first, too"
    assert most <= (prefetch + 1) * largest


def test_what_backward_does_not_reach_is_not_gathered_for_it(two):
    frozen = ["embedding", "blocks.0", "blocks.1"]
    events, sent, _, groups = two.run(_record, {}, "none", 3, frozen)[0]
    _, backward = halves(events)
    assert [names[0].split(".w")[0] for _, names in groups[:1]] == ["embedding"]
    assert [number for kind, number in backward if kind == "gather"] == [5, 4, 3], "blocks 2 to 4 of 6 layers"
    assert [name for name, _ in sent].count("reduce_scatter_mean") == len(groups) - 4, "and the norm is replicated"


def elements(shapes):
    return sum(rows * columns for rows, columns in shapes)


BLOCK = elements([(16, 16)] * 4 + [(24, 16)] * 3)
EDGE = elements([(24, 16)])  # the embedding, and the head
GAINS = (2 * LAYERS + 1) * 16
PARAMETERS = LAYERS * 9 + 3


def test_a_block_computed_again_is_not_gathered_again(two):
    (_, plain, most, _), (_, again, most_again, _) = (two.run(_record, {}, policy)[0] for policy in ("none", "every-1"))
    assert again == plain
    assert most_again == most


def _no_sync(process):
    torch.manual_seed(0)
    sharded = FullyShardedDataParallel(build_transformer(CONFIG), compute_dtype=torch.bfloat16)
    tokens = batch(0, vocabulary=24).chunk(process.world_size)[process.rank]
    found = []
    for synchronised in (False, True):
        with Recorder(sharded._schedule.groups) as recorder:
            loss = cross_entropy(sharded(tokens[:, :-1]), tokens[:, 1:])
            if synchronised:
                loss.backward()
            else:
                with sharded.no_sync():
                    loss.backward()
        found.append(([entry for entry in recorder.sent if entry[0] != "all_gather_slices"], recorder.of("free")))
    sharded.finish_gradient_synchronization()
    return found, len(sharded._schedule.groups)


def test_no_sync_sends_no_gradients_and_frees_all_the_same(two):
    (without, synchronised), count = two.run(_no_sync)[0]
    assert without[0] == []
    assert sorted(set(without[1])) == list(range(count))
    assert [name for name, _ in synchronised[0]] == ["reduce_scatter_mean"] * (LAYERS + 2), "added up in float32"
    assert sum(size for _, size in synchronised[0]) == 4 * (LAYERS * BLOCK + 2 * EDGE)


@pytest.mark.parametrize("policy", ["none", "every-1"])
def test_blocks_gathered_together_are_gathered_once_for_all_of_their_calls(two, policy):
    (events, sent, most, groups), other = two.run(_record, {}, policy, 3, (), True)
    assert events == other[0]
    count = 3 + LAYERS // 2
    assert len(groups) == count
    forward, backward = halves(events)
    for half in (forward, backward):
        assert all(kinds.count(number) <= 1 for kinds in _by_kind(half) for number in kinds)
    kept = {count - 1, count - 2, count - 3}
    assert [number for kind, number in forward if kind == "gather"] == list(range(count))
    assert {number for kind, number in forward if kind == "free"} == set(range(count)) - kept
    assert [number for kind, number in backward if kind == "gather"] == [2, 1, 0]
    assert [size for name, size in sent if name == "reduce_scatter_mean"] == [
        4 * EDGE,
        *[4 * 2 * BLOCK] * (LAYERS // 2),
        4 * EDGE,
    ]
    assert most <= 3 * max(size for size, _ in groups)


def _by_kind(events):
    return [[number for what, number in events if what == kind] for kind in ("gather", "free")]


class Named(nn.Module):
    """Calls the blocks of these numbers, one after another."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, numbers):
        for number in numbers:
            x = self.blocks[number](x).relu()
        return x


PASSES = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3), (0, 1, 2), (0, 1, 0, 1, 3), (0, 0, 2, 3), (0, 1, 2, 3)]


def _named(process, in_pairs):
    """Parameters after these passes, and how many groups were gathered when each call had begun."""
    torch.manual_seed(0)
    module, gathered = Named(), []
    groups = [module.blocks[:2], module.blocks[2:]] if in_pairs else None
    sharded = FullyShardedDataParallel(module, groups=groups, prefetch=0)
    for block in module.blocks:
        block.register_forward_pre_hook(
            lambda *_: gathered.append(sum(g.is_gathered for g in sharded._schedule.groups))
        )
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(process.rank))
    return descend(sharded, (sharded(x, numbers).square().sum() for numbers in PASSES)), gathered


def test_a_pass_with_other_calls_than_the_last_is_right_and_keeps_no_more(two):
    """Of blocks gathered together the second is left out, called twice, or called later."""
    apart, together = (two.run(_named, in_pairs) for in_pairs in (False, True))
    for (expected, _), (found, gathered) in zip(apart, together, strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert gathered == [1] * sum(map(len, PASSES))


class Reading(nn.Module):
    """Between the calls of `first` and `second` it reads the first one's weight; the second's output is not used."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, *, stop=False):
        inner = self.first(x)
        if stop:
            return inner
        outer = nn.functional.linear(inner * 2, self.first.weight)
        self.second(inner)
        return outer + self.last(x)


def _reading(process, together):
    torch.manual_seed(0)
    module = Reading()
    groups = [[module.first, module.second], module.last] if together else [module.first, module.second, module.last]
    sharded = FullyShardedDataParallel(module, groups=groups, prefetch=0)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(process.rank))
    trained = descend(sharded, (sharded(x).square().sum() for _ in range(3)))
    with torch.no_grad():
        for stop in (False, False, True):
            sharded(x, stop=stop)
    gathered = [group.is_gathered for group in sharded._schedule.groups]
    with pytest.raises(UsageError, match=r"sum of first\.weight, which is sharded: a rank has only"):
        module.first.weight.sum()
    return trained, gathered


def test_what_is_kept_for_the_next_call_is_read_in_between_and_freed_if_none_comes(two):
    apart, together = (two.run(_reading, each) for each in (False, True))
    for (expected, _), (found, gathered) in zip(apart, together, strict=True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert not any(gathered), "a forward that stops after the first call"


class Unheaded(nn.Module):
    """Returns what its heads are given: the loss calls them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x


def _heads_outside(process, heads, prefetch):
    """The events of steps whose loss calls these heads, and of a last forward without a loss."""
    torch.manual_seed(0)
    sharded = FullyShardedDataParallel(Unheaded(), prefetch=prefetch)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(process.rank))

    def loss_of(net):
        hidden = net(x)
        return sum(net.module.heads[number](hidden).square().sum() for number in heads)

    taken = [recorded(sharded, loss_of).events for _ in range(3)]
    for _ in range(2):
        sharded(x)
    return taken, [group.is_gathered for group in sharded._schedule.groups]


@pytest.mark.parametrize(("heads", "prefetch"), [((0,), 2), ((0, 1), 2), ((0, 0), 1), ((1,), 0)])
def test_what_the_loss_calls_after_forward_is_gathered_once(two, heads, prefetch):
    """Gathered ahead, it was freed when forward ended, and gathered again when the loss called it."""
    taken, left = two.run(_heads_outside, heads, prefetch)[0]
    for events in taken[1:]:  # the first has no order to go by
        forward, _ = halves(events)
        gathered = [number for kind, number in forward if kind == "gather"]
        assert gathered == [0, 1, 2, *(3 + head for head in dict.fromkeys(heads))], "each once, in order"
        last = ("gather", 3 + heads[-1])
        assert prefetch == 0 or last not in events[len(forward) :], "kept from forward, for all of its calls"
    assert not any(left[3:]), "where no loss called it, it is freed with the next forward"


SAME = [("gather", 0), ("gather", 1), ("send", 1), ("finish", -1)]
OTHER = {  # by how a rank differs
    "order": [("gather", 1), ("gather", 0), ("send", 1), ("finish", -1)],
    "one less": [("gather", 0), ("send", 1), ("finish", -1)],
    "another act": [("gather", 0), ("gather", 1), ("gather", 1), ("finish", -1)],
}
POINT = "rank 0 comes to gather blocks.0, rank 1 comes to gather blocks.1"
DIFFER = "did not gather the same groups of parameters in the same order"


def _passes(process, at_once, passes):
    """What is said in each pass; a pass is the acts of each rank, and whether its answer is waited for."""
    agreement, said = Agreement(process.group, ["blocks.0", "blocks.1"], at_once=at_once), []
    for of_ranks, wait in passes:
        try:
            for act, group in of_ranks[process.rank]:
                agreement.announce(act, group)
            agreement.end_pass()
            if wait:
                agreement.compare(wait=True)
            said.append("nothing")
        except UsageError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("at_once", "differ", "wait", "told"),
    [
        (True, None, True, []),
        (False, None, True, []),
        (True, "order", True, [POINT]),
        *((False, how, True, [DIFFER, "nothing"]) for how in OTHER),
        (False, "order", False, ["nothing", DIFFER]),  # the answer of a pass is looked at in the next one
    ],
)
def test_every_rank_says_where_ranks_differ(two, at_once, differ, wait, told):
    passes = [((SAME, OTHER.get(differ, SAME)), wait), ((SAME, SAME), True)]
    by_rank = two.run(_passes, at_once, [((SAME, SAME), True), *(passes[:1] if at_once else passes)])
    assert by_rank[0] == by_rank[1]
    for said, expected in zip(by_rank[0], ["nothing", *told] if told else ["nothing"] * len(by_rank[0]), strict=True):
        assert expected in said
