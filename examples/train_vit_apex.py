"""Trains a vision transformer on scikit-learn's digits by apex: AMP, DDP, FusedAdam, and TensorBoard.

    python train_vit_apex.py --norm inplace-abn --opt-level O1              with apex installed
    python -m fastvit.compat train_vit_apex.py ...                          with fastvit in place of apex
    torchrun --standalone --nproc_per_node 2 -m fastvit.compat train_vit_apex.py ...
    tensorboard --logdir runs/vit_apex

`--norm` chooses the BatchNorm of stem and MLPs: apex's SyncBatchNorm, fastvit's, or fastvit's InPlaceABNSync,
which keeps half of the activations. Needs torch, scikit-learn, tensorboard and tqdm.
"""

import argparse
import gc
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from apex import amp
from apex import parallel as apex_parallel
from apex.optimizers import FusedAdam
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import fastvit
from fastvit.models import vit_digits
from fastvit.training.datasets import load_digits


def make_model(norm: str) -> nn.Module:
    """Returns a model for images (N, 1, 8, 8) and 10 classes, with BatchNorm over all ranks."""
    if norm == "apex":
        return apex_parallel.convert_syncbn_model(vit_digits("torch"))
    return vit_digits({"fastvit": "fastvit-sync", "inplace-abn": "inplace-abn-sync"}[norm])


def init_distributed(local_rank: int) -> tuple[int, int, torch.device]:
    """Returns (rank, number of ranks, device) from the launcher's environment; one rank without."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", local_rank))
    has_gpu = torch.cuda.device_count() > local_rank
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if world_size > 1:
        store, rank, world_size = fastvit.sync.rendezvous()  # This works after a restart by torchrun too.
        dist.init_process_group("nccl" if has_gpu else "gloo", store=store, rank=rank, world_size=world_size)
    else:
        print("not using distributed mode")
    return rank, world_size, device


def reduce_value(value: torch.Tensor, world_size: int, average: bool = True) -> torch.Tensor:
    """Returns the mean of `value` over the ranks, or the sum; with one rank `value` itself."""
    if world_size < 2:
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / world_size if average else value


def train_one_epoch(
    model, optimizer, loader, device, epoch: int, world_size: int, rank: int, accumulate: int
):
    """Returns the mean loss over ranks and batches; `accumulate` batches make one step of the optimizer."""
    model.train()
    mean_loss = torch.zeros(1, device=device)
    bar = tqdm(loader, disable=rank > 0, leave=False)
    for step, (images, labels) in enumerate(bar):
        is_step_end = (step + 1) % accumulate == 0
        loss = F.cross_entropy(model(images.to(device)), labels.to(device)) / accumulate
        with amp.scale_loss(loss, optimizer, delay_unscale=not is_step_end) as scaled_loss:
            scaled_loss.backward()
        loss = reduce_value(loss.detach(), world_size) * accumulate
        if not torch.isfinite(loss):
            print(f"WARNING: non-finite loss, ending training: {loss.item()}")
            sys.exit(1)
        mean_loss = (mean_loss * step + loss) / (step + 1)
        bar.set_description(f"[epoch {epoch}] mean loss {mean_loss.item():.3f}")
        if is_step_end:
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return mean_loss.item()


@torch.no_grad()
def evaluate(model, loader, device, world_size: int) -> tuple[float, float]:
    """Returns loss and accuracy over the images of all ranks."""
    model.eval()
    sums = torch.zeros(3, device=device)  # of losses, of correct answers, of images
    for images, labels in loader:
        logits, labels = model(images.to(device)).float(), labels.to(device)
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    loss, correct, count = reduce_value(sums, world_size, average=False).tolist()
    return loss / count, correct / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--norm", choices=["apex", "fastvit", "inplace-abn"], default="inplace-abn")
    parser.add_argument(
        "--opt-level", choices=["O0", "O1", "O2", "O3"], default="O1", help="level of apex.amp"
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images of a rank in one forward")
    parser.add_argument("--accumulate", type=int, default=1, help="batches whose gradients make one step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate for one rank")
    parser.add_argument("--out", type=Path, default=Path("runs/vit_apex"))
    parser.add_argument("--resume", type=Path, help="a checkpoint of this script; ignored if it is missing")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    rank, world_size, device = init_distributed(args.local_rank)

    digits = load_digits(seed=0)
    train, validation = (TensorDataset(split.images, split.labels) for split in (digits.train, digits.test))
    sampler = DistributedSampler(train, world_size, rank, seed=0)
    batches = BatchSampler(sampler, args.batch_size, drop_last=True)
    loader = DataLoader(train, batch_sampler=batches, pin_memory=device.type == "cuda")
    validation_sampler = DistributedSampler(validation, world_size, rank, shuffle=False)
    validation_loader = DataLoader(validation, 2 * args.batch_size, sampler=validation_sampler)

    torch.manual_seed(0)  # equal weights on all ranks
    model = make_model(args.norm).to(device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    undecayed = [p for p in model.parameters() if p.ndim <= 1]
    lr = args.lr * world_size * args.accumulate
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": undecayed, "weight_decay": 0.0}]
    optimizer = FusedAdam(groups, lr=lr)
    # apex needs this order: device, amp, DDP. A checkpoint is loaded after amp has made its master weights.
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)

    def lr_factor(epoch: int) -> float:
        """Returns the factor of the learning rate: a warm-up of three epochs, then a cosine."""
        return min((epoch + 1) / 3, 0.5 + 0.5 * math.cos(math.pi * epoch / args.epochs))

    first_epoch = 0
    if args.resume and args.resume.exists():  # A first run has no checkpoint; torchrun may start it again.
        saved = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        first_epoch = saved["epoch"]
    for group in optimizer.param_groups:
        group["initial_lr"] = lr  # The checkpoint may be from another number of ranks.
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor, first_epoch - 1)
    parallel = apex_parallel.DistributedDataParallel(model) if world_size > 1 else model

    writer = SummaryWriter(str(args.out)) if rank == 0 else None
    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        rate = scheduler.get_last_lr()[0]
        train_loss = train_one_epoch(
            parallel, optimizer, loader, device, epoch, world_size, rank, args.accumulate
        )
        scheduler.step()
        loss, accuracy = evaluate(model, validation_loader, device, world_size)
        if writer is None:
            continue
        print(f"[epoch {epoch}] mean loss {train_loss:.3f}, validation {loss:.3f}, accuracy {accuracy:.3f}")
        writer.add_scalars("loss", {"train": train_loss, "validation": loss}, epoch)
        writer.add_scalar("accuracy", accuracy, epoch)
        writer.add_scalar("learning rate", rate, epoch)
        owners = {"model": model, "optimizer": optimizer, "amp": amp}
        saved = {name: owner.state_dict() for name, owner in owners.items()} | {"epoch": epoch + 1}
        torch.save(saved, args.out / "last.tmp")
        os.replace(args.out / "last.tmp", args.out / "last.pt")  # The file is complete even after a kill.
    if writer is not None:
        writer.close()


if __name__ == "__main__":
    main()
    if dist.is_initialized():  # gloo may abort if a model is alive, or if a rank uses the group.
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
