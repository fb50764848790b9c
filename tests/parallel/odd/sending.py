"""When gradients are sent: micro-batches, several passes, what is forgotten or fails on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.parallel.odd.nets import UNUSED, Net
from tests.parallel.odd.runs import STEPS, Run, Scenario, batch, mean_loss, steps

AFTER = {"overlap": False}


def forgotten_finish(run: Run) -> None:
    steps(finish=False)(run)


def micro_batches(how: str) -> Any:
    def train(run: Run) -> None:
        assert run.optimizer is not None
        for step in range(STEPS):
            for micro in range(3):
                last = micro == 2
                if how == "no_sync" and not last:
                    with run.no_sync():
                        run.backward(step, micro, scale=1 / 3)
                else:
                    run.backward(step, micro, scale=1 / 3)
                if how == "finish each" or last:
                    run.finish()
            run.optimizer.step()
            run.optimizer.zero_grad()

    return train


def without_zero_grad(run: Run) -> None:
    steps(zero=False)(run)


def zero_by_module(run: Run) -> None:
    assert run.optimizer is not None
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.module.zero_grad()


def zero_by_inner(run: Run) -> None:
    assert run.optimizer is not None
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.inner.zero_grad()


def discarded(how: str) -> Any:
    """Gradients of one batch are thrown away, and those of another used."""

    def train(run: Run) -> None:
        assert run.optimizer is not None
        for step in range(STEPS):
            run.backward(step, micro=1)
            run.finish()
            {"optimizer": run.optimizer, "module": run.module, "inner": run.inner}[how].zero_grad()
            run.backward(step)
            run.finish()
            run.optimizer.step()
            run.optimizer.zero_grad()

    return train


def zero_to_zeros(run: Run) -> None:
    assert run.optimizer is not None
    for step in range(STEPS):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(step)
        run.finish()
        run.optimizer.step()


def step_twice(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.optimizer.step()
        run.optimizer.zero_grad()


def two_backwards(run: Run) -> None:
    """The same graph differentiated twice."""

    def twice(x: Tensor) -> None:
        loss = mean_loss(run, x)
        with run.no_sync():
            loss.backward(retain_graph=True)
        loss.backward()

    for step in range(STEPS):
        run.each_rank(step, twice)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


def two_forwards(run: Run, x: Tensor) -> Tensor:
    """Two forwards, then one backward, as of siamese networks."""
    return (run.module(x) * run.module(x.flip(0))).mean()


def forward_without_gradients(run: Run, x: Tensor) -> Tensor:
    """A forward without gradients between forward and backward."""
    y = run.module(x)
    with torch.no_grad():
        target = run.module(x.flip(0))
    return (y - 0.1 * target).pow(2).mean()


def evaluate_between(run: Run) -> None:
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()
        with torch.no_grad():
            run.module.eval()(batch(step, 0))
        run.module.train()


def failed_forward(run: Run) -> None:
    """A forward fails midway on every rank, and training goes on."""
    for step in range(STEPS):
        handle = run.inner.blocks[2].register_forward_pre_hook(_fail)
        try:
            run.backward(step)
        except ArithmeticError:
            handle.remove()
        run.optimizer.zero_grad()
        run.backward(step)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


def _fail(*_: Any) -> None:
    raise ArithmeticError("planned")


def gradients_by_hand(run: Run) -> None:
    """autograd.grad in the place of backward."""
    parameters = run.parameters()

    def by_hand(x: Tensor) -> None:
        gradients = torch.autograd.grad(mean_loss(run, x), parameters, allow_unused=True)
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient if each.grad is None or gradient is None else each.grad + gradient

    for step in range(STEPS):
        run.each_rank(step, by_hand)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


def backward_on_one_rank(run: Run) -> None:
    """In the second step only rank 0 has a loss."""

    def maybe(x: Tensor) -> None:
        if run.inner.step != 1 or run.inner.rank == 0:
            mean_loss(run, x).backward()

    for step in range(STEPS):
        run.each_rank(step, maybe)
        run.finish()
        run.optimizer.step()
        run.optimizer.zero_grad()


def uneven_shares(run: Run, x: Tensor) -> Tensor:
    """Rank 0 has half of the rows; every rank's mean counts the same."""
    return mean_loss(run, x[: 2 if run.inner.rank == 0 else None])


SCENARIOS: dict[str, Scenario] = {
    "forgotten finish": Scenario("finish_gradient_synchronization forgotten", Net, train=forgotten_finish),
    "forgotten, no overlap": Scenario(
        "finish_gradient_synchronization forgotten, overlap=False", Net, train=forgotten_finish, settings=AFTER
    ),
    "no_sync": Scenario("micro-batches under no_sync", Net, train=micro_batches("no_sync")),
    "finish each": Scenario("micro-batches, each finished", Net, train=micro_batches("finish each")),
    "finish last": Scenario("micro-batches, the last one finished", Net, train=micro_batches("finish last")),
    "finish last, no overlap": Scenario(
        "micro-batches, the last one finished, overlap=False", Net, train=micro_batches("finish last"), settings=AFTER
    ),
    "no zero_grad": Scenario("gradients added up over steps, never zeroed", Net, train=without_zero_grad),
    "zeroed by the wrapper": Scenario("zero_grad of the wrapper", Net, train=zero_by_module),
    "zeroed by the module": Scenario("zero_grad of the module", Net, train=zero_by_inner),
    "zeros": Scenario("zero_grad(set_to_none=False)", Net, train=zero_to_zeros),
    "discarded by the optimizer": Scenario(
        "gradients thrown away by optimizer.zero_grad", Net, train=discarded("optimizer")
    ),
    "discarded by the wrapper": Scenario("by the wrapper's zero_grad", Net, train=discarded("module")),
    "discarded by the module": Scenario("by the module's zero_grad", Net, train=discarded("inner")),
    "step twice": Scenario("two steps on the same gradients", Net, train=step_twice),
    "two backwards": Scenario("the same graph differentiated twice", Net, train=two_backwards),
    "two forwards": Scenario("two forwards, then one backward", Net, loss=two_forwards),
    "no_grad between": Scenario("a forward without gradients before backward", Net, loss=forward_without_gradients),
    "evaluation": Scenario("evaluation between steps", Net, train=evaluate_between),
    "autograd.grad": Scenario("torch.autograd.grad in the place of backward", Net, train=gradients_by_hand),
    "no loss on one rank": Scenario(
        "a step in which one rank has no loss", Net, train=backward_on_one_rank, settings=UNUSED
    ),
    "failed forward": Scenario("a forward that raises on all ranks, and is repeated", Net, train=failed_forward),
    "uneven shares": Scenario("other numbers of rows on other ranks", Net, loss=uneven_shares),
}
