"""Texts written by the model, continuing the beginnings of validation text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from trainstep.parallel.process import Process
from trainstep.train.config import RunConfig
from trainstep.train.data import TokenData
from trainstep.train.metrics import Show
from trainstep.training_step import TrainingStep

PROMPT = 48
"""Tokens of validation text that a sample begins with."""
BYTES = 256
"""Text has no other ids than these, so no other is drawn."""


@torch.no_grad()
def generate(
    module: nn.Module, prompts: Tensor, *, new_tokens: int, context: int, temperature: float, seed: int
) -> Tensor:
    """Continue every prompt token by token; bytes only.

    The module is called on sequences of one length, filled up at their end, which a causal model does not see; so
    nothing is compiled anew. With sharded weights every rank must call this.

    Args:
        module: tokens (B, S) → logits (B, S, V), causal.
        prompts: (B, P) token ids, P at least 1.
        new_tokens: how many to add.
        context: the longest sequence the module takes; beyond it the oldest tokens are forgotten.
        temperature: of the sampling; 0 takes the likeliest token.
        seed: of the draws.

    Returns:
        Token ids (B, P + new_tokens).
    """
    width = min(context, prompts.shape[1] + new_tokens)
    draws = torch.Generator().manual_seed(seed)
    tokens = prompts
    for _ in range(new_tokens):
        seen = tokens[:, -width:]
        padded = nn.functional.pad(seen, (0, width - seen.shape[1]))
        logits = module(padded)[:, seen.shape[1] - 1, :BYTES].double().cpu()  # (B, bytes)
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws)
        tokens = torch.cat([tokens, chosen.to(tokens.device)], dim=1)
    return tokens


def write_samples(
    step: TrainingStep, data: TokenData, config: RunConfig, process: Process, path: Path, show: Show
) -> None:
    """Let the model continue text, on all ranks; show it, and write it to `path`. Tokens that are no text: say so."""
    train = config.train
    if not train.samples:
        return
    if not data.is_text:
        show.line("no samples of text: the token ids of a .bin file have no tokenizer here")
        return
    begun = prompts(data, train.samples)
    with step.inference():
        tokens = generate(
            step.replica.module,
            begun.to(process.device),
            new_tokens=train.sample_tokens,
            context=data.config.step.context,
            temperature=train.temperature,
            seed=config.step.seed,
        ).cpu()
    texts = [f"{as_text(row[: begun.shape[1]])}⟦{as_text(row[begun.shape[1] :])}⟧" for row in tokens]
    if process.rank == 0:
        path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    show.line("samples, what the model wrote in ⟦⟧:")
    for text in texts:
        show.line(text)


def prompts(data: TokenData, count: int) -> Tensor:
    """Beginnings of validation text (count, up to `PROMPT`), evenly spaced."""
    length = min(PROMPT, data.config.step.context)
    starts = np.linspace(0, len(data.validation) - length, count + 1).astype(np.int64)[:count]
    return torch.from_numpy(np.stack([data.validation[start : start + length] for start in starts]).astype(np.int64))


def as_text(tokens: Tensor) -> str:
    """Bytes (n,) as text; what is no UTF-8 is shown as the replacement character."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")
