"""Predictions of the plan for a scheme that `bench parallel` measures: memory and traffic of a rank."""

from __future__ import annotations

import math

from trainstep.base.config import ModelConfig, OptimizerImpl
from trainstep.base.precision import PRECISIONS, PrecisionName
from trainstep.base.schemes import Scheme
from trainstep.measure.memory import GIB
from trainstep.parallel import ShardedOptimizer
from trainstep.parallel.collectives import MB
from trainstep.plan.communication import RankBytes, rank_bytes
from trainstep.plan.strategies import kept_groups, largest_group
from trainstep.rows.records import Scalar


def planned_bytes(
    scheme: Scheme,
    num_parameters: int,
    world_size: int,
    *,
    frozen: int = 0,
    precision: PrecisionName,
    optimizer: OptimizerImpl,
    model: ModelConfig | None = None,
    peer_copies: bool = False,
) -> RankBytes:
    """Memory and traffic of a rank.

    Args:
        frozen: how many parameters are not trained.
        precision: of the step; under autocast FSDP gathers and sends in 16 bits.
        optimizer: its state is two moments per parameter, or nothing.
        model: the built-in model's shape, for the sizes of groups under FSDP; None for a user's.
        peer_copies: whether ours went by them.
    """
    assert scheme.bucket_mb is not None, "what is compared has one"
    entry = PRECISIONS[precision]

    def filled(megabytes: float) -> int:
        """Parameters of a bucket that is full with the embedding."""
        if model is None or megabytes == math.inf:
            return num_parameters
        return int(megabytes * MB) // entry.stored_bytes + model.vocab_size * model.d_model

    gathered_mb = ShardedOptimizer.default_exchange_mb(num_parameters * entry.stored_bytes, overlap_gather=True)
    narrow = entry.computed_bytes if scheme.shards_weights and entry.is_autocast else None
    return rank_bytes(
        scheme.planned_as or "ddp",
        num_parameters,
        world_size,
        replicas=scheme.replicas or 1,
        frozen=frozen,
        bytes_per_parameter=entry.stored_bytes,
        state_per_parameter=0 if optimizer == "sgd" else 2 * entry.stored_bytes,
        compute_bytes=narrow,
        reduce_bytes=narrow if scheme.peer is None or scheme.narrow_reduce else None,
        largest_group=0 if model is None else largest_group(model, scheme.blocks_per_group),
        not_again=0 if model is None else _not_again(scheme, model),
        scattered=not scheme.copies_gradients,
        copies=scheme.copies_gradients,
        peer_copies=peer_copies,
        largest_bucket=filled(scheme.bucket_mb),
        largest_gather=filled(gathered_mb) if scheme.overlap_gather else 0,
    )


def _not_again(scheme: Scheme, model: ModelConfig) -> int:
    """Parameters that stay gathered from forward to backward: of torch's FSDP all that are outside of blocks."""
    if scheme.peer is None:
        return kept_groups(model, scheme.blocks_per_group)
    return (2 * model.vocab_size + 1) * model.d_model


def moments(plan: RankBytes) -> dict[str, Scalar]:
    """The three moments at which a rank's memory is measured, as columns."""
    return {
        "predicted_start_gib": plan.start / GIB,
        "predicted_before_step_gib": plan.before_step / GIB,
        "predicted_after_step_gib": plan.before_step / GIB,
    }
