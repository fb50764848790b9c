"""What `plan.communication` says of the schemes that `bench parallel` compares. Imports no torch."""

from __future__ import annotations

from trainstep.config import ModelConfig, OptimizerImpl
from trainstep.plan.communication import RankBytes, rank_bytes
from trainstep.plan.machine import GIB
from trainstep.plan.strategy_memory import largest_group
from trainstep.precision import PRECISIONS, PrecisionName
from trainstep.records import Scalar
from trainstep.schemes import Scheme


def planned_bytes(
    scheme: Scheme,
    num_parameters: int,
    world_size: int,
    *,
    precision: PrecisionName,
    optimizer: OptimizerImpl,
    model: ModelConfig | None = None,
    peer_copies: bool = False,
) -> RankBytes:
    """Memory and traffic of a rank.

    Args:
        scheme: whose.
        num_parameters: of the model.
        world_size: ranks.
        precision: of the step; under autocast FSDP gathers and sends in 16 bits.
        optimizer: its state is two moments per parameter, or nothing.
        model: the built-in model's shape, for the size of its largest group; None for a user's.
        peer_copies: FSDP's transport.
    """
    entry = PRECISIONS[precision]
    narrow = entry.computed_bytes if scheme.shards_weights and entry.is_autocast else None
    return rank_bytes(
        scheme.planned_as or "ddp",
        num_parameters,
        world_size,
        state_per_parameter=0 if optimizer == "sgd" else 8,
        compute_bytes=narrow,
        reduce_bytes=narrow,
        largest_group=0 if model is None else largest_group(model),
        scattered=not scheme.copies_gradients,
        copies=scheme.copies_gradients,
        peer_copies=peer_copies,
    )


def moments(plan: RankBytes) -> dict[str, Scalar]:
    """The three moments at which a rank's memory is measured, as columns."""
    return {
        "predicted_start_gib": plan.start / GIB,
        "predicted_before_step_gib": plan.before_step / GIB,
        "predicted_after_step_gib": plan.after_step / GIB,
    }
