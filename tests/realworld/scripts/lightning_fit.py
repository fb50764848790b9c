"""Lightning's Trainer with a module that calls its parts, and never itself."""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Learner(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(16, 64), nn.ReLU()), nn.Linear(64, 1)

    def training_step(self, batch, index):
        (x,) = batch
        return self.head(self.encoder(x)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def fit(folder, callbacks=()):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(default_root_dir=folder, accelerator="cpu", max_steps=16, callbacks=list(callbacks), **quiet)
    trainer.fit(Learner(), DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=4))


if __name__ == "__main__":
    fit(sys.argv[1])
