"""Formulas that a model writes out where PyTorch has one kernel for them: found in a profile by the operators run."""

from __future__ import annotations

from collections.abc import Sequence

from trainstep.kinds import KernelRow, PieceRow, ProfileRow
from trainstep.records import Row, belonging, of_kind
from trainstep.report.finding import Finding, listed

TOPIC = "formulas"
MUCH = 0.05  # Share of the step's kernel time from which a formula is remarked on
LOSS = "(loss)"
MATH_FORM = "aten::_scaled_dot_product_attention_math"

_WRITTEN_OUT = (
    "Attention is written out in {modules}: products, mask and softmax are kernels of their own there, and take "
    "{share:.0%} of the kernel time. torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True) "
    "computes the same in one kernel, without a score matrix in memory."
)
_NOT_FUSED = (
    "In {modules}, scaled_dot_product_attention runs in its math form, as products, mask, softmax and dropout one "
    "after the other, and takes {share:.0%} of the kernel time: no fused kernel took the call. On a CPU dropout is "
    "one reason, on a GPU a mask, a dtype or head_dim; "
    "torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) around the call makes torch say which."
)


def formula_findings(rows: Sequence[Row]) -> list[Finding]:
    """Attention and cross-entropy written out in the first profile's model."""
    profile = next((row for row in of_kind(rows, ProfileRow) if row.status == "ok"), None)
    if profile is None:
        return []
    kernels = belonging(rows, KernelRow, profile)
    found = [] if belonging(rows, PieceRow, profile) else _attention(kernels)  # ours has a flag for it
    return [*found, *_cross_entropy(kernels)]


def _attention(kernels: Sequence[KernelRow]) -> list[Finding]:
    """Modules whose own forward makes batched products and a softmax, by themselves or in SDPA's math form."""
    named = {
        module: operators
        for module in dict.fromkeys(row.module for row in kernels)
        if module != LOSS and {"aten::bmm", "aten::_softmax"} <= (operators := _operators(kernels, module, "forward"))
    }
    found = []
    for form, said in (("attention-written-out", _WRITTEN_OUT), ("attention-not-fused", _NOT_FUSED)):
        by_sdpa = said is _NOT_FUSED
        modules = [module for module, operators in named.items() if (MATH_FORM in operators) is by_sdpa]
        share = sum(_share(kernels, module) for module in modules)
        if share >= MUCH:
            found.append(_finding(form, modules, share, said.format(modules=listed(modules), share=share)))
    return found


def _cross_entropy(kernels: Sequence[KernelRow]) -> list[Finding]:
    """A loss that takes a softmax, and not by way of log_softmax as F.cross_entropy does."""
    operators = _operators(kernels, LOSS, "loss")
    share = _share(kernels, LOSS)
    if share < MUCH or "aten::_softmax" not in operators or "aten::_log_softmax" in operators:
        return []
    sentence = (
        f"Cross-entropy is written out: the loss and its backward take {share:.0%} of the kernel time, over tensors "
        "as large as the logits. torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) makes two "
        "passes over them, and cannot overflow or take the logarithm of zero."
    )
    return [_finding("cross-entropy-written-out", [LOSS], share, sentence)]


def _finding(what: str, modules: Sequence[str], share: float, sentence: str) -> Finding:
    return Finding(
        id=f"formulas.{what}", topic=TOPIC, figures={"modules": tuple(modules), "share": share}, sentence=sentence
    )


def _operators(kernels: Sequence[KernelRow], module: str, phase: str) -> set[str]:
    return {str(row.operator) for row in kernels if row.module == module and row.phase == phase}


def _share(kernels: Sequence[KernelRow], module: str) -> float:
    """Of the step's kernel time, forward and backward."""
    return sum(row.share or 0 for row in kernels if row.module == module)


RULES = (formula_findings,)
