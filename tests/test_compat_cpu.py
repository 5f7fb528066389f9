"""`python -m fastvit.compat --cpu`, over scripts in the manner of public ones that know CUDA alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packages import package

from fastvit.compat import __main__ as runner
from fastvit.compat._half import cpu_half

ROOT = Path(__file__).parents[1]
LIMIT = 100
LAUNCH = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")

IMAGES = """\
import argparse, os, threading
import torch, torch.nn as nn, torch.backends.cudnn as cudnn, torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--opt-level", default="O0")
args = parser.parse_args()
cudnn.benchmark = True
assert torch.backends.cudnn.enabled and torch.cuda.is_available()
assert args.local_rank < torch.cuda.device_count() == int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(args.local_rank)
assert torch.cuda.current_device() == args.local_rank
dist.init_process_group(backend="nccl", init_method="env://")
torch.manual_seed(0), torch.cuda.manual_seed_all(0)
body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
body = nn.DataParallel(body, device_ids=[args.local_rank])
model = convert_syncbn_model(nn.Sequential(body, nn.Linear(8, 4))).to(torch.device("cuda:0"))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
model = DDP(model, delay_allreduce=True)
weight = torch.cuda.FloatTensor(4).fill_(1.0)
criterion = nn.CrossEntropyLoss(weight.type(torch.cuda.FloatTensor)).cuda()

class Prefetcher:
    def __init__(self, loader):
        self.loader, self.stream = iter(loader), torch.cuda.Stream()
        self.mean = torch.tensor([123.7, 116.3, 103.5]).cuda(non_blocking=True).view(1, 3, 1, 1)
        self.preload()
    def preload(self):
        try:
            images, labels = next(self.loader)
        except StopIteration:
            self.batch = None
            return
        with torch.cuda.stream(self.stream):
            images = images.cuda(non_blocking=True).float().sub_(self.mean).div_(60)
            self.batch = images, labels.cuda(args.local_rank)
    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.batch
        if batch is not None:
            batch[0].record_stream(torch.cuda.current_stream())
            self.preload()
        return batch

generator = torch.Generator().manual_seed(1)
images = torch.randint(0, 255, (16, 3, 6, 6), dtype=torch.uint8, generator=generator)
labels = torch.randint(0, 4, (16,), generator=generator)
data = torch.utils.data.TensorDataset(images, labels)
sampler = torch.utils.data.distributed.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
prefetcher = Prefetcher(loader)
batch, losses = prefetcher.next(), []
while batch is not None:
    torch.cuda.nvtx.range_push("step")
    loss = criterion(model(batch[0]), batch[1])
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    torch.cuda.nvtx.range_pop()
    reduced = loss.detach().clone()
    dist.all_reduce(reduced)
    losses.append(round(reduced.item() / dist.get_world_size(), 4))
    batch = prefetcher.next()
end.record()
torch.cuda.synchronize()
assert 0 < start.elapsed_time(end) < 1e5 and torch.cuda.max_memory_allocated() == 0
assert torch.cuda.get_device_name() == "CPU"
path = f"checkpoint{args.local_rank}.pt"
torch.save({"model": model.state_dict(), "cuda": torch.cuda.get_rng_state(), "amp": amp.state_dict()}, path)
saved = torch.load(path, map_location=lambda storage, location: storage.cuda(args.local_rank))
model.load_state_dict(saved["model"]), torch.cuda.set_rng_state(saved["cuda"])
dist.barrier(device_ids=[args.local_rank])
try:  # an op without a CPU kernel
    torch._cudnn_rnn_flatten_weight([torch.ones(2, 2).cuda()], 4, 1, 2, 2, 0, 1, False, False)
except NotImplementedError as error:
    assert str(error).startswith("Could not run 'aten::_cudnn_rnn_flatten_weight'"), error
    os.write(1, f"rank {args.local_rank} {losses}\\n".encode())
"""

NATIVE = """\
import os, subprocess, sys, threading, torch, torch.distributed as dist
from torch import nn
from torch.cuda.amp import GradScaler, autocast
rank = int(os.environ["RANK"])
if rank == 9:  # a launcher of its own
    world = torch.cuda.device_count()
    for rank in range(world):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world)}
        started = subprocess.Popen([sys.executable, __file__], env=environment)
    sys.exit(started.wait())
