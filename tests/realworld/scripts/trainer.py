"""transformers' Trainer with a tiny model, as a script has it: gradient accumulation, an evaluation, a clipped norm.

Its arguments: a folder, a model of tests/realworld/models.py (llama), and how many updates.
"""

import sys

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tests.realworld import models


class Samples(Dataset):
    """The model's batches, cut into samples."""

    def __init__(self, batches):
        named = [{"input_ids": each, "labels": each} if not isinstance(each, dict) else each for each in batches]
        self.samples = [
            {name: value[place] for name, value in each.items()} for each in named for place in range(models.BATCH)
        ]

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.samples[index % len(self.samples)]


def training(folder, callbacks=None, name="llama", updates=14):
    made = getattr(models, name)()
    model, data = made.module, Samples(made.batches)
    arguments = TrainingArguments(
        folder,
        max_steps=updates,
        per_device_train_batch_size=models.BATCH // 2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=10,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    # by hand: from tests.observe.by_hand import clock
    # by hand: clock.around(model, "forward", "forward")
    # by hand: clock.around(torch.Tensor, "backward", "backward")
    # by hand: clock.around(torch.nn.utils, "clip_grad_norm_", "optimizer")
    # by hand: clock.around(torch.optim.Optimizer, "zero_grad", "optimizer")
    # by hand: clock.around(torch.optim.AdamW, "step", "optimizer", ends=True)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)


if __name__ == "__main__":
    training(sys.argv[1], None, *sys.argv[2:3], *map(int, sys.argv[3:4])).train()
