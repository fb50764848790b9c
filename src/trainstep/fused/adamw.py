"""AdamW with one kernel launch for all parameters of a group that are alike, its states in float32 or bfloat16."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from trainstep.errors import UnsupportedError, UsageError
from trainstep.fused.operators import DTYPES, described, require_device
from trainstep.fused.triton.adamw import BLOCK, launch_adamw

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_STATES = ("exp_avg", "exp_avg_sq")
_OWN = ("state_dtype", "stochastic_rounding", "seed")


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` (Loshchilov & Hutter 2019), updated by one kernel; state dicts of either load into the other.

    Everything is computed in float32, and rounded once where it is stored in 16 bits.

    Args:
        params, lr, betas, eps, weight_decay: as torch's; lr a number.
        state_dtype: of exp_avg and exp_avg_sq: float32 or bfloat16; None for each parameter's own, as torch's.
        stochastic_rounding: whether parameters and states in bfloat16 are rounded up or down at random, so that the
            mean is exact. Rounded to nearest, changes below half of a number's last bit (2⁻⁹ of it or less) are lost:
            exp_avg_sq hardly ever changes where beta2 is 0.999.
        seed: of that randomness; with the number of the step it decides all of it.

    Raises UsageError for settings out of range. `step` raises UnsupportedError for parameters that are not on an NVIDIA
    GPU, of other dtypes, DTensors, sparse, or overlapping in memory.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        own = {"state_dtype": state_dtype, "stochastic_rounding": stochastic_rounding, "seed": seed}
        self._forget_tables()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **own})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises UsageError for settings out of range."""
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_tables()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A state dict of this class or of `torch.optim.AdamW`; how states are stored stays as it was chosen here.

        Raises:
            UnsupportedError: one of AMSGrad, of maximizing, or of Adam, whose weight decay is another.
        """
        for group in state_dict["param_groups"]:
            on = [name for name in ("amsgrad", "maximize") if group.get(name)]
            if on or not group.get("decoupled_weight_decay", True):
                what = on[0] if on else "decoupled_weight_decay=False"
                raise UnsupportedError(f"the fused AdamW has no {what}, which this state dict was made with")
        own = [{name: group[name] for name in _OWN} for group in self.param_groups]
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        for group, kept, loaded in zip(self.param_groups, own, state_dict["param_groups"], strict=True):
            group |= kept
            for parameter, number in zip(group["params"], loaded["params"], strict=True):
                if number not in saved:
                    continue
                state = self.state[parameter] = _empty_states(parameter, group)
                state["step"] += float(saved[number]["step"])  # which torch's fused form has on the GPU
                for name in _STATES:
                    state[name].copy_(saved[number][name])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` does, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        _check_parameter(parameter)
                        state.update(_empty_states(parameter, group))
                    state["step"] += 1
                    alike[parameter.device, parameter.dtype, parameter.grad.dtype, int(state["step"])].append(parameter)
            for (device, *_, number), parameters in alike.items():
                with torch.cuda.device_of(parameters[0]):  # Triton launches on the current device
                    self._update(group, device, parameters, number)
        return loss

    def _update(self, group: dict[str, Any], device: torch.device, parameters: Sequence[Tensor], number: int) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        gradients = [_laid_out_as(parameter) for parameter in parameters]
        averages, squares = ([self.state[each][name] for each in parameters] for name in _STATES)
        scalars = (
            *(1 - lr * group["weight_decay"], lr / (1 - beta1**number)),
            *(1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2**number), group["eps"]),
        )
        kinds = {"P": parameters[0].dtype, "G": gradients[0].dtype, "S": averages[0].dtype}
        stochastic = {
            f"{name}_STOCHASTIC": group["stochastic_rounding"] and kinds[name] == torch.bfloat16 for name in "PS"
        }
        table, owners = self._tables(device, parameters, gradients, averages, squares)
        seed = (group["seed"] * 1_000_003 + number) % 2**31
        types = {name: _TYPES[kind] for name, kind in kinds.items()}
        launch_adamw(table, owners, scalars, seed, **types, **stochastic)
        changed = [*parameters, *averages, *squares]
        torch.autograd.graph.increment_version(changed)  # a graph that saved what they were is an error in its backward

    def _forget_tables(self) -> None:
        self._owners: dict[Any, tuple[list[int], Tensor]] = {}
        self._latest: dict[Any, tuple[list[list[int]], Tensor]] = {}

    def _tables(self, device: torch.device, *tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The kernel's tables of parameters, gradients and states; copied to the device only where something moved."""
        sizes = [each.numel() for each in tensors[0]]
        name = (device, *sizes)
        if name not in self._owners:
            pieces = torch.tensor([-(-size // BLOCK) for size in sizes])
            owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), pieces)
            self._owners[name] = (pieces.cumsum(0) - pieces).tolist(), owners.to(device)
        starts, owners = self._owners[name]
        rows = [*([each.data_ptr() for each in every] for every in tensors), sizes, starts]
        if name not in self._latest or self._latest[name][0] != rows:
            table = torch.tensor(rows)
            if device.type == "cuda":  # pinned, so that the host does not wait for the copy
                table = table.pin_memory().to(device, non_blocking=True)
            self._latest[name] = rows, table
        return self._latest[name][1], owners


def _empty_states(parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """The states of a parameter before its first step, in its layout."""
    dtype = group["state_dtype"] or parameter.dtype
    return {"step": torch.tensor(0.0), **{name: torch.zeros_like(parameter, dtype=dtype) for name in _STATES}}


def _laid_out_as(parameter: Tensor) -> Tensor:
    """The parameter's gradient, its numbers in the order in memory in which the parameter's are."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.strided or gradient.dtype not in DTYPES:
        raise UnsupportedError(f"the fused AdamW takes dense gradients, of floating point: got {gradient.layout}")
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _check_parameter(parameter: Tensor) -> None:
    require_device("the fused AdamW", parameter.device)
    if parameter.dtype not in DTYPES or type(parameter.data) is not Tensor or parameter.layout != torch.strided:
        what = f"got {type(parameter.data).__name__} {described(parameter=parameter)}"
        raise UnsupportedError(f"the fused AdamW takes dense plain tensors of float32, float16 or bfloat16: {what}")
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        what = f"strides {parameter.stride()} of {tuple(parameter.shape)}"
        raise UnsupportedError(f"the fused AdamW takes parameters without gaps or overlaps in memory: got {what}")


def _check_group(group: dict[str, Any]) -> None:
    if group["state_dtype"] not in (None, torch.float32, torch.bfloat16):
        raise UsageError(f"state_dtype is {group['state_dtype']}; expected torch.float32, torch.bfloat16 or None")
    for name, least, below in (
        ("lr", 0, math.inf),
        ("eps", 0, math.inf),
        ("weight_decay", 0, math.inf),
        ("seed", 0, 2**31),
    ):
        if isinstance(group[name], Tensor) or not least <= group[name] < below:
            raise UsageError(f"{name} is {group[name]}; expected a number from {least} on, below {below:g}")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise UsageError(f"betas are {group['betas']}; expected two numbers from 0 on, below 1")
