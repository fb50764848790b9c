"""Attention that is written out is fused where that is certain, and left as it is everywhere else: always the same
numbers and gradients."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from trainstep.base.errors import UnsupportedError
from trainstep.ladder.places.written_out import Finder

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 8, 4
CAUSAL = torch.tril(torch.ones(16, 16, dtype=torch.float64))
LATER = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
PADDING = torch.arange(LENGTH) >= torch.tensor([5, 8])[:, None, None, None]
BIAS = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def found(monkeypatch):
    """What is noted, with the calls of fused attention, while products are looked at."""
    for owner, name in (
        (torch, "matmul"),
        (torch, "bmm"),
        *((torch.Tensor, n) for n in ("matmul", "__matmul__", "bmm")),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    found, sdpa = [], F.scaled_dot_product_attention

    def noted(query, key, value, attn_mask=None, **options):
        found.append("is_causal=True" if options["is_causal"] else "no mask" if attn_mask is None else "attn_mask")
        return sdpa(query, key, value, attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    return found


def looking(note=lambda line, how: None):
    finder = Finder(note)
    finder.install()
    return finder


def drawn(*shape, seed=0, dtype=torch.float64):
    """q, k and v as projections give them: their heads are the second dimension by a transposition."""
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (BATCH, LENGTH, HEADS, WIDTH)
    drawn = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]
    return drawn, [each.transpose(1, 2) if len(shape) == 4 else each for each in drawn]


def nanogpt(q, k, v):
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(WIDTH))
    scores = scores.masked_fill(CAUSAL[None, None, :LENGTH, :LENGTH] == 0, float("-inf"))
    return nn.Dropout(0.0)(F.softmax(scores, dim=-1)) @ v


def added(q, k, v):
    mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=q.dtype).triu(1)
    return torch.matmul(torch.softmax(torch.matmul(q, k.mT) / 3 + mask, -1), v)


def in_place(q, k, v):
    scores = q @ k.mT
    scores /= 2
    scores.masked_fill_(LATER, -1e9)
    return scores.softmax(dim=3).matmul(v)


def negated(q, k, v):
    return (-0.5 * (q @ k.mT)).masked_fill(LATER, -math.inf).softmax(-1) @ v


def divided_to_nothing(q, k, v):
    return ((q @ k.mT) / -1e300 / 1e300).masked_fill(LATER, -1e9).softmax(-1) @ v


def where(q, k, v):
    scores = torch.where(~LATER, (q / 2) @ k.mT, torch.tensor(torch.finfo(q.dtype).min, dtype=q.dtype))
    return nn.Softmax(-1)(scores) @ v


def three_dimensions(q, k, v):
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(BATCH, HEADS, LENGTH, WIDTH)


def padded(q, k, v):
    return (q @ k.mT).masked_fill(PADDING, -math.inf).softmax(-1) @ v


def padded_and_causal(q, k, v):
    return ((q @ k.mT) * 0.5).masked_fill(LATER, -1e9).masked_fill(PADDING, -1e9).softmax(-1) @ v


def biased(q, k, v):
    return (BIAS + q @ k.mT).softmax(-1) @ v


def cast(q, k, v):
    return F.softmax(q @ k.mT, dim=-1, dtype=torch.float64).type_as(q) @ v


def returned(q, k, v):
    """Probabilities are used after all, where they are what the script computes."""
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.square().sum(-1, keepdim=True)


def dropped(q, k, v):
    return F.dropout((q @ k.mT).masked_fill(LATER, -math.inf).softmax(-1), 0.5) @ v


def dropped_before_softmax(q, k, v):
    torch.manual_seed(0)
    return F.dropout(q @ k.mT, 0.5).softmax(-1) @ v


def capped(q, k, v):
    return torch.tanh(q @ k.mT).softmax(-1) @ v


def scaled_after_the_mask(q, k, v):
    return ((q @ k.mT).masked_fill(LATER, -1e5) * 1e-6).softmax(-1) @ v


def slightly_masked(q, k, v):
    return (q @ k.mT).masked_fill(LATER, -2.0).softmax(-1) @ v


def over_another_dimension(q, k, v):
    return (q @ k.mT).softmax(-2) @ v


def shifted(q, k, v):
    scores = q @ k.mT
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


def written_into(q, k, v):
    scores = q @ k.mT
    scores[..., 0] = 1.0
    return scores.softmax(-1) @ v


def other_values(q, k, v):
    return (q @ k.mT).softmax(-1) @ v[:, :1]


FUSED = {
    **dict.fromkeys((nanogpt, added, in_place, negated, divided_to_nothing, where), "is_causal=True"),
    **dict.fromkeys((three_dimensions, cast, returned), "no mask"),
    **dict.fromkeys((padded, padded_and_causal, biased), "attn_mask"),
}
LEFT = (
    *(dropped_before_softmax, capped, scaled_after_the_mask, slightly_masked),
    *(over_another_dimension, shifted, written_into, other_values),
)


@pytest.mark.parametrize("written", [*FUSED, *LEFT], ids=lambda each: each.__name__)
def test_numbers_and_gradients_are_those_of_the_script(written, found):
    def of(call):
        torch.manual_seed(1)
        leaves, (q, k, v) = drawn()
        result = call(q, k, v)
        (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
        return result, *(each.grad for each in leaves)

    expected = of(written)
    notes = {}
    looking(notes.__setitem__)
    for own, other in zip(of(written), expected, strict=True):
        assert (type(own), own.dtype) == (torch.Tensor, torch.float64)
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)
    assert found == ([FUSED[written]] if written in FUSED else [])
    assert list(notes.values()) == found
    assert all(line.startswith(f"{os.path.realpath(__file__)}:") for line in notes)


@pytest.mark.parametrize("written", [nanogpt, cast])
def test_autocast_gives_the_dtypes_that_it_gives(written, found):
    def of():
        with torch.autocast("cpu", torch.bfloat16):
            return written(*drawn(dtype=torch.float32)[1])

    expected = of()
    looking()
    assert of().dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(of(), expected, rtol=0.02, atol=0.02)
    assert len(found) == 2


def test_dropout_of_probabilities_is_the_fused_attentions(found):
    """Means over many draws are those of the attention that is written out."""
    torch.manual_seed(0)
    _, leaves = drawn()
    expected = torch.stack([dropped(*leaves) for _ in range(400)])
    notes = {}
    looking(notes.__setitem__)
    draws = torch.stack([dropped(*leaves) for _ in range(400)])
    assert list(notes.values()) == ["is_causal=True, dropout_p=0.5"]
    assert len(found) == 400
    noise = ((expected.var(0) + draws.var(0)) / 400).sqrt()
    assert ((draws.mean(0) - expected.mean(0)).abs() <= 5 * noise + 1e-9).all()
    torch.testing.assert_close(draws.var(0).sum(), expected.var(0).sum(), rtol=0.1, atol=0)


def test_scores_are_known_by_shape_and_computed_only_where_they_are_used(found):
    finder = looking()
    _, (q, k, _) = drawn()
    scores = q @ k.mT
    assert (scores.shape, scores.size(-1), scores.dim()) == ((BATCH, HEADS, LENGTH, LENGTH), LENGTH, 4)
    assert scores.computed is None
    assert scores.requires_grad
    assert torch.equal(scores.computed, finder.product(q, k.mT))


def test_other_products_are_products(found):
    looking()
    _, (q, k, v) = drawn()
    for left, right in ((q, v.mT.contiguous()), (q.flatten(0, 2), k.flatten(0, 2).mT), (q[:1], k[:1].mT.contiguous())):
        assert type(left @ right) is torch.Tensor


def test_what_is_mapped_over_is_computed(found):
    _, (q, k, _) = drawn()
    several = torch.stack([q, 2 * q])
    expected = several @ k.mT
    looking()
    torch.testing.assert_close(torch.vmap(lambda own: own @ k.mT)(several), expected)


def test_forward_mode_ad_is_the_scripts(found):
    _, (q, k, v) = drawn()

    def tangent():
        with forward_ad.dual_level():
            weights = (forward_ad.make_dual(q.detach(), q.cos().detach()) @ k.mT).softmax(-1)
            return forward_ad.unpack_dual(weights @ v).tangent

    expected = tangent()
    looking()
    assert torch.equal(tangent(), expected)
    assert found == []


def test_a_mask_that_is_not_causal_later_is_seen(found):
    looking()
    _, (q, k, v) = drawn()
    mask = LATER.clone()
    for _ in range(2):
        (q @ k.mT).masked_fill(mask, -math.inf).softmax(-1) @ v
        mask[3, 1] = True
    assert found == ["is_causal=True", "attn_mask"]


def test_what_is_changed_in_place_before_attention_ends_is_refused(found):
    looking()
    with torch.no_grad():
        _, (q, k, v) = drawn()
        weights = (q @ k.mT).softmax(-1)
        k.mul_(2)
        with pytest.raises(UnsupportedError, match="changes q, k or a mask in place"):
            weights @ v


@pytest.mark.gpu
def test_a_gpu_is_asked_for_its_masks_until_the_first_update_only(found):
    finder = looking()
    _, leaves = drawn(dtype=torch.float32)
    q, k, v = (each.cuda() for each in leaves)
    mask = LATER.cuda()

    def attention():
        return (q @ k.mT).masked_fill(mask, -math.inf).softmax(-1) @ v

    first = attention()
    finder.updated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = attention()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(second, first)
    assert found == ["is_causal=True", "is_causal=True"]