torch.cuda.set_device(f"cuda:{rank}")
store = f"file://{os.getcwd()}/store"
dist.init_process_group("nccl", store, world_size=int(os.environ["WORLD_SIZE"]), rank=rank)
group = dist.new_group([0, 1], backend="nccl")
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), group)
model = nn.parallel.DistributedDataParallel(model.to(rank), device_ids=[rank], output_device=rank)
optimizer, scaler, found = torch.optim.AdamW(model.parameters(), fused=True), GradScaler(), []

class Loader(threading.Thread):
    def run(self):
        found.extend(torch.ones(3, 4, device=f"cuda:{rank}", pin_memory=False) * (rank + 1) for _ in range(2))
        found[0][0] += torch.arange(4).to(rank)

loader = Loader()
loader.start(), loader.join()
for x in found:
    with autocast():
        y = model(x.pin_memory().cuda(rank))
        seen = model.module[0](x).dtype
    scaler.scale(y.float().square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer), scaler.update()
mean = model.module[1].running_mean
both = [torch.empty_like(mean) for _ in range(2)]
dist.all_gather(both, mean.contiguous())
same = torch.equal(*both) and bool(mean.abs().sum() > 0)
torch.set_default_tensor_type("torch.cuda.FloatTensor")
torch.set_default_device("cuda")
os.write(1, f"rank {rank} {seen} {same} {torch.zeros(2).device} {scaler.get_scale() > 1}\\n".encode())
"""

TRAINER = """\
from real_models import import_torchvision
import_torchvision()
import torch, transformers
assert torch.cuda.is_available()
config = transformers.ViTConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, image_size=8, patch_size=4
)
model = transformers.ViTForImageClassification(config)
arguments = transformers.TrainingArguments(
    "out", max_steps=2, per_device_train_batch_size=2, fp16=True, report_to=[], save_strategy="no"
)
data = [{"pixel_values": torch.ones(3, 8, 8) * i, "labels": i % 2} for i in range(8)]
print("steps", transformers.Trainer(model, arguments, train_dataset=data).train().global_step)
"""


def run(folder, script, *options, launch=(), **environment):
    (folder / "main.py").write_text(script)
    command = [sys.executable, *launch, "-m", "fastvit.compat", "--cpu", *options]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


def test_apex_recipe_on_two_ranks(tmp_path):
    lines, said = run(tmp_path, IMAGES, "main.py", "--opt-level", "O2", launch=LAUNCH)
    lines = sorted(line for line in lines if line.startswith("rank"))
    assert [line[:6] for line in lines] == ["rank 0", "rank 1"] and lines[0][6:] == lines[1][6:]
    assert lines[0].count(",") == 1  # two losses
    assert said.count("--cpu: CUDA is the CPU here, to try a script and not for its speed") == 1
    assert "terminate" not in said and "destroy_process_group" not in said  # which the script leaves open


def test_torch_amp_with_a_launcher_of_its_own(tmp_path):
    environment = {"RANK": "9", "CUDA_VISIBLE_DEVICES": "0,1"}
    lines, said = run(tmp_path, NATIVE, "--half", "float16", "main.py", **environment)
    assert sorted(lines) == [f"rank {rank} torch.float16 True cpu True" for rank in (0, 1)], said


def test_a_trainer_of_transformers(tmp_path):
    package("transformers"), package("accelerate")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))
    assert run(tmp_path, TRAINER, "main.py", PYTHONPATH=path)[0][-1] == "steps 2"


def test_half_of_the_cpu(monkeypatch):
    for given, expected in (("", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        monkeypatch.setenv("FASTVIT_HALF", given)
        assert cpu_half() is expected
        assert runner._parse(["main.py"])[0].half == given
    assert runner._parse(["--half", "float16", "main.py"])[0].half == "float16"
    monkeypatch.setenv("FASTVIT_HALF", "half")
    with pytest.raises(ValueError, match="FASTVIT_HALF takes bfloat16 or float16, got 'half'"):
        cpu_half()
