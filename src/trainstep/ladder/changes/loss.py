"""The loss over a large vocabulary without all of its logits at once: in chunks, or by our kernel."""

from __future__ import annotations

from trainstep.base.advice import Line
from trainstep.ladder.change import Change, Settings, compiles_all, operators
from trainstep.ladder.trial.trial import Trial

CHUNKED = Change(
    "chunked loss",
    Line(
        "torch.utils.checkpoint.checkpoint(head_and_loss, hidden, targets, use_reentrant=False)",
        "for slices of tokens, whose sums of losses are added up: all logits never exist at once",
    ),
    {"cuda": 1.03, "cpu": 1.03},
    answers=("memory.loss",),
    step={"loss": "chunked"},
    step_if=lambda source, base: source.is_builtin,
)
_NO_HEAD_LOSS = "no head of a model whose logits go straight into F.cross_entropy was recognised"


def fused_loss(trial: Trial) -> None:
    """A head whose logits go into `F.cross_entropy` is joined with it; where it is compiled, that is the compiler's."""
    from trainstep.ladder.places.head_loss import HeadLoss

    joined = HeadLoss(trial.places.setdefault(FUSED.name, {}).__setitem__)
    trial.on_first_call.append(joined.see_model)


def _without_loss(settings: Settings) -> str:
    if compiles_all(settings):
        return "its models are compiled, and head and loss left to the compiler"
    found = operators(settings, "NllLoss")
    return _NO_HEAD_LOSS if found is not None and not found else ""


FUSED = Change(
    "fused loss",
    Line(
        "trainstep.fused.linear_cross_entropy(hidden, head, targets)",
        "in place of the head and F.cross_entropy: all logits never exist at once",
    ),
    {"script": 1.2, "cuda": 1.01},
    answers=("memory.loss",),
    step={"loss": "fused"},
    step_if=lambda source, base: source.is_builtin,
    script=fused_loss,
    why_not=_without_loss,
    nothing=_NO_HEAD_LOSS,
)
