"""A training script in the style of 2020: apex AMP, apex DDP, synchronised BatchNorm, InPlaceABN, FusedAdam.

It imports apex and inplace_abn, neither of which has to be installed, and does not import fastvit:

    python -m fastvit.compat main.py --opt-level O2
    torchrun --standalone --nproc_per_node 2 -m fastvit.compat main.py --opt-level O1
    python -m torch.distributed.launch --nproc_per_node 2 -m fastvit.compat main.py

It trains a small network on scikit-learn's digits, with NCCL where each rank has a GPU and gloo elsewhere.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model
from inplace_abn import InPlaceABN
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", default=0, type=int)
    parser.add_argument("--opt-level", default="O1", type=str)
    parser.add_argument("--loss-scale", default=None, type=str)
    parser.add_argument("--epochs", default=10, type=int)
    parser.add_argument("--batch-size", default=32, type=int, help="per GPU")
    parser.add_argument("--lr", default=2e-3, type=float, help="for one GPU")
    parser.add_argument("--accumulate", default=1, type=int, help="batches per step")
    parser.add_argument("--checkpoint", default="", type=str)
    parser.add_argument("--resume", default="", type=str)
    return parser.parse_args()


def reduce_tensor(tensor):
    if not dist.is_initialized():
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def build():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        InPlaceABN(32),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def main():
    args = get_args()
    distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    gpu = torch.cuda.is_available() and args.local_rank < torch.cuda.device_count()
    device = torch.device("cuda", args.local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group(backend="nccl" if gpu else "gloo", init_method="env://")
    world = dist.get_world_size() if distributed else 1
    rank = dist.get_rank() if distributed else 0
    torch.manual_seed(0)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train = TensorDataset(images[order[360:]], labels[order[360:]])
    test = TensorDataset(images[order[:360]], labels[order[:360]])
    sampler = DistributedSampler(train) if distributed else None
    loader = DataLoader(train, args.batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, 120)

    model = convert_syncbn_model(build()).to(device)
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = FusedAdam(
        [{"params": decay, "weight_decay": 5e-4}, {"params": others}], lr=args.lr * world * args.accumulate
    )
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    if distributed:
        model = DDP(model, delay_allreduce=False)
    raw = model.module if distributed else model

    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device)
        raw.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start = checkpoint["epoch"]

    for epoch in range(start, args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        mean_loss = 0.0
        for step, (x, y) in enumerate(loader):
            last = (step + 1) % args.accumulate == 0
            loss = F.cross_entropy(model(x.to(device)), y.to(device)) / args.accumulate
            with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
                scaled_loss.backward()
            value = reduce_tensor(loss.detach()).item() * args.accumulate
            if not torch.isfinite(torch.tensor(value)):
                print("WARNING: non-finite loss, ending training ", value)
                sys.exit(1)
            mean_loss = (mean_loss * step + value) / (step + 1)
            if last:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for x, y in test_loader:
                correct += (raw(x.to(device)).argmax(1).cpu() == y).sum().item()
        if rank == 0:
            print(f"[epoch {epoch}] mean loss {mean_loss:.3f}, accuracy {correct / len(test):.3f}")
            if args.checkpoint:
                torch.save(
                    {
                        "model": raw.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "amp": amp.state_dict(),
                        "scheduler": scheduler.state_dict(),
                        "epoch": epoch + 1,
                    },
                    args.checkpoint,
                )


if __name__ == "__main__":
    main()
