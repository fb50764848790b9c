"""Arguments of torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable

from trainstep.base.advice import Line
from trainstep.ladder.change import Change, Settings, give
from trainstep.ladder.trial.trial import Trial

BUCKET_MB = 100
"""Of a larger bucket, in MiB: four times its default."""
ONE_BUCKET_MIB = 1.0
"""Of gradients that are sent at once anyway: the first bucket is that large by default."""
_NO_DDP = "the script makes no DistributedDataParallel of torch"


def bucket_views(trial: Trial) -> None:
    """Gradients are kept in the buckets, in place of a copy of each."""
    _give_ddp("gradient_as_bucket_view", True)


def static_graph(trial: Trial) -> None:
    """Every step is taken to use the same parameters in the same order."""
    _give_ddp("static_graph", True)


def larger_buckets(trial: Trial) -> None:
    """Gradients are sent in fewer and larger parts; the first is no longer a small one."""
    _give_ddp("bucket_cap_mb", BUCKET_MB)


def _give_ddp(name: str, value: object) -> None:
    from torch.nn.parallel import DistributedDataParallel

    give(DistributedDataParallel, lambda given: {} if given.get(name) else {name: value})


def _has(name: str) -> Callable[[Settings], str]:
    def why_not(settings: Settings) -> str:
        if not settings["ddp"]:
            return _NO_DDP
        return f"the script sets it itself: {name}=True" if all(each[name] for each in settings["ddp"]) else ""

    return why_not


def _has_buckets(settings: Settings) -> str:
    if not settings["ddp"]:
        return _NO_DDP
    sizes = {each["bucket_cap_mb"] for each in settings["ddp"]}
    if None not in sizes:
        return f"the script sets it itself: bucket_cap_mb={' and '.join(map(str, sorted(sizes)))}"
    most = max(each["gradients_mib"] for each in settings["ddp"] if each["bucket_cap_mb"] is None)
    return "" if most > ONE_BUCKET_MIB else f"its gradients are {most:.2g} MiB, which are sent at once anyway"


BUCKETS = Change(
    "DDP's buckets as gradients",
    Line("DistributedDataParallel(…, gradient_as_bucket_view=True)", "torch's own"),
    {"script": 1.05},
    script=bucket_views,
    why_not=_has("gradient_as_bucket_view"),
)
STATIC_GRAPH = Change(
    "DDP's static graph",
    Line("DistributedDataParallel(…, static_graph=True)", "torch's own, where every step uses the same parameters"),
    {"script": 1.04},
    script=static_graph,
    why_not=_has("static_graph"),
)
LARGER_BUCKETS = Change(
    "DDP's larger buckets",
    Line("DistributedDataParallel(…, bucket_cap_mb=100)", "torch's own, in place of 25: fewer and larger collectives"),
    {"script": 1.03},
    script=larger_buckets,
    why_not=_has_buckets,
)
