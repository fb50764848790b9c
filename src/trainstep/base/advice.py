"""Lines that a reader writes for a change.

A ladder's rows carry the lines of the changes that it tried, so that a report needs to know no change. A finding whose
action no ladder tried has none of these rows: its line stands here, and the change takes it from here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A line that a reader writes for a change."""

    code: str
    where: str = ""
    """Place where the line goes, or the code that it replaces."""

    @property
    def text(self) -> str:
        """Both, in one line."""
        return f"{self.code} ({self.where})" if self.where else self.code


TF32 = Line('torch.set_float32_matmul_precision("high")', "once, before the first step")
FUSED_ATTENTION = Line(
    "F.scaled_dot_product_attention(q, k, v, attn_mask=…)",
    "in place of attention that is written out; is_causal=True in place of its mask only if that is causal",
)
FUSED_OPTIMIZER = Line(
    "torch.optim.AdamW(model.parameters(), …, fused=True)", "Adam, SGD and Adagrad take the argument too"
)
COMPILED_BLOCKS = Line("for block in blocks: block.compile()", "the model's own list of blocks")
COMPILED_MODEL = Line("model.compile()", "after the model is on its device")
LOADER_WORKERS = Line(
    "DataLoader(…, num_workers=4)",
    "or as many as there are cores; persistent_workers=True too where nothing changes the data set between epochs",
)
