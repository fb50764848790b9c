"""When gradients are sent: micro-batches, several passes, what is forgotten or fails on the way."""

from contextlib import nullcontext

import torch

from tests.parallel.odd.nets import UNUSED, Net
from tests.parallel.odd.runs import Scenario, batch, mean_loss, steps

AFTER = {"overlap": False}


def micro_batches(how):
    def backward(run, step):
        for micro in range(3):
            with run.no_sync() if how == "no_sync" and micro < 2 else nullcontext():
                run.backward(step, micro, scale=1 / 3)
            if how == "finish each" and micro < 2:
                run.finish()

    return steps(backward=backward)


def discarded(how):
    """Gradients of one batch are thrown away, and those of another used."""

    def backward(run, step):
        run.backward(step, micro=1)
        run.finish()
        getattr(run, how).zero_grad()
        run.backward(step)

    return steps(backward=backward)


def twice(run, x):
    """The same graph is differentiated twice."""
    loss = mean_loss(run, x)
    with run.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()


def forward_without_gradients(run, x):
    """A forward without gradients between forward and backward."""
    y = run.module(x)
    with torch.no_grad():
        target = run.module(x.flip(0))
    return (y - 0.1 * target).pow(2).mean()


def evaluate(run):
    run.optimizer.zero_grad()
    with torch.no_grad():
        run.module.eval()(batch(run.inner.step, 0))
    run.module.train()


def fail_first(run, step):
    """A forward fails midway on every rank, and training goes on."""
    handle = run.inner.blocks[2].register_forward_pre_hook(_fail)
    try:
        run.backward(step)
    except ArithmeticError:
        handle.remove()
    run.optimizer.zero_grad()
    run.backward(step)


def _fail(*_):
    raise ArithmeticError("planned")


def by_hand(run, x):
    """autograd.grad in the place of backward."""
    parameters = run.parameters()
    gradients = torch.autograd.grad(mean_loss(run, x), parameters, allow_unused=True)
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient if each.grad is None or gradient is None else each.grad + gradient


def maybe(run, x):
    """In the second step only rank 0 has a loss."""
    if run.inner.step != 1 or run.inner.rank == 0:
        mean_loss(run, x).backward()


def uneven_shares(run, x):
    """Rank 0 has half of the rows; every rank's mean counts the same."""
    return mean_loss(run, x[: 2 if run.inner.rank == 0 else None])


def _trained(what, **how):
    return Scenario(what, Net, train=steps(**how))


FORGOTTEN, LAST = steps(finish=False), micro_batches("finish last")
SCENARIOS = {
    "forgotten finish": Scenario("finish_gradient_synchronization forgotten", Net, train=FORGOTTEN),
    "forgotten, no overlap": Scenario(
        "finish_gradient_synchronization forgotten, overlap=False", Net, train=FORGOTTEN, settings=AFTER
    ),
    "no_sync": Scenario("micro-batches under no_sync", Net, train=micro_batches("no_sync")),
    "finish each": Scenario("micro-batches, each finished", Net, train=micro_batches("finish each")),
    "finish last": Scenario("micro-batches, the last one finished", Net, train=LAST),
    "finish last, no overlap": Scenario(
        "micro-batches, the last one finished, overlap=False", Net, train=LAST, settings=AFTER
    ),
    "no zero_grad": _trained("gradients added up over steps, never zeroed", zero=lambda run: None),
    "zeroed by the wrapper": _trained("zero_grad of the wrapper", zero=lambda run: run.module.zero_grad()),
    "zeroed by the module": _trained("zero_grad of the module", zero=lambda run: run.inner.zero_grad()),
    "zeros": _trained("zero_grad(set_to_none=False)", zero=lambda run: run.optimizer.zero_grad(set_to_none=False)),
    "discarded by the optimizer": Scenario(
        "gradients thrown away by optimizer.zero_grad", Net, train=discarded("optimizer")
    ),
    "discarded by the wrapper": Scenario("by the wrapper's zero_grad", Net, train=discarded("module")),
    "discarded by the module": Scenario("by the module's zero_grad", Net, train=discarded("inner")),
    "step twice": _trained("two steps on the same gradients", change=lambda run: run.optimizer.step()),
    "two backwards": _trained("the same graph differentiated twice", of=twice),
    "two forwards": Scenario(  # as of siamese networks
        "two forwards, then one backward", Net, loss=lambda run, x: (run.module(x) * run.module(x.flip(0))).mean()
    ),
    "no_grad between": Scenario("a forward without gradients before backward", Net, loss=forward_without_gradients),
    "evaluation": _trained("evaluation between steps", zero=evaluate),
    "autograd.grad": _trained("torch.autograd.grad in the place of backward", of=by_hand),
    "no loss on one rank": Scenario(
        "a step in which one rank has no loss", Net, train=steps(of=maybe), settings=UNUSED
    ),
    "failed forward": _trained("a forward that raises on all ranks, and is repeated", backward=fail_first),
    "uneven shares": Scenario("other numbers of rows on other ranks", Net, loss=uneven_shares),
}
