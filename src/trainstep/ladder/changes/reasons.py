"""For which scripts a change of the ladder is nothing, in words: they make it themselves, or lack what it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainstep.base.cores import cores
from trainstep.observe.loaders import share_of_waiting
from trainstep.observe.log import RankLog

Settings = Mapping[str, Any]
"""As `settings.Settings.found` has them."""
WORKERS = 4
"""Of a loader that has fewer, where this process may run on as many cores."""
LEAST_WAIT = 0.01
"""Where steps wait for data for less of their time, workers that load it earlier cannot gain what runs tell apart."""
NO_READS = "no line of the script calls item() of a tensor on a GPU"
NOT_WRITTEN_OUT = "no attention that is written out as softmax(scale · q kᵀ + mask) v was recognised"
NO_HEAD_LOSS = "no head of a model whose logits go straight into F.cross_entropy was recognised"
NO_ROPE = "no function of (q, k, cos, sin) that turns q and k by q · cos + rotate_half(q) · sin was recognised"
UNCALLED = "no call of a model was seen outside of compiled code"
NO_DDP = "the script makes no DistributedDataParallel of torch"


def workers_here() -> int:
    """How many a loader is given."""
    return max(1, min(WORKERS, cores()))


def with_few_workers(settings: Settings) -> list[Mapping[str, Any]]:
    """The loaders that are given more; an IterableDataset that does not divide itself would be repeated by each."""
    return [each for each in settings["loaders"] if each["num_workers"] < workers_here() and not each["is_iterable"]]


def seen_of(log: RankLog) -> dict[str, Any]:
    """What a whole run shows beside its settings: whether numbers are read, why code is compiled again, and how much
    of its steps waits for data."""
    return {
        "reads": any(place["call"] == "item" for place in log.lines.values()),
        "recompiles": any(each["reason"] and each["step"] > 1 for each in log.recompilations),
        "waiting": share_of_waiting(log.steps),
    }


def of_gpu(settings: Settings) -> str:
    """Of what a CPU has not."""
    return "" if settings["on_gpu"] else "it needs a GPU"


def of_reads(settings: Settings) -> str:
    """Of reading tensors late."""
    if not settings["on_gpu"]:
        return "on a CPU nothing waits where a tensor is read"
    return "" if settings["reads"] else NO_READS


def _operators(settings: Settings, name: str) -> list[str] | None:
    """Those of the first forward pass that have this in their names; None where some are not known from outside, as
    those of compiled code and of checkpointed blocks."""
    known = settings["operators"]
    return None if known is None else [each for each in known if name in each]


def of_attention(settings: Settings) -> str:
    """Of attention written out: without a softmax there is none. That of a loss is another operator."""
    found = _operators(settings, "Softmax")
    return NOT_WRITTEN_OUT if found is not None and not set(found) - {"LogSoftmaxBackward0"} else ""


def of_our_attention(settings: Settings) -> str:
    """Of our attention in the place of torch's, which computes it by a softmax where it has no kernel."""
    found = _operators(settings, "ScaledDotProduct")
    if not settings["on_gpu"] or found is None:
        return of_gpu(settings)
    if found:
        return "its attention drops probabilities" if all("dropping" in each for each in found) else ""
    return "its models call no scaled_dot_product_attention" if of_attention(settings) else ""


def of_loss(settings: Settings) -> str:
    """Of a head joined with its loss."""
    if _compiles_all(settings):
        return "its models are compiled, and head and loss left to the compiler"
    found = _operators(settings, "NllLoss")
    return NO_HEAD_LOSS if found is not None and not found else ""


def of_rope(settings: Settings) -> str:
    """Of rotary positions by our kernel."""
    if not settings["on_gpu"]:
        return of_gpu(settings)
    return "its models are compiled, and rotary positions left to the compiler" if _compiles_all(settings) else ""


def _compiles_all(settings: Settings) -> bool:
    return bool(settings["models"]) and all(model["is_whole_compiled"] for model in settings["models"])


def of_tf32(settings: Settings) -> str:
    """Of products on TF32 units."""
    if settings["matmul"] != "highest":
        return f'the script sets it itself: float32 products are at "{settings["matmul"]}"'
    return of_gpu(settings)


