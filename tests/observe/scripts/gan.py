"""Two models, each with its optimizer; the discriminator's step is told from the generator's."""

import os

import torch
from torch import nn

WIDTH, STEPS = int(os.environ.get("WIDTH", "32")), int(os.environ.get("STEPS", "12"))
BATCH = int(os.environ.get("BATCH", "8"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

generator = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16))
discriminator = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
for_generator = torch.optim.Adam(generator.parameters())
for_discriminator = torch.optim.Adam(discriminator.parameters())
criterion = nn.functional.binary_cross_entropy_with_logits
generator.to(DEVICE), discriminator.to(DEVICE)
real, fake = torch.ones(BATCH, 1, device=DEVICE), torch.zeros(BATCH, 1, device=DEVICE)
# by hand: from tests.observe.by_hand import clock
# by hand: clock.around(generator, "forward", "forward")
# by hand: clock.around(discriminator, "forward", "forward")
# by hand: clock.around(torch.Tensor, "backward", "backward")
for _ in range(STEPS):
    # by hand: clock("other")
    for_discriminator.zero_grad()
    # by hand: clock("optimizer")
    images = generator(torch.randn(BATCH, 4, device=DEVICE))
    criterion(discriminator(torch.randn(BATCH, 16, device=DEVICE)), real).backward()
    criterion(discriminator(images.detach()), fake).backward()
    # by hand: clock("other")
    for_discriminator.step()
    # by hand: clock("optimizer")
    # by hand: clock.step(of=0)

    for_generator.zero_grad()
    # by hand: clock("optimizer")
    criterion(discriminator(images), real).backward()
    # by hand: clock("other")
    for_generator.step()
    # by hand: clock("optimizer")
    # by hand: clock.step(of=1)
