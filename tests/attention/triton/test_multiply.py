"""How far three TF32 products are from float32, on a matrix unit as it is emulated here: operands of eleven bits, and
after every eight terms the sum cut to float32, toward zero (Fasi et al. 2021)."""

import torch
from torch import Tensor

from tests.attention.budget import relative_error
from trainstep.attention.triton.tuning import FEATURES_PER_EXACT_PRODUCT

TERMS = 8


def rounded(x: Tensor) -> Tensor:
    """Float32 to the nearest number of eleven bits."""
    return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def cut(x: Tensor, bits: int) -> Tensor:
    """The leading `bits` of each float64."""
    return (x.view(torch.int64) & -(1 << (53 - bits))).view(torch.float64)


def three_products(a: Tensor, b: Tensor, features: int) -> Tensor:
    """a b in float32, `features` of the inner dimension at a time."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for first in range(0, a.shape[1], features):
        own, other = a[:, first : first + features], b[first : first + features]
        big_a, big_b = rounded(own), rounded(other)
        small_a, small_b = (cut(x.double(), 11) for x in (own - big_a, other - big_b))
        big_a, big_b = big_a.double(), big_b.double()
        sums = cut(small_a @ big_b + big_a @ small_b, 24)
        for term in range(0, own.shape[1], TERMS):
            sums = cut(sums + big_a[:, term : term + TERMS] @ big_b[term : term + TERMS], 24)
        total += sums.float()
    return total


def test_scores_of_the_widest_heads_need_sums_over_few_features() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k_t = torch.randn(300, 256, generator=generator), torch.randn(256, 300, generator=generator)
    exact = q.double() @ k_t.double()
    allowed = 2 * relative_error(q @ k_t, exact) + torch.finfo(torch.float32).eps
    assert relative_error(three_products(q, k_t, FEATURES_PER_EXACT_PRODUCT), exact) <= allowed
    assert relative_error(three_products(q, k_t, 256), exact) > allowed
