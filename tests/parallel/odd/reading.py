"""Weights that are read, or changed, outside of the forward of the module that owns them."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.odd.nets import Block, Net, net, plain, plain_block
from tests.parallel.odd.runs import WIDTH, Scenario, mean_loss

position_read = {
    "position": lambda: nn.Embedding(16, WIDTH),
    "forward": lambda net, x: plain(net, x + net.position.weight[: x.shape[0]]),
}


def _without_head(net):
    del net.head


def _without_norm_and_head(net):
    del net.head, net.norm


def _hidden(net, x):
    return net.norm(net.body(net.first(x)))


def _kept_transpose(net, x):
    transposed = net.first.weight.t()
    return net.body(net.first(x)) @ transposed


def _read_in_checkpoint(net, x):
    return checkpoint(lambda x: F.linear(x, net.first.weight), _hidden(net, x), use_reentrant=False)


def _norm_before_use(net, x):
    penalty = 0.1 * net.blocks[0].down.weight.norm() + 0.1 * net.head.weight.norm()
    return plain(net, x) + penalty


def _norm_of_what_was_just_used(net, x):
    y = plain(net, x)
    return y + 0.1 * net.head.weight.norm() + 0.1 * net.blocks[-1].up.weight.norm()


def _list_of_weights(net, x):
    weights = [block.up.weight for block in net.blocks]
    return net.head(_hidden(net, x)) + 0.01 * torch.stack([w.norm() for w in weights]).sum()


class ReaderBlock(Block):
    """Uses a neighbour's weight, which it does not own."""

    def forward(self, x):
        other = self.__dict__.get("other")
        return super().forward(x) + (0 if other is None else F.linear(x, other.down.weight @ other.up.weight))


def _read_others(net):
    net.blocks[2].__dict__["other"] = net.blocks[0]
    net.blocks[1].__dict__["other"] = net.blocks[3]


def _read_root(net):
    for block in net.blocks:
        block.__dict__["other"] = _Late(net.__dict__)


class _Late:
    """Looks the root's weight up when it is asked."""

    def __init__(self, root):
        self._root = root
        self.down = SimpleNamespace(weight=torch.eye(WIDTH))

    @property
    def up(self):
        return SimpleNamespace(weight=self._root["_parameters"]["gate"])


def _clamped(weight):
    with torch.no_grad():
        weight.clamp_(-0.2, 0.2)


def _change_another(net, x):
    _clamped(net.head.weight)
    return plain(net, x)


def _change_itself(block, x):
    _clamped(block.up.weight)
    return plain_block(block, x)


def head_in_loss(run, x):
    """The loss uses the head's weight, as chunked losses do."""
    return mean_loss(run, x) + F.linear(run.module(x), run.inner.head.weight).pow(2).mean()


def _norms(of):
    return lambda run, x: mean_loss(run, x) + 0.1 * sum(each.norm() for each in of(run))


SCENARIOS = {
    "tied by assignment": Scenario(
        "a tied weight, `head.weight = first.weight`",
        net(then=lambda net: setattr(net.head, "weight", net.first.weight)),
    ),
    "tied by reading": Scenario(
        "tied heads as `F.linear(x, self.first.weight)`",
        net(then=_without_head, forward=lambda net, x: F.linear(_hidden(net, x), net.first.weight)),
    ),
    "position read": Scenario("`x + self.position.weight[:T]`", net(**position_read)),
    "mean read": Scenario(  # broadcast, so that no shape tells a shard from the whole
        "`x + self.mask.weight.mean(0)`",
        net(mask=lambda: nn.Embedding(2, WIDTH), forward=lambda net, x: plain(net, x + net.mask.weight.mean(0))),
    ),
    "decay in forward": Scenario(
        "a penalty on all of `self.parameters()` in forward",
        net(forward=lambda net, x: plain(net, x) + 0.01 * sum(each.pow(2).sum() for each in net.parameters())),
    ),
    "norm in forward": Scenario(
        "a norm of a block's weight in forward",
        net(forward=lambda net, x: plain(net, x) + 0.1 * net.blocks[1].up.weight.norm()),
    ),
    "norm before use": Scenario("norms of weights before their owners are called", net(forward=_norm_before_use)),
    "norm after use": Scenario(
        "norms of weights whose owners were called just before", net(forward=_norm_of_what_was_just_used)
    ),
    "weights in a list": Scenario("weights put aside before the blocks run, used after", net(forward=_list_of_weights)),
    "block reads another": Scenario(
        "a block that reads another block's weight", net(block=ReaderBlock, then=_read_others)
    ),
    "block reads the root": Scenario(
        "blocks that read a parameter of the whole model",
        net(block=ReaderBlock, gate=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), then=_read_root),
    ),
    "read in a checkpoint": Scenario(
        "a weight read in a checkpointed function", net(then=_without_head, forward=_read_in_checkpoint)
    ),
    "kept transpose": Scenario(
        "a transposed weight put aside", net(then=_without_norm_and_head, forward=_kept_transpose)
    ),
    "changed by another": Scenario(
        "a weight changed in place by another module's forward", net(forward=_change_another)
    ),
    "changed by itself": Scenario("a weight changed in place by its own block's forward", net(block=_change_itself)),
    "penalty in the loss": Scenario(  # elementwise: each element's gradient depends on that element
        "Σ p² of the wrapper's parameters in the loss",
        Net,
        loss=lambda run, x: mean_loss(run, x) + 0.01 * sum(each.pow(2).sum() for each in run.parameters()),
    ),
    "norms in the loss": Scenario(
        "Σ ‖p‖ of the wrapper's parameters in the loss", Net, loss=_norms(lambda run: run.parameters())
    ),
    "inner norms in the loss": Scenario(
        "Σ ‖p‖ of the module's parameters in the loss", Net, loss=_norms(lambda run: run.inner.parameters())
    ),
    "head in the loss": Scenario("a loss that uses the head's weight", Net, loss=head_in_loss),
}
