"""Optimizers, torch's and others, of which some mix the elements of a parameter."""

import torch

from tests.parallel.odd.nets import Net
from tests.parallel.odd.runs import STEPS, Scenario, sgd, steps, three_steps


def built_before(run):
    """The optimizer has the parameters as they were before wrapping; only the module can be asked for them now."""
    run._optimizer = sgd(run.inner.parameters())
    three_steps(run)


def two_optimizers(run):
    assert run.optimizer is not None
    parameters = run.parameters()
    both = sgd(parameters[:3]), sgd(parameters[3:])
    for step in range(STEPS):
        run.backward(step)
        run.finish()
        for each in both:
            each.step()
            each.zero_grad()


class Lion(torch.optim.Optimizer):
    """An elementwise optimizer that is not torch's."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.update(each, group["lr"])

    def update(self, each, lr):
        average = self.state[each].setdefault("average", torch.zeros_like(each))
        each.sub_(torch.sign(average * 0.9 + each.grad * 0.1), alpha=lr)
        average.lerp_(each.grad, 0.1)


class DeclaredLion(Lion):
    is_elementwise = True


class Matrixwise(Lion):
    """Looks at whole matrices."""

    def update(self, each, lr):
        each.sub_(each.grad / (each.grad.norm() + 1e-3), alpha=lr)


def lbfgs(run):
    assert run.optimizer is not None
    for step in range(STEPS):

        def closure(step=step):
            run.optimizer.zero_grad()
            run.backward(step)
            run.finish()
            return 0.0

        run.optimizer.step(closure)


def schedule(run):
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)

    def zero(run):
        scheduler.step()
        run.optimizer.zero_grad()

    steps(zero=zero)(run)


def matrices_only(parameters):
    return torch.optim.Muon([each for each in parameters if each.dim() == 2], lr=0.01)


SCENARIOS = {
    "AdamW": Scenario("AdamW", Net, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)),
    "LBFGS": Scenario("LBFGS", Net, train=lbfgs, optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1)),
    "Muon": Scenario("Muon, on matrices", Net, optimizer=matrices_only),
    "Adafactor": Scenario("Adafactor", Net, optimizer=lambda p: torch.optim.Adafactor(p, lr=0.01)),
    "unknown optimizer": Scenario("an elementwise optimizer of one's own", Net, optimizer=Lion),
    "declared optimizer": Scenario("an elementwise optimizer of one's own, declared so", Net, optimizer=DeclaredLion),
    "matrix optimizer": Scenario("an optimizer of one's own that takes norms", Net, optimizer=Matrixwise),
    "schedule": Scenario("a learning-rate schedule", Net, train=schedule),
    "two optimizers": Scenario("two optimizers", Net, train=two_optimizers),
    "optimizer before": Scenario("an optimizer from the module's parameters()", Net, train=built_before),
}
