"""The closed forms against seconds counted call by call; the published exercise against its numbers."""

import math

import pytest

from tables.plan import BYTES_PER_S, FLOPS_PER_S, XXL, FeedForwardStack, compute_bound_tokens, mesh_tokens
from tests.plan.test_communication import simulate
from trainstep.base.config import SIZES
from trainstep.base.errors import UsageError
from trainstep.plan.limits import (
    best_mesh_tokens,
    data_axis_tokens,
    intensity,
    tensor_axis_ranks,
    width_between_collectives,
)

FLOPS, BYTES, D, F = 5e14, 2e11, 4096, 16384
ALPHA = FLOPS / BYTES


def link_bytes(collective, payload, ranks):
    """On the busiest link, by moving chunks of a tensor of 64 elements around a ring."""
    return max(simulate(collective, 64 * ranks, ranks).sent.values()) / (64 * ranks) * payload


def seconds(x, y, tokens_per_gpu, *, fsdp_axes=1, tensor_axes=1, long_rings=True):
    """(computing, FSDP's communication, TP's) in the forward pass of D × F and F × D on a mesh of x · y GPUs."""
    tokens = tokens_per_gpu * x * y
    compute = 2 * 2 * tokens * D * F / (x * y) / FLOPS
    gathered, activations = 2 * 2 * D * F / y, 2 * tokens / x * D
    fsdp = link_bytes("all-gather", gathered, x) / (BYTES * fsdp_axes) if x > 1 else 0.0
    tensor = 0.0
    if y > 1:
        tensor = link_bytes("all-gather", activations, y) + link_bytes("reduce-scatter", activations, y)
        tensor /= BYTES * tensor_axes
    if long_rings:  # as the closed forms assume
        fsdp, tensor = fsdp * x / max(1, x - 1), tensor * y / max(1, y - 1)
    return compute, fsdp, tensor


@pytest.mark.parametrize("x", [2, 4, 16])
@pytest.mark.parametrize("axes", [1, 2])
def test_fsdp_alone(x, axes):
    limit = data_axis_tokens(ALPHA, axes)
    for factor, bound in ((0.99, False), (1.01, True)):
        compute, fsdp, _ = seconds(x, 1, factor * limit, fsdp_axes=axes)
        assert (compute > fsdp) is bound
    compute, fsdp, _ = seconds(x, 1, limit, fsdp_axes=axes, long_rings=False)
    assert fsdp / compute == pytest.approx((x - 1) / x), "short rings need less"


def test_tensor_alone_does_not_depend_on_the_batch():
    limit = tensor_axis_ranks(ALPHA, F)
    assert limit == pytest.approx(6.55, abs=0.01)
    for tokens in (1, 10_000):
        for y, bound in ((6, True), (7, False)):
            compute, _, tensor = seconds(1, y, tokens)
            assert (compute > tensor) is bound


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize(("y", "axes"), [(2, (1, 1)), (4, (2, 1)), (4, (1, 2))])
def test_a_mesh(y, axes, overlapped):
    limit = mesh_tokens(ALPHA, F, y, fsdp_axes=axes[0], tensor_axes=axes[1], overlapped=overlapped)
    for factor, bound in ((0.99, False), (1.01, True)):
        compute, fsdp, tensor = seconds(8, y, factor * limit, fsdp_axes=axes[0], tensor_axes=axes[1])
        communication = max(fsdp, tensor) if overlapped else fsdp + tensor
        assert (compute > communication) is bound
    assert mesh_tokens(ALPHA, F, 7, overlapped=overlapped) == math.inf


@pytest.mark.parametrize("overlapped", [True, False])
def test_no_mesh_needs_fewer_tokens_than_the_best(overlapped):
    tried = [mesh_tokens(ALPHA, F, y, overlapped=overlapped) for y in range(1, 7)]
    best = best_mesh_tokens(ALPHA, F, overlapped=overlapped)
    assert best <= min(tried) < 1.3 * best


def test_a_whole_block_counts_as_two_matrices_of_another_width():
    model = SIZES["2.7B"]
    multiplied = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff
    per_element_sent = multiplied / (4 * model.d_model)
    two_matrices = 2 * model.d_model * 10_240 / (2 * model.d_model)
    assert width_between_collectives(model) == per_element_sent == two_matrices


def test_the_exercise():
    assert XXL.parameters == sum(2 * 16_384 * 53_248 for _ in range(126)) == 219_848_638_464
    assert XXL.static_bytes == 16 * XXL.parameters
    assert XXL.activation_bytes_per_token == 2 * 126 * (16_384 + 53_248)
    assert XXL.devices(80e9) == 44
    assert XXL.shards_to_fit(95e9) == 38
    for tokens in (0, 1024, 4096):
        shards = XXL.shards_to_fit(95e9, tokens)
        assert XXL.bytes_per_device(shards, tokens) < 95e9 <= XXL.bytes_per_device(shards - 1, tokens)


def test_the_exercise_by_counting_seconds():
    """X = 16 over two axes, Y = 4 over one: at the limit computing and communicating take equally long."""
    alpha = intensity(FLOPS_PER_S, BYTES_PER_S)
    assert alpha == pytest.approx(2555.6, abs=0.1)
    stack, x, y = XXL, 16, 4
    for overlapped, expected in ((True, 319.4), (False, 395.3)):
        tokens = compute_bound_tokens(overlapped=overlapped)
        assert tokens == pytest.approx(expected, abs=0.1)
        compute = 2 * tokens * 2 * stack.d_model * stack.d_ff / FLOPS_PER_S
        fsdp = 2 * 2 * stack.d_model * stack.d_ff / y / (2 * BYTES_PER_S)
        tensor = 2 * 2 * tokens * y * stack.d_model / BYTES_PER_S
        assert compute == pytest.approx(max(fsdp, tensor) if overlapped else fsdp + tensor)
        assert tokens * x * y == pytest.approx({True: 20_444, False: 25_302}[overlapped], abs=1)


def test_a_meta_model_of_the_exercise_has_as_many_bytes():
    import torch
    from torch import nn

    small = FeedForwardStack(d_model=48, d_ff=160, num_blocks=3)
    with torch.device("meta"):
        blocks = [(nn.Linear(48, 160, bias=False), nn.Linear(160, 48, bias=False)) for _ in range(3)]
        saved = []
        x = torch.empty(5, 48, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            for up, down in blocks:
                x = down.bfloat16()(up.bfloat16()(x))
    parameters = [p for pair in blocks for layer in pair for p in layer.parameters()]
    assert sum(p.numel() for p in parameters) == small.parameters
    inputs = [t for t in saved if t.shape[0] == 5]  # the others are weights
    assert sum(t.nbytes for t in inputs) == 5 * small.activation_bytes_per_token


@pytest.mark.parametrize("rates", [(0, 1e9), (1e12, -1), (1e12, float("nan"))])
def test_rates_must_be_positive(rates):
    with pytest.raises(UsageError, match="expected a positive number"):
        intensity(*rates)
