"""timm's ViT-L/16 in a plain loop over random images: as such loops are written first, or as someone who knows would.

Its arguments: `plain` or `expert`, how many updates, and optionally another model of timm's.
"""

import contextlib
import sys

import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BY, UPDATES = sys.argv[1], int(sys.argv[2])
NAME = sys.argv[3] if len(sys.argv) > 3 else "vit_large_patch16_224"
EXPERT = BY == "expert"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 64 if DEVICE.type == "cuda" else 2


class Images(Dataset):
    """Random pictures of 224 x 224, one of 1,000 kinds, scaled as torchvision does it."""

    def __len__(self):
        return BATCH * UPDATES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(256, (3, 224, 224), dtype=torch.uint8, generator=generator)
        return image.float().div_(255).sub_(0.45).div_(0.225), int(torch.randint(1000, (), generator=generator))


torch.manual_seed(1)
if EXPERT:
    torch.set_float32_matmul_precision("high")
model = timm.create_model(NAME, num_classes=1000).to(DEVICE)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=EXPERT)
compiled = torch.compile(model) if EXPERT else model
loader = DataLoader(
    Images(), BATCH, shuffle=True, num_workers=8, pin_memory=EXPERT, drop_last=True, persistent_workers=True
)
for step, (images, labels) in enumerate(loader):
    images, labels = images.to(DEVICE, non_blocking=EXPERT), labels.to(DEVICE, non_blocking=EXPERT)
    with torch.autocast(DEVICE.type, torch.bfloat16) if EXPERT else contextlib.nullcontext():
        loss = nn.functional.cross_entropy(compiled(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not EXPERT or step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
