"""Trains a small converted model with layers of torch and fastvit for two steps.

    python examples/first_step.py

The exit status is 1 if `convert` freed no bytes or if the first step did not lower the loss.
"""

import torch
from torch import nn
from torch.nn import functional as F

import fastvit


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        fastvit.InPlaceABN(16),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.SiLU(),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        fastvit.SyncBatchNorm(32, fuse_relu=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    report = fastvit.report(fastvit.convert(model), images)
    print(report)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"torch {torch.__version__}, loss {losses[0]:.4f}, after one step {losses[1]:.4f}")
    if not (report.freed_bytes > 0 and losses[1] < losses[0]):
        raise SystemExit("first_step: convert freed no bytes, or the step did not lower the loss")


if __name__ == "__main__":
    main()
