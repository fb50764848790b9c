"""What is kept of a block that is run again: as torch's own contexts have it, in eager code by fewer questions."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trainstep.base.errors import UsageError
from trainstep.checkpointing.keeping import FirstRun, Keeping, can_be_kept, contexts_of

X = torch.linspace(-1, 1, 24).view(3, 8)
WEIGHT = torch.linspace(-1, 1, 64).view(8, 8)


def block(x):
    """Two products, a view among what is kept, and several results of one operation."""
    first = (x @ WEIGHT).tanh()
    low, high = torch.ops.aten.split.Tensor(first @ WEIGHT, 4, 1)
    return low.exp().sum() + (high.t() @ low).sin().sum()


class Calls(TorchDispatchMode):
    """The operations that run, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


def run(contexts, function=block):
    """The gradient, and what ran in backward."""
    x = X.clone().requires_grad_()
    loss = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
    with Calls() as calls:
        loss.backward()
    return x.grad, calls.names


@pytest.mark.parametrize("names", [None, ("mm#0",), ("mm#1", "split#0"), ("tanh#0", "exp#0", "t#0", "mm#2")])
def test_the_same_is_kept_as_by_torchs_own_contexts(names):
    plain = X.clone().requires_grad_()
    block(plain).backward()
    gradient, ran = run(FirstRun(Keeping(names)).contexts)
    by_torch, ran_by_torch = run(lambda: contexts_of(names))
    assert torch.equal(gradient, plain.grad)
    assert torch.equal(by_torch, plain.grad)
    assert [name for name in ran if name != "detach"] == [name for name in ran_by_torch if name != "detach"]


def test_only_operators_of_which_something_is_kept_are_asked_about():
    asked = []

    class Watched(Keeping):
        def keeps(self, operator, number, call):
            asked.append((operator, number))
            return super().keeps(operator, number, call)

    run(FirstRun(Watched(("mm#1",))).contexts)
    assert asked == [("mm", 0), ("mm", 1), ("mm", 2)]


def test_a_call_that_was_not_made_is_named():
    first = FirstRun(Keeping(("mm#0", "mm#7")))
    run(first.contexts)
    with pytest.raises(UsageError, match=r"keeps mm#7 of layers\.0, which runs mm 3 times"):
        first.check("layers.0")
    first = FirstRun(Keeping(("detach#0",)))
    run(first.contexts)
    with pytest.raises(UsageError, match=r"keeps detach#0 of layers\.0, which runs detach 0 times"):
        first.check("layers.0")


@pytest.mark.parametrize("function", [lambda x: x @ WEIGHT, torch.sin], ids=["kept", "not kept"])
def test_a_block_that_does_more_the_second_time_is_an_error(function):
    times = []

    def grows(x):
        times.append(1)
        with torch.no_grad():
            for _ in (*times, *times):
                function(X)
        return function(x).sin().sum()

    with pytest.raises(RuntimeError, match=r"(mm ran 3|sin ran 4) times in forward, and runs again in backward"):
        run(FirstRun(Keeping(("mm#0",))).contexts, grows)


def test_a_cast_that_autocast_had_cached_is_no_difference():
    """In forward the second call's cast of the weight is cached; in backward it is made anew."""
    weight = WEIGHT.clone().requires_grad_()

    def twice(call):
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(call(X)).float().sum()
        loss.backward()
        return weight.grad

    def project(x):
        return (x @ weight).sin()

    expected = twice(project)
    checkpointed = twice(
        lambda x: checkpoint(project, x, use_reentrant=False, context_fn=FirstRun(Keeping(None)).contexts)
    )
    assert torch.equal(checkpointed, expected)


def test_what_is_kept_serves_one_backward():
    x = X.clone().requires_grad_()
    loss = checkpoint(block, x, use_reentrant=False, context_fn=FirstRun(Keeping(("mm#0",))).contexts)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="what it keeps was used already"):
        loss.backward()


def test_what_is_kept_and_then_changed_is_refused():
    def changed(x):
        product = x @ WEIGHT
        result = product.tanh().sum()
        product.mul_(2)
        return result

    with pytest.raises(RuntimeError, match="has been changed in place"):
        run(FirstRun(Keeping(("mm#0",))).contexts, changed)


def test_attention_with_dropout_and_what_draws_numbers_is_not_kept():
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    tensors = [X.view(1, 1, 3, 8)] * 3
    assert can_be_kept(operator, tensors, {})
    assert can_be_kept(operator, [*tensors, 0.0], {})
    assert not can_be_kept(operator, [*tensors, 0.1], {})
    assert not can_be_kept(torch.ops.aten.native_dropout.default, [X, 0.5, True], {})
