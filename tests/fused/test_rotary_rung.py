"""Rotary positions that a script writes out, by our kernel in their place."""

import sys
import types

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from tests.fused.places import DEVICE, DTYPES, HERE, draw
from trainstep.check.fused import compare, differentiate, expected
from trainstep.ladder.places.rotary import HOW, Rotary, _kernel_takes

pytestmark = HERE
LENGTH, WIDTH = 7, 12


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def as_transformers(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def interleaved(q, k, cos, sin):
    def turned(x):
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos[:, None] + other * sin[:, None]

    return turned(q), turned(k)


def turned_back(q, k, cos, sin):
    return as_transformers(q, k, cos, -sin)


def only_queries(q, k, cos, sin):
    return as_transformers(q, k, cos, sin)[0], k


def cast_back(q, k, cos, sin):
    """As the tables' dtype was only wider for their sake."""
    return tuple(each.type_as(q) for each in as_transformers(q, k, cos, sin))


def cast_first(q, k, cos, sin):
    return as_transformers(q, k, cos.to(q.dtype), sin.to(q.dtype))


def as_tables(q, k, cos, sin):
    return as_transformers(q.type_as(cos), k.type_as(cos), cos, sin)


def of_more(q, k, cos, sin, position_ids):
    return as_transformers(q, k, cos, sin)


def of_others(x, cos, sin):
    return as_transformers(x, x, cos, sin)


def unlike_tensors(q, k, cos, sin):
    raise ValueError("for GPUs only")


OTHERS = (
    *(interleaved, turned_back, only_queries, of_more, of_others, unlike_tensors),
    *(cast_back, cast_first, as_tables),
)


@pytest.fixture
def home():
    """A module of somebody's, with a class of models."""
    made = types.ModuleType("somebodys_model")
    made.Model = type("Model", (nn.Linear,), {"__module__": made.__name__})
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def seen(home, function):
    """What takes a function's place, and what is noted."""
    home.apply = function
    notes = []
    finder = Rotary(lambda line, how: notes.append(how))
    finder.see_model(nn.Sequential(home.Model(2, 2)))
    return home.apply, notes, finder


def tables(dtype=torch.float32, rows=1):
    angles = torch.outer(torch.arange(LENGTH), 0.7 ** torch.arange(WIDTH // 2)).repeat(1, 2)
    return [each[None].repeat(rows, 1, 1).to(DEVICE, dtype) for each in (angles.cos(), angles.sin())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients(dtype, home):
    function, notes, _ = seen(home, as_transformers)
    q, k = (draw(2, LENGTH, heads, WIDTH, dtype=dtype, seed=heads).transpose(1, 2) for heads in (4, 2))
    cos, sin = tables(dtype)
    upstream = [torch.ones_like(q), torch.full_like(k, 0.5)]

    def oracle(q, k):
        return as_transformers(q, k, *(each.to(q.dtype) for each in (cos, sin)))

    plain, exact = expected(oracle, (q, k), upstream)
    found = differentiate(lambda q, k: function(q, k, cos, sin), (q, k), upstream)
    assert [each.dtype for each in found] == [each.dtype for each in plain]
    budget = compare(found, plain, exact, ("q", "k", "dq", "dk"))
    assert budget.is_right, str(budget)
    assert notes == [HOW]
    function(q, k, cos, sin)
    assert notes == [HOW], "the next layer's tables are the same"


def test_tables_that_are_wider_widen_the_results(home):
    """As under autocast, which leaves tables in float32."""
    function, notes, _ = seen(home, as_transformers)
    q = draw(1, 2, LENGTH, WIDTH, dtype=torch.float16)
    found, wanted = function(q, q, *tables()), as_transformers(q, q, *tables())
    assert notes == [HOW]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("function", OTHERS)
def test_other_functions_are_left_alone(function, home):
    assert seen(home, function)[0] is function


def test_what_the_kernel_does_not_take_is_the_scripts(home):
    function, notes, _ = seen(home, as_transformers)
    q, (cos, sin) = draw(2, 3, LENGTH, WIDTH), tables()
    assert torch.equal(function(q, q, *tables(rows=2))[0], as_transformers(q, q, cos, sin)[0]), "a table for each row"
    swapped = q.transpose(1, 2)
    assert torch.equal(function(swapped, swapped, cos, sin, 2)[0], as_transformers(swapped, swapped, cos, sin, 2)[0])
    assert function(q.double(), q.double(), cos, sin)[0].dtype == torch.float64
    assert notes == []


def test_forward_mode_ad_is_the_scripts(home):
    function, notes, _ = seen(home, as_transformers)
    q, given = draw(1, 2, LENGTH, WIDTH, grad=False), tables()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q.cos())
        own, expected = (each(dual, dual, *given)[0] for each in (function, as_transformers))
        assert torch.equal(forward_ad.unpack_dual(own).tangent, forward_ad.unpack_dual(expected).tangent)
    assert notes == []


def test_tables_that_do_not_repeat_are_left_to_the_script_from_then_on(home):
    function, notes, _ = seen(home, as_transformers)
    q, (cos, sin) = draw(1, 2, LENGTH, WIDTH), tables()
    other = cos.clone()
    other[0, 3, 1] += 1
    for given in (other, cos):
        assert torch.equal(function(q, q, given, sin)[0], as_transformers(q, q, given, sin)[0])
    assert notes == []


def test_tables_that_are_changed_in_place_are_looked_at_again(home):
    function, notes, _ = seen(home, as_transformers)
    q, (cos, sin) = draw(1, 2, LENGTH, WIDTH), tables()
    function(q, q, cos, sin)
    assert len(notes) == 1
    cos[0, 3, 1] += 1
    assert torch.equal(function(q, q, cos, sin)[0], as_transformers(q, q, cos, sin)[0])


@pytest.mark.gpu
def test_a_gpu_is_asked_for_its_tables_until_the_first_update_only(home):
    function, _, finder = seen(home, as_transformers)
    q, given = draw(1, 2, LENGTH, WIDTH), (tables(), tables())
    first = function(q, q, *given[0])
    finder.updated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = function(q, q, *given[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(second, first)


def test_more_sequences_than_a_grid_has_are_left_to_the_script():
    cos = sin = torch.ones(1, 1, 2, device=DEVICE)
    taken = [_kernel_takes(*[torch.ones(count, 1, 1, 2, device=DEVICE)] * 2, cos, sin) for count in (65_535, 65_536)]
    assert taken == [True, False]
