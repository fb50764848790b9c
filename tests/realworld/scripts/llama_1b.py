"""transformers' Trainer with a Llama of 1.2 B, random weights, random tokens: as its defaults have it, or by hand.

Its arguments: a folder, `plain` or `expert`, how many updates, and optionally a width, for a try on a CPU.
"""

import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

FOLDER, BY, UPDATES = sys.argv[1], sys.argv[2], int(sys.argv[3])
WIDTH = int(sys.argv[4]) if len(sys.argv) > 4 else 2048
SMALL = WIDTH < 2048
LENGTH, BATCH, VOCAB = (32, 2, 512) if SMALL else (1024, 4, 128_256)
# what someone who knows Trainer would set
EXPERT = {"bf16": True, "tf32": not SMALL, "torch_compile": True, "optim": "adamw_torch_fused"}


class Tokens(Dataset):
    """Random ids, the same for the same index."""

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


config = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=4 * WIDTH,
    num_hidden_layers=2 if SMALL else 16,
    num_attention_heads=WIDTH // 64,
    num_key_value_heads=max(1, WIDTH // 256),
    tie_word_embeddings=True,
    use_cache=False,
)
arguments = TrainingArguments(
    FOLDER,
    max_steps=UPDATES,
    per_device_train_batch_size=BATCH,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    **(EXPERT if BY == "expert" else {}),
)
torch.manual_seed(1)
with torch.device("cpu" if SMALL else "cuda"):
    model = LlamaForCausalLM(config)
Trainer(model, arguments, train_dataset=Tokens()).train()
