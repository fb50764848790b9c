"""Two models, each with its optimizer; the discriminator's step is told from the generator's."""

import torch
from torch import nn

generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
discriminator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
for_generator = torch.optim.Adam(generator.parameters())
for_discriminator = torch.optim.Adam(discriminator.parameters())
criterion = nn.functional.binary_cross_entropy_with_logits
real, fake = torch.ones(8, 1), torch.zeros(8, 1)
for _ in range(12):
    for_discriminator.zero_grad()
    images = generator(torch.randn(8, 4))
    criterion(discriminator(torch.randn(8, 16)), real).backward()
    criterion(discriminator(images.detach()), fake).backward()
    for_discriminator.step()

    for_generator.zero_grad()
    criterion(discriminator(images), real).backward()
    for_generator.step()
