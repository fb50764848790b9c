"""What the plan says of a scheme that `bench parallel` measures: memory and traffic of a rank."""

from __future__ import annotations

import math

from trainstep.config import ModelConfig, OptimizerImpl
from trainstep.kinds import ParallelRow
from trainstep.measure.memory import GIB
from trainstep.parallel.collectives import MB
from trainstep.plan.communication import RankBytes, rank_bytes
from trainstep.plan.strategies import kept_groups, largest_group
from trainstep.precision import PRECISIONS, PrecisionName
from trainstep.records import Scalar
from trainstep.schemes import SCHEMES, Scheme


def planned_bytes(
    scheme: Scheme,
    num_parameters: int,
    world_size: int,
    *,
    frozen: int = 0,
    precision: PrecisionName,
    optimizer: OptimizerImpl,
    model: ModelConfig | None = None,
    transport: str | None = None,
) -> RankBytes:
    """Memory and traffic of a rank.

    Args:
        frozen: how many parameters are not trained.
        precision: of the step; under autocast FSDP gathers and sends in 16 bits.
        optimizer: its state is two moments per parameter, or nothing.
        model: the built-in model's shape, for the sizes of groups under FSDP; None for a user's.
        transport: of ours, as a row has it.
    """
    entry = PRECISIONS[precision]

    def filled(megabytes: float) -> int:
        """Parameters of a bucket that is full with the embedding."""
        if model is None or megabytes == math.inf:
            return num_parameters
        return int(megabytes * MB) // entry.stored_bytes + model.vocab_size * model.d_model

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
        reduce_bytes=narrow,
        largest_group=0 if model is None else largest_group(model),
        not_again=kept_groups(model) if model is not None and scheme.peer is None else 0,
        scattered=not scheme.copies_gradients,
        copies=scheme.copies_gradients,
        peer_copies=(transport or "").startswith("peer-copies"),
        copies_between=(transport or "").endswith("peer-copies"),
        largest_bucket=filled(scheme.bucket_mb),
        largest_gather=filled(scheme.exchange_mb) if scheme.overlap_gather else 0,
    )


def transport_taken(row: ParallelRow) -> str | None:
    """What carried shards and gradients of a row's scheme; of FSDP's older rows, which do not say it, too."""
    scheme = SCHEMES[row.scheme]
    older = "peer-copies, between replicas collectives" if scheme.is_hybrid else "peer-copies"
    return row.transport or (older if (scheme.wrapper, scheme.transport) == ("fsdp", "auto") else None)


def moments(plan: RankBytes) -> dict[str, Scalar]:
    """The three moments at which a rank's memory is measured, as columns."""
    return {
        "predicted_start_gib": plan.start / GIB,
        "predicted_before_step_gib": plan.before_step / GIB,
        "predicted_after_step_gib": plan.before_step / GIB,
    }
