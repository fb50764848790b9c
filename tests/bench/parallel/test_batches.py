"""Schemes are judged on one set of batches, whatever a workload's loader gives each rank; what is odd about them is
said as what it is."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tools.trust.planted.parallel import quick
from trainstep.base.config import StepConfig
from trainstep.base.schemes import SCHEMES
from trainstep.bench.parallel import ParallelCase
from trainstep.bench.parallel.batches import KEPT, Kept
from trainstep.bench.parallel.run import run_cases
from trainstep.parallel.process import AgreedError
from trainstep.rows.records import SoFar
from trainstep.step.batches import fingerprint
from trainstep.step.workload import Workload, WorkloadSource

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CONFIG = StepConfig(device="cpu")
SIZE = (4, 8)


def mean_square(out, batch):
    return (out - batch[1]).square().mean()


def labelled(inputs):
    return [(each, each.flip(-1)) for each in inputs]


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Unseeded:
    """Draws from a generator that starts elsewhere in every build."""

    def __iter__(self):
        generator = torch.Generator()
        generator.seed()
        while True:
            yield from labelled([torch.randn(SIZE, generator=generator)])


class MaskedBy(nn.Module):
    """Masks its inputs by numbers of numpy or of Python's own `random`, as wav2vec2 and some collators do."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.net = draw, net()

    def forward(self, x):
        return self.net(x * torch.tensor([[self.draw() < 0.5 for _ in row] for row in x.tolist()]))


class Skips(nn.Module):
    """Leaves out a layer at random (LayerDrop), and so its gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        x = self.first(x)
        return self.scale * (x if self.training and torch.rand(()) < 0.5 else self.second(x))


class Counts(nn.Module):
    """Cuts its batch by counts that float32 holds, as mixtures of experts do, and has no form in float64."""

    def __init__(self):
        super().__init__()
        self.net, self.other = net(), net()

    def forward(self, x):
        if x.dtype == torch.float64 or self.net[0].weight.dtype == torch.float64:
            raise RuntimeError("expected Float32, BFloat16 or Float16 matrix, got Double")
        classes = (torch.arange(x.shape[0]) % 2).float()
        ends = torch.cumsum(torch.histc(classes, bins=2, min=0, max=1), 0, dtype=torch.int32).tolist()
        assert ends[-1] == x.shape[0], "a row belongs to nobody"
        return torch.cat([self.net(x[: ends[0]]), self.other(x[ends[0] :])])


def padded(out, batch):
    """A mean over the rows that count, as many in a share as chance has it."""
    return F.mse_loss(out[batch[2]], batch[1][batch[2]])


def fails(out, batch):
    raise RuntimeError("no kernel for this")


def workload(process, what):
    torch.manual_seed(0)
    inputs = [torch.randn(SIZE) for _ in range(7)]
    batches = labelled(inputs)
    module, loss = net(), mean_square
    if what == "sharded":
        batches = batches[process.rank :: process.world_size]
    elif what == "unseeded":
        batches = Unseeded()
    elif what == "odd":
        batches = labelled([torch.randn(3, 8)])
    elif what in ("numpy", "python"):
        module = MaskedBy(np.random.rand if what == "numpy" else random.random)
    elif what == "skips":
        module = Skips()
    elif what == "counts":
        module = Counts()
    elif what == "padded":
        rows = torch.tensor([True, True, False, True])
        batches, loss = [(*each, rows) for each in batches], padded
    elif what == "fails":
        loss = fails
    return Workload(module, batches, loss, SGD)


def rows_of(process, whats, schemes, steps=1):
    found = {}
    for what in whats:
        source = WorkloadSource(what, lambda step, what=what: workload(process, what))
        cases = [ParallelCase(source, CONFIG, SCHEMES[name], warmup=1, steps=steps) for name in schemes]
        try:
            with quick():
                rows = [row for row in run_cases(cases, process) if not isinstance(row, SoFar)]
        except AgreedError as error:
            found[what] = str(error)
            continue
        found[what] = [row for row in rows if row.kind == "parallel"]
    return found


WHATS = ("plain", "sharded", "unseeded", "odd", "numpy", "python", "skips", "counts", "padded", "fails")


@pytest.fixture(scope="module")
def found(two):
    ranks = two.run(rows_of, WHATS, ("single", "flat", "sharded-optimizer", "fsdp", "torch-ddp"))
    assert ranks[1]["odd"] == ranks[0]["odd"], "all ranks stop for the same mistake"
    return ranks[0]


@pytest.mark.distributed
@pytest.mark.parametrize("what", [each for each in WHATS if each not in ("odd", "fails")])
def test_right_schemes_are_right(found, what):
    failed = {row.scheme: row.reason for row in found[what] if row.status != "ok"}
    if what == "skips":  # every rank must call the same blocks
        assert "the ranks are not at the same point" in failed.pop("fsdp")
    assert failed == {}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("what", "differ"), [("plain", False), ("sharded", True), ("unseeded", True), ("numpy", False)]
)
def test_a_loader_that_gives_every_rank_other_batches_is_named(found, what, differ):
    said = {row.batches for row in found[what]}
    assert len(said) == 1
    assert (said.pop() or "").startswith("rank 0's" if differ else "")


@pytest.mark.distributed
def test_a_loss_that_is_no_mean_over_equal_counts_is_named(found):
    assert all(row.share_difference < 1e-5 for row in found["plain"])
    assert all(row.share_difference > 0.05 for row in found["padded"])
    assert {row.share_difference for row in found["numpy"]} == {None}, "a share's masks are other ones than the whole's"


@pytest.mark.distributed
def test_a_batch_that_does_not_divide_stops_all_ranks_with_one_sentence(found):
    assert "(3, 8) cannot be divided among 2 ranks" in found["odd"]


@pytest.mark.distributed
def test_what_one_process_cannot_train_are_rows(found):
    assert {(row.status, row.step_ms) for row in found["fails"]} == {("failed", None)}
    assert all("one process could not train" in row.reason and "no kernel" in row.reason for row in found["fails"])


def test_batches_that_are_kept_are_given_as_copies():
    kept = Kept([torch.ones(2)])
    next(iter(kept)).zero_()
    assert next(iter(kept)).sum() == 2


def test_a_fingerprint_is_of_all_bits_types_and_shapes():
    one = (torch.arange(6.0), {"labels": torch.tensor([1, 2])})
    assert fingerprint(one) == fingerprint((torch.arange(6.0), {"labels": torch.tensor([1, 2])}))
    others = [
        (torch.arange(6.0).view(2, 3), one[1]), (torch.arange(6.0).double(), one[1]),
        (torch.arange(6.0) + 1e-6, one[1]), (one[0], {"labels": torch.tensor([2, 1])}), (one[0],),
    ]  # fmt: skip
    assert len({fingerprint(each) for each in (one, *others)}) == len(others) + 1
    assert fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(0))
    assert fingerprint(torch.zeros(2, dtype=torch.bfloat16)) != fingerprint(torch.zeros(2, dtype=torch.float16))
    assert KEPT == 5
