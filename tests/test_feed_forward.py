"""The formulas of one feed-forward layer, against ranks that hold shards, hand chunks around rings and count."""

import numpy as np
import pytest
import torch

from examples.feed_forward import AXES, COLUMNS, PRODUCTS, FeedForward, table
from tables.plan import BYTES_PER_S, FLOPS_PER_S
from tests.plan.test_communication import Ranks
from trainstep.base.errors import UsageError
from trainstep.plan.limits import best_mesh_tokens, intensity

ELEMENT_BYTES = 2  # what the formulas say of an element that travels; the simulation computes in float64 to be exact


class Simulated:
    """The layer on a mesh of X × Y ranks: the batch over X, d_ff over Y. With `fsdp` each rank's weights over X too."""

    def __init__(self, x, weights, data, tensor, *, fsdp):
        self.mesh = [(j, i) for j in range(data) for i in range(tensor)]
        self.data, self.tensor, self.fsdp = data, tensor, fsdp
        self.x = dict(enumerate(np.split(x, data)))
        cut = [np.split(w, tensor, axis=axis) for w, axis in self.shards_of(weights)]
        whole = {(j, i): [parts[i] for parts in cut] for j, i in self.mesh}
        self.held = {
            (j, i): [np.split(w, data, axis=1 - axis)[j] if fsdp else w for w, axis in self.shards_of(own)]
            for (j, i), own in whole.items()
        }

    @staticmethod
    def shards_of(weights):
        """Each matrix with the dimension that tensor parallelism cuts: rows of the last, columns of the others."""
        return [(w, 0 if w is weights[-1] else 1) for w in weights]

    def over_data(self, collective, held, axes):
        """A collective of each matrix among the ranks with the same place in tensor parallelism."""
        out = {rank: [] for rank in self.mesh}
        for i in range(self.tensor):
            for k, axis in enumerate(axes):
                group = {(j, i): held[j, i][k] for j in range(self.data)}
                for rank, tensor in collective(group, axis).items():
                    out[rank].append(tensor)
        return out

    def over_tensor(self, ranks, held):
        """The sum of what the ranks with the same tokens have."""
        out = {}
        for j in range(self.data):
            out |= ranks.all_reduce({(j, i): held[j, i] for i in range(self.tensor)}, axis=1)
        return out

    def gathered(self, ranks):
        """Weights as forward and backward use them; the dimension that fsdp cuts is the one that tensor leaves."""
        axes = [1 - axis for _, axis in self.shards_of(self.held[0, 0])]
        return self.over_data(ranks.all_gather, self.held, axes) if self.fsdp else self.held

    def forward(self, weights_by, activations_by):
        """x_k = x W_k;  z = f(x_1) * x_2 * …;  y = all-reduce(z W_last). The counts are of weights and activations."""
        self.saved, partial = {}, {}
        for rank, (*into, last) in self.gathered(weights_by).items():
            hidden = [activations_by.product(rank, self.x[rank[0]], w) for w in into]
            z = np.prod([silu(hidden[0]), *hidden[1:]], axis=0)
            self.saved[rank] = hidden, z
            partial[rank] = activations_by.product(rank, z, last)
        return self.over_tensor(activations_by, partial)

    def backward(self, dy, weights_by, activations_by):
        """The equations of notebook/theory.md: (dx by rank, gradients of what each rank holds)."""
        dy = dict(enumerate(np.split(dy, self.data)))
        partial, gradients = {}, {}
        count = activations_by.product
        for rank, (*into, last) in self.gathered(weights_by).items():
            x, (hidden, z) = self.x[rank[0]], self.saved[rank]
            dz = count(rank, dy[rank[0]], last.T)
            factors = [silu(hidden[0]), *hidden[1:]]
            d_hidden = [dz * np.prod([np.ones_like(dz), *factors[:k], *factors[k + 1 :]], 0) for k in range(len(into))]
            d_hidden[0] = d_hidden[0] * silu_slope(hidden[0])
            partial[rank] = sum(count(rank, d, w.T) for d, w in zip(d_hidden, into, strict=True))
            gradients[rank] = [*(count(rank, x.T, d) for d in d_hidden), count(rank, z.T, dy[rank[0]])]
        dx = self.over_tensor(activations_by, partial)
        collective = weights_by.reduce_scatter if self.fsdp else weights_by.all_reduce
        axes = [1 - axis for _, axis in self.shards_of(self.held[0, 0])]
        return dx, self.over_data(collective, gradients, axes)


