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
FUSED_OPTIMIZER = Line("Optimizer(…, fused=True)", "your own class, if that is Adam, AdamW, SGD or Adagrad")
COMPILED_BLOCKS = Line("for block in blocks: block.compile()", "the model's own list of blocks")
COMPILED_MODEL = Line("model.compile()", "after the model is on its device")
IN_GRAPHS = Line('model.compile(mode="reduce-overhead")', "or that mode in a torch.compile that is there")
MOST_WORKERS = 4
"""Workers of a loader that has fewer, where its process may run on as many cores."""


def loader_workers(workers: int) -> Line:
    """Line for a loader that has fewer workers than that."""
    where = "persistent_workers=True too where nothing changes the data set between epochs"
    return Line(f"DataLoader(…, num_workers={workers})", where)


def workers_of(cores: float | None) -> int:
    """Number of workers for a loader of a process with so many cores; None where they are not known."""
    return max(1, min(MOST_WORKERS, int(cores or MOST_WORKERS)))
