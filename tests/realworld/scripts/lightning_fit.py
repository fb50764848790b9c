"""Lightning's Trainer with a module that calls its parts, and never itself."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning.pytorch as pl
except ImportError:  # the same under its other name
    import pytorch_lightning as pl

WIDTH, STEPS = int(os.environ.get("WIDTH", "64")), int(os.environ.get("STEPS", "16"))
BATCH = int(os.environ.get("BATCH", "4"))


class Learner(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, 1)
        # by hand: from tests.observe.by_hand import clock
        # by hand: clock.around(self.encoder, "forward", "forward")
        # by hand: clock.around(self.head, "forward", "forward")
        # by hand: clock.around(torch.Tensor, "backward", "backward")

    def training_step(self, batch, index):
        (x,) = batch
        return self.head(self.encoder(x)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    # by hand: def optimizer_zero_grad(self, epoch, index, optimizer):
    # by hand:     from tests.observe.by_hand import clock
    # by hand:     clock("other")
    # by hand:     optimizer.zero_grad()
    # by hand:     clock("optimizer")

    # by hand: def optimizer_step(self, epoch, index, optimizer, closure):
    # by hand:     from tests.observe.by_hand import clock
    # by hand:     def passes():
    # by hand:         clock("optimizer")
    # by hand:         loss = closure()
    # by hand:         clock("other")
    # by hand:         return loss
    # by hand:     clock("other")
    # by hand:     optimizer.step(closure=passes)
    # by hand:     clock("optimizer")
    # by hand:     clock.step()


def fit(folder, callbacks=()):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        default_root_dir=folder, accelerator="auto", devices=1, max_steps=STEPS, callbacks=list(callbacks), **quiet
    )
    trainer.fit(Learner(), DataLoader(TensorDataset(torch.randn(BATCH * STEPS, 16)), batch_size=BATCH))


if __name__ == "__main__":
    fit(sys.argv[1])
