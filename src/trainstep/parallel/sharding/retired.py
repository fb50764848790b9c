"""Optimizers that were built before sharding: their parameters are no longer the module's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from trainstep.errors import UsageError


def refuse_retired_parameters(owner: object, parameters: Mapping[str, nn.Parameter]) -> None:
    """As long as `owner` lives, let the step of an optimizer that has one of `parameters` fail, as it would do nothing.

    Args:
        owner: what replaced the parameters.
        parameters: the replaced ones by name; they are not kept alive.
    """
    retired: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
    for name, parameter in parameters.items():
        retired[parameter] = name

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not retired:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in retired:
                    raise UsageError(
                        f"the optimizer has {retired[parameter]} as it was before sharding; build the optimizer after "
                        "FullyShardedDataParallel, from its parameters()"
                    )

    weakref.finalize(owner, register_optimizer_step_pre_hook(check).remove)