def silu(x):
    return x / (1 + np.exp(-x))


def silu_slope(x):
    sigmoid = 1 / (1 + np.exp(-x))
    return sigmoid * (1 + x * (1 - sigmoid))


def unsharded(x, weights, dy):
    """The oracle, by autograd: y, dx and every matrix's gradient."""
    x, *weights = (torch.tensor(each, requires_grad=True) for each in (x, *weights))
    z = torch.nn.functional.silu(x @ weights[0])
    for w in weights[1:-1]:
        z = z * (x @ w)
    y = z @ weights[-1]
    y.backward(torch.tensor(dy))
    return y.detach().numpy(), x.grad.numpy(), [w.grad.numpy() for w in weights]


MESHES = [
    ("data", 1, 1), ("data", 3, 1), ("data", 4, 1), ("fsdp", 2, 1), ("fsdp", 6, 1), ("tensor", 1, 2), ("tensor", 1, 4),
    ("fsdp × tensor, overlapped", 2, 3), ("fsdp × tensor, one after the other", 4, 2),
]  # fmt: skip
B, D, F = 24, 12, 48


@pytest.mark.parametrize("matrices", [2, 3, 4])
@pytest.mark.parametrize(("axis", "data", "tensor"), MESHES)
def test_ranks_compute_and_send_what_the_formulas_say(axis, data, tensor, matrices):
    """FLOPs and bytes of every rank are exact. Outputs and gradients are those of the layer in one piece."""
    random = np.random.default_rng(0)
    weights = [random.normal(size=(D, F)) for _ in range(matrices - 1)] + [random.normal(size=(F, D))]
    x, dy = random.normal(size=(B, D)), random.normal(size=(B, D))
    layer, simulated = (
        FeedForward(B, D, F, 1e15, 1e11, matrices),
        Simulated(x, weights, data, tensor, fsdp="fsdp" in axis),
    )
    y, dx, gradients = unsharded(x, weights, dy)
    results = {}
    for phase in ("forward", "backward"):
        moved, computed = Ranks(), Ranks()  # weights and their gradients; activations
        step = (moved, computed) if phase == "forward" else (dy, moved, computed)
        results[phase] = getattr(simulated, phase)(*step)
        for rank in simulated.mesh:
            assert computed.flops[rank] == layer.flops(phase, data * tensor)
            sent = moved.sent[rank] * ELEMENT_BYTES, computed.sent[rank] * ELEMENT_BYTES
            assert sent == layer.sent(axis, phase, data, tensor)
    for j, i in simulated.mesh:
        own = slice(B // data * j, B // data * (j + 1))
        np.testing.assert_allclose(results["forward"][j, i], y[own], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(results["backward"][0][j, i], dx[own], rtol=1e-9, atol=1e-9)
        for (whole, axis_of), got in zip(simulated.shards_of(gradients), results["backward"][1][j, i], strict=True):
            shard = np.split(whole, tensor, axis=axis_of)[i]
            shard = np.split(shard, data, axis=1 - axis_of)[j] if simulated.fsdp else shard
            np.testing.assert_allclose(got, shard, rtol=1e-9, atol=1e-8)


LAYERS = [FeedForward(2**19, 4096, 11008, 989e12, 450e9), FeedForward(2**14, 16384, 53248, FLOPS_PER_S, BYTES_PER_S, 2)]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_gpu_more_than_the_most_is_limited_by_communication(layer, phase):
    for axis in AXES[:3]:
        if (most := layer.most_gpus(axis, phase)) is None:
            assert (axis, phase) == ("data", "forward"), "which sends nothing"
            continue
        for gpus, bound in ((int(most), False), (int(most) + 1, True)):
            mesh = (1, gpus) if axis == "tensor" else (gpus, 1)
            seconds = layer.communication_s(axis, phase, *mesh)
            assert (seconds > layer.compute_s(phase, gpus)) is bound
        assert most == 1 + layer.limit(axis, phase), "a ring sends (N − 1)/N of what a long one does"


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("axis", AXES[3:])
def test_no_mesh_goes_beyond_the_best(layer, phase, axis):
    most = layer.most_gpus(axis, phase)
    over = [
        layer.communication_s(axis, phase, most / y, y) / layer.compute_s(phase, most) for y in np.linspace(1, 60, 4000)
    ]
    assert 1 - 1e-9 <= min(over) < 1 + 1e-3
    assert layer.limit(axis, phase) < most


def test_three_matrices_and_two():
    """The course's answers: 2026 has three matrices, 2025 two."""
    alpha, three, two = 4e14 / 1e11, *(FeedForward(10**6, 5000, 16_000, 4e14, 1e11, matrices) for matrices in (3, 2))
    assert three.limit("data", "backward") == three.limit("fsdp", "forward") == 10**6 / alpha
    for layer, m in ((three, 3), (two, 2)):
        assert layer.limit("tensor", "forward") == pytest.approx(m * 16_000 / (2 * alpha))
        assert layer.limit("tensor", "backward") == pytest.approx(m * 16_000 / alpha)
        whole = m * 10**6 * 16_000 / (2 * alpha**2)
        assert layer.limit("fsdp × tensor, overlapped", "forward") == pytest.approx(whole)
        assert layer.limit("fsdp × tensor, overlapped", "backward") == pytest.approx(2 * whole)
        assert layer.limit("fsdp × tensor, one after the other", "forward") == pytest.approx(whole / 4)
    assert [three.formula("tensor", phase) for phase in ("forward", "backward")] == ["3F/2α", "3F/α"]
    assert [two.formula("tensor", phase) for phase in ("forward", "backward")] == ["F/α", "2F/α"]
    assert three.formula("fsdp × tensor, overlapped", "forward") == "3BF/2α²"
    assert three.formula("fsdp × tensor, one after the other", "forward") == "3BF/8α²"
    assert three.formula("data", "forward") is None


@pytest.mark.parametrize("axis", AXES[3:])
def test_two_matrices_are_the_mesh_of_the_plan_before(axis):
    """`plan.limits` counts tokens per GPU in the forward pass of D × F and F × D."""
    alpha, layer = intensity(FLOPS_PER_S, BYTES_PER_S), LAYERS[1]
    needs = best_mesh_tokens(alpha, layer.d_ff, overlapped=axis == AXES[3])
    assert layer.limit(axis, "forward") == pytest.approx(layer.tokens / needs)


def test_where_one_axis_alone_is_best():
    """Few tokens leave fsdp nothing to hide behind: TP alone, one rank of FSDP."""
    layer = FeedForward(100, 4096, 11008, 989e12, 450e9)
    sequential = layer.most_gpus("fsdp × tensor, one after the other", "forward")
    assert sequential == layer.most_gpus("tensor", "forward")
    wide = FeedForward(2**20, 4096, 100, 989e12, 450e9)
    assert wide.most_gpus("fsdp × tensor, one after the other", "forward") == wide.most_gpus("fsdp", "forward")


def test_the_table_has_the_best_mesh_and_names_what_communication_limits():
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in table(LAYERS[0], 64).texts()]
    assert [(row["axis"], row["pass"]) for row in rows] == [(axis, phase) for axis in AXES for phase in PRODUCTS]
    found = {(row["axis"], row["pass"]): row for row in rows}
    mesh = LAYERS[0].mesh(AXES[3], 64, None)
    assert found[AXES[3], "forward"]["mesh"] == "{} × {}".format(*mesh) == "32 × 2"
    seconds = [LAYERS[0].communication_s(AXES[3], "forward", 64 // y, y) for y in (1, 2, 4, 8, 16, 32, 64)]
    assert LAYERS[0].communication_s(AXES[3], "forward", *mesh) == min(seconds), "the best mesh of 64"
    bound = [place for place, row in found.items() if row["limited by"] == "communication"]
    assert bound == [("tensor", "forward"), ("tensor", "backward")]
    assert found["tensor", "forward"]["compute-bound while"] == "N < 3F/2α"
    assert table(LAYERS[1], 64, 4).texts()[-1][2] == "16 × 4"
    with pytest.raises(UsageError, match="64 GPUs do not divide into a mesh with tensor parallelism of 5"):
        table(LAYERS[0], 64, 5)


@pytest.mark.parametrize(
    "given", [{"tokens": -1}, {"d_model": float("nan")}, {"flops_per_s": 1e30}, {"bytes_per_s": 0}, {"matrices": 1}]
)
def test_a_layer_needs_positive_numbers(given):
    (name,) = given
    with pytest.raises(UsageError, match=f"{name} is .*; expected (a positive number|2 or more)"):
        FeedForward(**{"tokens": 1, "d_model": 2, "d_ff": 3, "flops_per_s": 4, "bytes_per_s": 5} | given)
