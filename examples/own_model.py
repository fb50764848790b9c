"""Your own model under trainstep: a module in the Hugging Face style, measured with

    trainstep analyze --workload examples.own_model:workload

The module takes keyword arguments and returns an object with `.loss` and `.logits`, as `transformers` models do; it is
written out here so that nothing needs downloading. All that trainstep asks for is the `Workload` at the end.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainstep import Workload


@dataclass
class ModelOutput:
    """What the module returns."""

    loss: Tensor
    logits: Tensor


class Layer(nn.Module):
    """Pre-norm self-attention and a GELU feed-forward."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.c_attn = nn.Linear(hidden_size, 3 * hidden_size)
        self.c_proj = nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(batch, sequence, hidden_size) → the same."""
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self._qkv(hidden_states))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        hidden_states = hidden_states + self.c_proj(mixed.transpose(1, 2).flatten(-2))
        return hidden_states + self.mlp(self.ln_2(hidden_states))

    def _qkv(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return self.c_attn(self.ln_1(hidden_states)).chunk(3, dim=-1)


class CausalLM(nn.Module):
    """A small GPT-2 with learned positions and tied embeddings."""

    def __init__(
        self, vocab_size: int = 512, hidden_size: int = 128, layers: int = 2, heads: int = 4, positions: int = 128
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, hidden_size), nn.Embedding(positions, hidden_size)
        self.h = nn.ModuleList(Layer(hidden_size, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> ModelOutput:
        """input_ids, labels: (batch, sequence) token ids; the loss shifts the labels itself."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.wte(input_ids) + self.wpe(positions)
        for layer in self.h:
            hidden_states = layer(hidden_states)
        logits = self.lm_head(self.ln_f(hidden_states))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return ModelOutput(loss, logits)


def workload() -> Workload:
    """What `--workload` names: called anew for every setting that is measured."""
    random = torch.Generator().manual_seed(0)
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(512, (8, 4, 128), generator=random).unbind()]
    return Workload(
        module=CausalLM(),
        batches=batches,
        forward=lambda module, batch: module(**batch),
        loss=lambda output, batch: output.loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
    )
