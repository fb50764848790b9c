"""transformers' Trainer with a tiny Llama, as a script has it: gradient accumulation, an evaluation, a clipped norm."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Text(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(32) * (index + 1) % 128
        return {"input_ids": ids, "labels": ids}


def training(folder, callbacks=None):
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = TrainingArguments(
        folder,
        max_steps=14,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=10,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=Text(), eval_dataset=Text(), callbacks=callbacks)


if __name__ == "__main__":
    training(sys.argv[1]).train()
