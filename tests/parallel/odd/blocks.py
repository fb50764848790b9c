"""What blocks take and return."""

import dataclasses
from collections import namedtuple
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tests.parallel.odd.nets import UNUSED, Block, net, plain, plain_block
from tests.parallel.odd.runs import WIDTH, Scenario, to_target

Pair = namedtuple("Pair", ("output", "extra"))


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: Tensor | None = None


def _penalised(net, x):
    """A penalty on what blocks return beside their output."""
    penalty = 0
    for block in net.blocks:
        x, weight = block(x)
        penalty = penalty + weight.norm()
    return x + 0.01 * penalty


def _keep_weight(block, x):
    block.__dict__["kept"] = [block.up.weight]
    return plain_block(block, x)


def _read_kept(net, x):
    y = plain(net, x)
    return y + 0.01 * sum(block.kept[0].norm() for block in net.blocks)


PACK = {
    "dictionary": lambda hidden, extra: {"hidden": hidden, "extra": [extra]},
    "named tuple": Pair,
    "dataclass": Output,
    "object": lambda hidden, extra: SimpleNamespace(hidden=hidden, extra=extra),
    "nested": lambda hidden, extra: (None, [Output(hidden, extra)]),
}


def _packed(kind):
    pack = PACK[kind]

    def unpack(packed):
        if kind == "dictionary":
            return packed["hidden"], packed["extra"][0]
        if kind == "nested":
            packed = packed[1][0]
        return packed if isinstance(packed, tuple) else (packed.hidden, packed.extra)

    def block(self, packed):
        x, extra = unpack(packed)
        y = plain_block(self, x)
        return pack(y, extra + y.mean())

    def body(net, x):
        packed = pack(x, x.sum() * 0)
        for block in net.blocks:
            packed = block(packed)
        return sum(unpack(packed))

    return net(block=block, body=body)


def _by_keywords(net, x):
    for block in net.blocks:
        x = block(x=x, scale=0.9)
    return x


class InPlace(Block):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        x.add_(self.shift)
        return super().forward(x)


def _first_without_gradients(net, x):
    first, *others = net.blocks
    with torch.no_grad():
        x = first(x)
    for block in others:
        x = block(x)
    return x


def _cut(net, x):
    a, b, c, d = net.blocks
    return d(c(b(a(x)).detach()))


SCENARIOS = {
    "returns its weight": Scenario(
        "a block that returns its weight",
        net(block=lambda block, x: (plain_block(block, x), block.up.weight), body=_penalised),
    ),
    "returns a view": Scenario(
        "a block that returns a view of its weight",
        net(block=lambda block, x: (plain_block(block, x), block.up.weight.t()[:, :WIDTH]), body=_penalised),
    ),
    "keeps its weight": Scenario(
        "a block that puts its weight aside, read later", net(block=_keep_weight, forward=_read_kept)
    ),
    "dictionary": Scenario("blocks that take and return dictionaries", _packed("dictionary")),
    "named tuple": Scenario("blocks that take and return named tuples", _packed("named tuple")),
    "dataclass": Scenario("blocks that take and return dataclasses", _packed("dataclass")),
    "object": Scenario("blocks that take and return objects", _packed("object")),
    "nested": Scenario("blocks that take and return a dataclass in a list in a tuple", _packed("nested")),
    "root dataclass": Scenario(
        "a model that returns a dataclass",
        net(forward=lambda net, x: Output(plain(net, x))),
        loss=lambda run, x: to_target(run.module(x).hidden, x),
    ),
    "keywords": Scenario(
        "blocks called with keywords only",
        net(block=lambda block, *, x, scale: plain_block(block, x) * scale, body=_by_keywords),
    ),
    "in place": Scenario("blocks that change their input in place", net(block=InPlace)),
    "no_grad block": Scenario("a block run without gradients", net(body=_first_without_gradients), settings=UNUSED),
    "detached between": Scenario("the graph is cut between blocks", net(body=_cut), settings=UNUSED),
}
