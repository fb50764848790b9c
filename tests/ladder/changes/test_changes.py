"""Each change made from outside, in this process."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainstep.ladder.changes import attention, compiling, loaders, optimizer, precision
from trainstep.ladder.changes.debugging import without_debugging


class Trial:
    def __init__(self):
        self.on_first_call = []

    def sees(self, model):
        for change in self.on_first_call:
            change(model)


@pytest.fixture
def trial(monkeypatch):
    """A run that is no process: what changes replace is put back."""
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, DataLoader):
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    return Trial()


def test_optimizers_are_fused_where_the_script_says_nothing(trial):
    optimizer.fused_optimizers(trial)
    assert "Adam" not in optimizer.FUSED.line.code, "scripts have classes of their own"
    weights = [nn.Parameter(torch.ones(2))]
    for kind in (torch.optim.AdamW, torch.optim.Adam, functools.partial(torch.optim.SGD, lr=0.1)):
        assert kind(weights).defaults["fused"]
        assert not kind(weights, foreach=True).defaults["fused"]
        assert not kind(weights, capturable=True).defaults["fused"] if kind is torch.optim.Adam else True


def test_loaders_with_few_workers_get_more(trial, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {2, 4, 7})

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    loaders.workers(trial)
    data = TensorDataset(torch.arange(8))
    for loader in (DataLoader(data), DataLoader(data, num_workers=1), DataLoader(data, 2, False, None, None, 0)):
        assert loader.num_workers == 3
        assert not loader.persistent_workers
    assert DataLoader(data, num_workers=1, persistent_workers=True).persistent_workers, "as the script has it"
    assert DataLoader(data, num_workers=5).num_workers == 5
    assert DataLoader(Stream()).num_workers == 0, "each worker would repeat it"


def test_debugging_stays_off(trial, monkeypatch):
    of_torch = [(torch, name) for name in ("set_anomaly_enabled", "use_deterministic_algorithms")]
    for owner, name in (*of_torch, (dist, "set_debug_level"), (dist, "set_debug_level_from_env")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    without_debugging(trial)
    torch.use_deterministic_algorithms(True)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with torch.autograd.detect_anomaly():
        on = torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled()
    assert (*on, dist.get_debug_level()) == (False, False, dist.DebugLevel.OFF)


class OfEpoch(Dataset):
    """What it gives depends on the epoch that it was told."""

    epoch = 0

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return 10 * self.epoch + place


def test_workers_see_what_the_script_does_to_its_data_between_epochs(trial, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    loaders.workers(trial)
    data = OfEpoch()
    loader, found = DataLoader(data, batch_size=4), []
    for data.epoch in range(2):
        found += [batch.tolist() for batch in loader]
    assert loader.num_workers == 2
    assert found == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_autocast_is_around_the_model_and_results_are_float32(trial):
    precision.bf16_autocast(trial)
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            seen.append(y.dtype)
            return {"y": y, "n": [y.sum(), 3]}

    model = Model()
    trial.sees(model)
    result = model(torch.ones(2, 4))
    assert seen == [torch.bfloat16]
    assert (result["y"].dtype, result["n"][0].dtype, result["n"][1]) == (torch.float32, torch.float32, 3)


def test_what_is_compiled_is_compiled_once_for_any_size(trial, monkeypatch):
    monkeypatch.setattr(torch, "compile", torch.compile)  # put back
    torch.compiler.reset()
    compiling.any_sizes(trial)
    counts = []
    function = torch.compile(lambda x: x.sin() + 1, dynamic=False, backend=counting(counts))
    decorated = torch.compile(backend=counting(counts))(lambda x: x.cos() + 1)

    class Twice(nn.Module):
        def forward(self, x):
            return 2 * x

    module = Twice()
    module.compile(dynamic=False, backend=counting(counts))
    for place, compiled in enumerate((function, decorated, module)):
        for size in (3, 4, 5):
            compiled(torch.zeros(size, 2))
        assert len(counts) == place + 1
    torch.compiler.reset()


@pytest.mark.parametrize("compiles", [True, False])
def test_cuda_graphs_are_for_what_the_script_compiles_or_else_for_its_models(compiles, trial, monkeypatch):
    told = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: told.append(options) or model)
    compiling.models_in_graphs(trial)
    if compiles:
        torch.compile(torch.nn.Linear(2, 2), mode="default", dynamic=False)
    for model in (torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)):
        for first_call in trial.on_first_call:
            first_call(model)
    own = [{"mode": "reduce-overhead", "dynamic": False}]
    assert told == (own if compiles else [{"mode": "reduce-overhead"}] * 2)


def counting(counts):
    def backend(graph, inputs):
        counts.append(1)
        return graph.forward

    return backend


@pytest.mark.parametrize(
    ("shapes", "options", "is_ours"),
    [
        (((2, 4, 6, 8), (2, 4, 6, 8)), {"is_causal": True}, True),
        (((2, 4, 6, 8), (2, 2, 6, 8)), {"is_causal": True, "enable_gqa": True}, True),
        (((2, 4, 6, 8), (2, 1, 9, 8)), {"scale": 0.3, "enable_gqa": True}, True),
        (((2, 4, 6, 8), (2, 4, 9, 8)), {}, True),
        (((2, 4, 9, 8), (2, 4, 6, 8)), {"is_causal": True}, True),
        (((3, 2, 4, 6, 8), (3, 2, 2, 6, 8)), {"enable_gqa": True}, True),
        (((4, 6, 8), (4, 7, 8)), {}, True),
        (((6, 8), (7, 8)), {}, True),
        (((2, 4, 6, 8), (1, 4, 6, 8)), {}, False),  # a batch of one for many
        (((2, 4, 6, 8), (2, 1, 6, 8)), {}, False),  # a head of one for many
        (((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 5)), {}, False),
        (((2, 4, 6, 8), (2, 4, 6, 8)), {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()}, False),
    ],
)
def test_our_attention_takes_what_the_kernels_take(shapes, options, is_ours, trial, monkeypatch):
    """On a CPU, with the plain formula in the kernels' place."""
    from trainstep.attention import api
    from trainstep.attention.eager import attention_eager

    seen = []

    def plain(q, k, v, scoring):
        seen.append(tuple(k.shape))
        return attention_eager(q, k, v, scoring)

    monkeypatch.setitem(api._BY_NAME, "flash-triton", plain)
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
    shapes = (*shapes, shapes[1]) if len(shapes) == 2 else shapes
    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    expected = F.scaled_dot_product_attention(*leaves, **options)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    attention.our_attention(trial)
    found = F.scaled_dot_product_attention(*leaves, **options)
    assert seen == ([shapes[1]] if is_ours else []), "and keys are not expanded"
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected)]
    torch.testing.assert_close(*gradients)