def of_fused(settings: Settings) -> str:
    """Of fused optimizers."""
    own = [each for each in settings["optimizers"] if each["fused"] or each["foreach"]]
    known = [each for each in settings["optimizers"] if "file" in each]
    if own and len(own) == len(settings["optimizers"]):
        names = " and ".join(f"{name}=True" for name in ("fused", "foreach") if any(each[name] for each in own))
        return f"the script sets it itself: {names}"
    return "" if known else "its optimizers have no fused form in torch"


def of_autocast(settings: Settings) -> str:
    """Of autocast to bf16."""
    if not settings["models"]:
        return UNCALLED
    if settings["autocast"]:
        return f"the script sets it itself: autocast to {' and '.join(settings['autocast'])}"
    half = {name for model in settings["models"] for name in model["dtypes"]} - {"float32"}
    return f"its weights are {' and '.join(sorted(half))}" if half else ""


def of_compile(settings: Settings) -> str:
    """Of compiling models."""
    if not settings["models"]:
        return UNCALLED
    return "the script sets it itself" if any(model["is_compiled"] for model in settings["models"]) else ""


def of_blocks(settings: Settings) -> str:
    """Of compiling blocks."""
    return _without_blocks(settings) or of_compile(settings)


def of_checkpointing(settings: Settings) -> str:
    """Of checkpointing blocks."""
    return "the script sets it itself" if settings["checkpoints"] else _without_blocks(settings)


def _without_blocks(settings: Settings) -> str:
    if not settings["models"]:
        return UNCALLED
    has_blocks = any(model["blocks"] for model in settings["models"])
    return "" if has_blocks else "its models have no repeated blocks in an nn.ModuleList"


def of_batches(settings: Settings) -> str:
    """Of a larger batch."""
    if not settings["loaders"]:
        return "the script makes no DataLoader: its batches are its own"
    if any(loader["batch_size"] for loader in settings["loaders"]):
        return ""
    if any(loader["is_iterable"] for loader in settings["loaders"]):
        return "how many samples are in a batch of an IterableDataset is not known from outside"
    return "its loaders' batches are made by batch samplers, or by the script"


def of_channels(settings: Settings) -> str:
    """Of channels last."""
    if not settings["models"]:
        return UNCALLED
    convolving = [model for model in settings["models"] if model["convolutions"]]
    if not convolving:
        return "its models have no convolutions in two dimensions"
    return "the script sets it itself" if all(model["is_channels_last"] for model in convolving) else ""


def of_workers(settings: Settings) -> str:
    """Of loaders' workers."""
    if not settings["loaders"]:
        return "the script makes no DataLoader"
    if all(loader["num_workers"] >= workers_here() for loader in settings["loaders"]):
        return "the script sets it itself: its loaders have workers"
    if not with_few_workers(settings):
        return "workers would repeat an IterableDataset that does not divide itself"
    waiting = settings["waiting"]
    if waiting is not None and waiting < LEAST_WAIT:
        return f"its steps wait for data for {waiting:.1%} of their time"
    return ""


def of_sizes(settings: Settings) -> str:
    """Of compiled code for any size."""
    return "" if settings["recompiles"] else "nothing is compiled again after the first step"


def of_pinning(settings: Settings) -> str:
    """Of pinned memory."""
    if not settings["loaders"]:
        return "the script makes no DataLoader"
    if all(loader["pin_memory"] for loader in settings["loaders"]):
        return "the script sets it itself: pin_memory=True"
    return of_gpu(settings)


ONE_BUCKET_MIB = 1.0
"""Of gradients that DistributedDataParallel sends at once anyway: its first bucket is that large by default."""


def of_buckets(settings: Settings) -> str:
    """Of larger buckets of torch's DistributedDataParallel."""
    if not settings["ddp"]:
        return NO_DDP
    sizes = {each["bucket_cap_mb"] for each in settings["ddp"]}
    if None not in sizes:
        return f"the script sets it itself: bucket_cap_mb={' and '.join(map(str, sorted(sizes)))}"
    most = max(each["gradients_mib"] for each in settings["ddp"] if each["bucket_cap_mb"] is None)
    return "" if most > ONE_BUCKET_MIB else f"its gradients are {most:.2g} MiB, which are sent at once anyway"


def of_ddp(name: str) -> Callable[[Settings], str]:
    """Of an argument of torch's DistributedDataParallel."""

    def why_not(settings: Settings) -> str:
        if not settings["ddp"]:
            return NO_DDP
        return f"the script sets it itself: {name}=True" if all(each[name] for each in settings["ddp"]) else ""

    return why_not
