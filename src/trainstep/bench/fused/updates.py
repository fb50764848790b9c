"""Updates of AdamW over the parameters of four blocks: whether they are right, and an update to time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trainstep.bench.cases import FusedCase
from trainstep.bench.check.fused import Budget, compare
from trainstep.casting import DTYPES
from trainstep.config import PhaseContext

BLOCKS, CHECK_UPDATES = 4, 3
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
"""Those of `make_optimizer`, with an eps that float16 holds."""

Update = Callable[[], object]
MakeUpdate = Callable[[Sequence[nn.Parameter]], tuple[Update, torch.optim.Optimizer]]


def implementation_of(case: FusedCase, device: torch.device) -> MakeUpdate:
    """Given parameters, what updates them, and the optimizer behind it.

    Raises:
        UnsupportedError: ours does not run here.
    """
    if case.impl == "ours":
        from trainstep.bench.fused.problems import require_small

        require_small(case, device)

    def make(parameters: Sequence[nn.Parameter]) -> tuple[Update, torch.optim.Optimizer]:
        optimizer: torch.optim.Optimizer
        if case.impl == "ours":
            from trainstep.fused import AdamW

            optimizer = AdamW(parameters, **SETTINGS)  # type: ignore[arg-type]
        else:
            fused = case.impl == "torch-fused"
            optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=not fused, **SETTINGS)  # type: ignore[arg-type]
        # As torch's tutorial "Compiling the optimizer" does it.
        return (torch.compile(optimizer.step) if case.impl == "compiled" else optimizer.step), optimizer

    return make


def judge(case: FusedCase, make: MakeUpdate, device: torch.device) -> Budget:
    """Three updates of one block's parameters and both averages, against float64; plain is torch's lists of tensors."""
    dtype = DTYPES[case.dtype]
    plain = implementation_of(FusedCase("eager", "adamw", case.shape, case.dtype), device)
    found, ordinary, exact = (
        _updated(case, each, kind, device) for each, kind in ((make, dtype), (plain, dtype), (plain, torch.float64))
    )
    return compare(found, ordinary, exact, ("update", "exp_avg", "exp_avg_sq"))


def step_of(case: FusedCase, make: MakeUpdate, device: torch.device) -> Callable[[PhaseContext], None]:
    """One update of four blocks' parameters, which are made here."""
    parameters = _parameters(case, BLOCKS, DTYPES[case.dtype], device)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    update, _ = make(parameters)

    def step(phase: PhaseContext) -> None:
        update()

    return step


def _parameters(case: FusedCase, blocks: int, dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Four matrices of attention, three of the feed-forward and two gains a block, drawn in the case's dtype."""
    d, f = case.sizes.d_model, case.sizes.d_ff
    generator = torch.Generator(device).manual_seed(1)
    shapes = [*[(d, d)] * 4, (f, d), (f, d), (d, f), (d,), (d,)] * blocks
    numbers = (torch.randn(shape, device=device, generator=generator).to(DTYPES[case.dtype]) for shape in shapes)
    return [nn.Parameter(each.to(dtype)) for each in numbers]


def _updated(case: FusedCase, make: MakeUpdate, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """What three updates add to the parameters, and the averages after them, each as one vector."""
    parameters = _parameters(case, 1, dtype, device)
    before = [each.detach().clone() for each in parameters]
    update, optimizer = make(parameters)
    generator = torch.Generator(device).manual_seed(2)
    for _ in range(CHECK_UPDATES):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, device=device, generator=generator)
            parameter.grad = gradient.to(DTYPES[case.dtype]).to(dtype)
        update()
    pairs = zip(parameters, before, strict=True)
    added = torch.cat([(after.detach().double() - first.double()).flatten() for after, first in pairs])
    averages = (
        torch.cat([optimizer.state[each][name].flatten() for each in parameters]) for name in ("exp_avg", "exp_avg_sq")
    )
    return [added.to(dtype), *averages]
