"""Fused attention written out gives what it gave, and roundings in TF32 inside of it are those of the formula."""

import math

import pytest
import torch
from torch.nn import functional as F

import trainstep.check.rounding as module
from trainstep.check.rounding import RandomRounding
from trainstep.step.casting import in_tf32

BATCH, HEADS, QUERIES, KEYS, HEAD_DIM = 3, 4, 20, 24, 8
HIDDEN = torch.rand(BATCH, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.3
HIDDEN[0, 0, 5] = True
CASES = {
    "all keys": {},
    "causal": {"is_causal": True},
    "another scale": {"scale": 0.7},
    "shared heads": {"heads_of_keys": 2},
    "a bias": {"mask": torch.randn(1, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(2))},
    "hidden keys, a query without any": {"mask": torch.zeros(HIDDEN.shape).masked_fill(HIDDEN, -math.inf)},
}

FORMS = dict(zip(("cuda", "cpu"), zip(module.FUSED, module.FUSED_BACKWARD, strict=True), strict=True))


def tensors(heads_of_keys=HEADS):
    random = torch.Generator().manual_seed(0)
    shapes = [(HEADS, QUERIES), (heads_of_keys, KEYS), (heads_of_keys, KEYS), (HEADS, QUERIES)]
    return [torch.randn(BATCH, tokens, heads, HEAD_DIM, generator=random).transpose(1, 2) for heads, tokens in shapes]


def formula(query, key, value, mask=None, is_causal=False, scale=None):
    """In float64."""
    query, key, value = (each.double() for each in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = query @ key.mT * (scale or HEAD_DIM**-0.5) + (0 if mask is None else mask.double())
    if is_causal:
        scores = scores + torch.full((QUERIES, KEYS), -math.inf).triu(1)
    sees = (scores > -math.inf).any(-1, keepdim=True)
    return scores.masked_fill(~sees, 0.0).softmax(-1) * sees @ value


@pytest.mark.parametrize("most", [2**26, HEADS * QUERIES * KEYS, 3 * HEADS * KEYS, KEYS])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", FORMS)
def test_it_gives_what_attention_is(device, case, most, monkeypatch):
    """The operators' arguments are read by name, so that those of a GPU's can be read anywhere."""
    monkeypatch.setattr(module, "MOST_SCORES", most)
    options = dict(CASES[case])
    query, key, value, gradient = tensors(options.pop("heads_of_keys", HEADS))
    leaves = [each.clone().requires_grad_() for each in (query, key, value)]
    expected = formula(*leaves, **options)
    expected_gradients = torch.autograd.grad(expected, leaves, gradient.double())

    mask, causal, scale = options.get("mask"), options.get("is_causal", False), options.get("scale")
    output, found = torch.full_like(query, 9.0), [torch.full_like(each, 9.0) for each in (query, key, value)]
    forward, backward = (each.default for each in FORMS[device])
    nothing = torch.empty(0)
    if device == "cuda":
        module.write_out(forward, (query, key, value, mask, True, 0.0, causal), {"scale": scale}, (output, nothing))
        given = (gradient, query, key, value, mask, output, nothing, nothing, nothing, 0.0, [True] * 4, causal)
        module.write_out(backward, given, {"scale": scale}, (*found, None))
    else:
        more = {"attn_mask": mask, "scale": scale}
        module.write_out(forward, (query, key, value, 0.0, causal), more, (output, nothing))
        module.write_out(backward, (gradient, query, key, value, output, nothing, 0.0, causal), more, found)
    for own, one in zip([output, *found], [expected, *expected_gradients], strict=True):
        assert torch.allclose(own.double(), one.double(), rtol=0, atol=1e-5)


def test_of_a_gradient_that_nobody_asked_for_nothing_is_written():
    query, key, value, gradient = tensors()
    found, none = torch.full_like(value, 9.0), torch.empty(0)
    given = (gradient, query, key, value, None, query, none, none, none, 0.0, [False, False, True, False])
    module.write_out(module.FUSED_BACKWARD[0].default, given, {}, (None, None, found, None))
    leaf = value.clone().requires_grad_()
    (expected,) = torch.autograd.grad(formula(query, key, leaf), leaf, gradient.double())
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


def test_what_is_dropped_stays_as_the_kernel_has_it():
    query, key, value, _ = tensors()
    output = torch.full_like(query, 9.0)
    module.write_out(module.FUSED[1].default, (query, key, value, 0.5), {}, (output, torch.empty(0)))
    assert (output == 9.0).all()


def drawn(attention, precision, seed, inputs):
    """Output and gradients."""
    *leaves, gradient = (each.clone().requires_grad_() for each in inputs)
    with RandomRounding(precision, seed):
        output = attention(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def written_out(query, key, value):
    hidden = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)
    return ((query @ key.mT) * HEAD_DIM**-0.5).masked_fill(hidden, -math.inf).softmax(-1) @ value


def fused(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def rms(values):
    return float(torch.stack(values).double().square().mean().sqrt())


def test_in_tf32_it_is_off_as_the_formula_is():
    """Gradients of keys summed over a head too, which are next to nothing where sums of rows are exact."""
    inputs = tensors()
    exact = drawn(fused, "fp32", 0, inputs)
    names = ("output", "query", "key", "value")
    sizes = {}
    for attention in (fused, written_out):
        errors = [
            [own - one for own, one in zip(drawn(attention, "tf32", seed, inputs), exact, strict=True)]
            for seed in range(40)
        ]
        of_each = {name: rms(each) for name, each in zip(names, zip(*errors, strict=True), strict=True)}
        sizes[attention] = of_each | {"sum over keys": rms([each[2].sum(-2) for each in errors])}
    for name, size in sizes[written_out].items():
        assert sizes[fused][name] == pytest.approx(size, rel=0.15), name
        assert size > 1e-4, "TF32's, not float32's"


def test_what_tf32_holds_is_not_rounded():
    """As fused attention takes it: weights of one half, and values of few digits."""
    query, key, value = torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4), in_tf32(torch.randn(1, 1, 2, 4))
    with RandomRounding("tf32", 0):
        found = F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(found, value.mean(-2, keepdim=True).expand(1, 1, 2, 4))


def test_what_is_taken_apart_has_row_sums_of_its_own(monkeypatch):
    within = []
    with RandomRounding("tf32", 0) as rounding:
        around = rounding._row_sums
        monkeypatch.setattr(module, "write_out", lambda *_: within.append(rounding._row_sums))
        F.scaled_dot_product_attention(*tensors()[:3])
        assert rounding._row_sums is around is not within[0]


def test_other_precisions_leave_the_kernel_to_itself(monkeypatch):
    def refuse(*_):
        raise AssertionError("taken apart")

    monkeypatch.setattr(module, "write_out", refuse)
    for precision in ("fp32", "bf16"):
        drawn(fused, precision, 0, tensors())
    with pytest.raises(AssertionError, match="taken apart"):
        drawn(fused, "tf32", 0, tensors())
