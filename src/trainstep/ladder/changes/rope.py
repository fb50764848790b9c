"""Rotary positions by our kernel."""

from __future__ import annotations

from trainstep.base.advice import Line
from trainstep.ladder.change import Change, Settings, compiles_all
from trainstep.ladder.trial.trial import Trial


def fused_rope(trial: Trial) -> None:
    """Rotary positions that are written out are our kernel's; code that is compiled is left to the compiler."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from trainstep.ladder.places.rotary import Rotary

    rotary = Rotary(trial.places.setdefault(ROPE.name, {}).__setitem__)
    trial.on_first_call.append(rotary.see_model)
    register_optimizer_step_post_hook(rotary.updated)


def _is_compiled(settings: Settings) -> str:
    return "its models are compiled, and rotary positions left to the compiler" if compiles_all(settings) else ""


ROPE = Change(
    "fused RoPE",
    Line("trainstep.fused.rope(q, k, cos, sin)", "in place of the same written out, after import trainstep.fused"),
    {"script": 1.19, "cuda": 1.02},
    step={"fused": "rope"},
    step_if=lambda source, base: source.is_builtin,
    script=fused_rope,
    why_not=_is_compiled,
    nothing="no function of (q, k, cos, sin) that turns q and k by q · cos + rotate_half(q) · sin was recognised",
    where=("cuda",),
)
