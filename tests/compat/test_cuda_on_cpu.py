"""`python -m fastvit.compat --cpu`, over scripts in the manner of public ones that know CUDA alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastvit.compat import __main__ as runner
from fastvit.compat._cpu_half import cpu_half

ROOT = Path(__file__).parents[2]
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

ASKED = """\
import importlib, re, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.backends import cudnn
assert torch.version.hip is None and int(torch.version.cuda.split(".")[0]) >= 11 and "10" < torch.version.cuda
assert cudnn.version() > 8000 and cudnn.is_available() and cudnn.enabled and dist.is_nccl_available()
assert torch.cuda.nccl.version() >= (2, 10) and torch.cuda.nccl.is_available([torch.ones(2).cuda()])

# What is public answers, or tells what to do.
warnings.simplefilter("ignore")
x, arguments = torch.ones(4, 2).cuda(), {"set_sync_debug_mode": ("warn",), "can_device_access_peer": (0, 0)}
arguments |= dict.fromkeys(("caching_allocator_enable", "use_mem_pool", "change_current_allocator"), (None,))
arguments |= dict.fromkeys(("caching_allocator_delete", "get_stream_from_external", "range_end"), (0,))
arguments |= dict.fromkeys(("all_reduce", "reduce", "broadcast"), ([x],)) | {"check_error": (0,)}
arguments |= {"make_graphed_callables": (nn.Linear(2, 2), (x,)), "set_device": ("cuda:0",)}
arguments |= dict.fromkeys(("mark", "range", "range_push", "range_start"), ("name",))
internal = "torch\\._C|dummy|not compiled|requires CUDA|NoneType|nvidia-ml|No module|has no attribute"
refused, asked, built = set(), 0, torch.cuda._is_compiled()
in_every_build = {"CUDAGraph", "graph_pool_handle", "MemPool"}
for name in "cuda cuda.graphs cuda.memory cuda.nccl cuda.nvtx cuda.profiler cuda.random cuda.tunable".split():
    module = importlib.import_module(f"torch.{name}")
    for function in {*module.__all__, "version", "unique_id"} & vars(module).keys():
        if callable(getattr(module, function)) and (not built or function in in_every_build):
            asked += 1
            try:
                getattr(module, function)(*arguments.get(function, ()))
            except NotImplementedError as error:
                refused.add(function)
                told = "--cpu: .* uses .*, which needs a GPU; leave the call out on the CPU, by an option"
                assert re.match(told, str(error)), error
            except TypeError as error:  # without the arguments
                assert "argument" in str(error), (name, function)
            except Exception as error:
                assert not re.search(internal, str(error)), (name, function, error)
assert in_every_build <= refused
if not built:  # whose torch._C lacks what they call
    assert asked > 100 and {"current_blas_handle", "get_allocator_backend", "unique_id"} <= refused
    assert not hasattr(torch._C, "_cuda_getCurrentBlasHandle")
assert not {"memory_stats", "memory_summary", "utilization", "set_sync_debug_mode", "version"} & refused
memory = torch.cuda.memory
memory._record_memory_history(max_entries=9), memory._dump_snapshot("memory.pickle")
assert torch.cuda.memory_stats()["allocation.all.peak"] == torch.cuda.max_memory_reserved() == 0
layer = nn.Linear(2, 2).cuda()
assert torch.cuda.make_graphed_callables(layer, (x,)) is layer
assert torch.cuda.get_device_name(0) == "CPU" and torch.cuda.get_device_capability() == (8, 0)

@torch.cuda.nvtx.range("step {}", 1)
def step():
    with torch.autograd.profiler.emit_nvtx(record_shapes=True), torch.cuda.profiler.profile():
        return layer(x)

activity = torch.profiler.ProfilerActivity
for activities in (None, [activity.CUDA], [activity.CPU, activity.CUDA]):
    with torch.profiler.profile(activities=activities) as profile:
        step()
assert "aten::addmm" in profile.key_averages().table(sort_by="cuda_time_total")
torch.backends.cuda.cufft_plan_cache.clear(), torch.backends.cuda.preferred_linalg_library("magma")
generator = torch.cuda.default_generators[0]
torch.cuda.manual_seed(7)
state = torch.cuda.get_rng_state_all()
torch.cuda.manual_seed_all(8), torch.cuda.set_rng_state_all(state)
assert torch.cuda.initial_seed() == generator.initial_seed() == 7

def scaled(x):
    return x * (2 if torch.is_autocast_enabled() else 1), torch.get_autocast_gpu_dtype()

assert torch.jit.script(nn.TransformerEncoderLayer(2, 1, 2))(x.view(4, 1, 2)).shape == (4, 1, 2)
compiled = torch.compile(scaled, backend="eager", fullgraph=True)
for enabled in (True, False, True):
    with torch.cuda.amp.autocast(enabled):
        assert compiled(x)[0][0, 0] == 1 + enabled
assert torch.cuda.BFloat16Tensor(2).dtype == torch.bfloat16
assert torch.cuda.FloatStorage(3).cuda().size() == 3 and torch.device("cpu:0") == x.device
print("asked")
"""

AUTOCAST = """\
import functools, threading, torch
from torch import nn
from torch.cuda.amp import autocast, custom_bwd, custom_fwd
half = torch.get_autocast_gpu_dtype()

def state():
    enabled, half_precision = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
    assert enabled == torch.is_autocast_enabled("cuda") and half_precision == torch.get_autocast_dtype("cuda")
    return enabled, half_precision

states = [state()]
thread = threading.Thread(target=lambda: states.append(state()))
thread.start(), thread.join()
assert states == [(False, half)] * 2
with autocast():
    assert state() == (True, half)
    with torch.autocast("cuda", enabled=False):
        assert not state()[0]
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            assert state() == (True, torch.bfloat16)
    with autocast(enabled=False):
        assert not state()[0]
    with torch.autocast("cuda", torch.get_autocast_gpu_dtype(), torch.is_autocast_enabled()):
        with torch.cpu.amp.autocast(torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()):
            assert state() == (True, half)  # as old checkpoints restore both
assert state() == (False, half)
torch.set_autocast_enabled(True), torch.set_autocast_gpu_dtype(torch.bfloat16)
assert state() == (True, torch.bfloat16)
torch.set_autocast_enabled("cuda", False), torch.set_autocast_dtype("cuda", torch.float16)
assert state() == (False, half)

def function(forward, backward, product):
    class Function(torch.autograd.Function):
        @staticmethod
        @forward
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            Function.seen = x.dtype, weight.dtype, torch.is_autocast_enabled()
            return x @ weight if product else x.exp() * weight

        @staticmethod
        @backward
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            Function.seen += (torch.is_autocast_enabled(),)
            return (grad @ weight.t(), x.t() @ grad) if product else (grad * x.exp() * weight, grad * x.exp())

    return Function

new_fwd = functools.partial(torch.amp.custom_fwd, device_type="cuda")
new_bwd = functools.partial(torch.amp.custom_bwd, device_type="cuda")
layer, single = nn.Linear(4, 4).cuda(), torch.float32
cast = lambda of_weight: (of_weight, of_weight, False, False)
as_they_are = lambda of_weight: (half, of_weight, True, True)
for product in (False, True):
    for forward, backward, seen, of_weight in (
        (custom_fwd(cast_inputs=single), custom_bwd, cast, single),
        (custom_fwd(cast_inputs=torch.float16), custom_bwd, cast, half),
        (new_fwd(cast_inputs=single), new_bwd, cast, single),
        (custom_fwd, custom_bwd, as_they_are, single),
        (new_fwd, new_bwd, as_they_are, single),
    ):
        op = function(forward, backward, product)
        weight = torch.ones(4, 4, device="cuda", requires_grad=True)
        with autocast():
            y = op.apply(layer(torch.ones(4, 4).cuda()), weight)
        y.float().sum().backward()
        assert op.seen == seen(of_weight) and weight.grad.dtype == single, op.seen
        op.apply(torch.ones(4, 4).cuda(), weight).sum().backward()
        assert op.seen == (single, single, False, False), op.seen
print("autocast", half)
"""

PARALLEL = """\
import torch, torch.cuda.comm as comm
from torch import nn
from torch.nn.parallel import data_parallel, gather, parallel_apply, replicate, scatter
from torch.nn.parallel._functions import Broadcast, Gather, ReduceAddCoalesced, Scatter
from torch.nn.parallel.parallel_apply import parallel_apply as apply_of_module
from torch.nn.parallel.scatter_gather import scatter_kwargs
norm = nn.BatchNorm1d(3, momentum=1.0).cuda()
net = nn.Sequential(norm, nn.Linear(3, 2)).cuda()
x = torch.randn(4, 3).cuda()
want = net(x)
want.sum().backward()
grad = net[1].weight.grad.clone()
same = lambda y: torch.equal(y, want)

class Balanced(nn.DataParallel):
    def __init__(self, first, *args, **kwargs):
        self.first = first
        super().__init__(*args, **kwargs)
    def forward(self, *inputs, **kwargs):
        assert all(tensor.device == self.src_device_obj for tensor in self.module.parameters())
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        if self.first and len(self.device_ids) == 1:
            return self.module(*inputs[0], **kwargs[0])
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        return self.gather(self.parallel_apply(replicas, inputs, kwargs), self.output_device)
    def scatter(self, inputs, kwargs, device_ids):
        self.sizes = [len(inputs[0])] + [0] * (len(device_ids) - 1)
        return [tuple(Scatter.apply(device_ids, self.sizes, self.dim, each)[0] for each in inputs)], [kwargs]
    def parallel_apply(self, replicas, inputs, kwargs):
        return apply_of_module(replicas, inputs, kwargs, self.device_ids)

class Listed(nn.DataParallel):
    def forward(self, *inputs):
        inputs, kwargs = self.scatter(inputs, {}, self.device_ids)
        return self.parallel_apply([self.module], inputs, kwargs)

for ids in (None, [0], [0, 1], [torch.device("cuda:0")], ["cuda:1"]):
    for parallel in (nn.DataParallel(net, ids), Balanced(0, net, ids), Balanced(1, net, device_ids=ids)):
        assert same(parallel(x)), ids
        assert (parallel.dim, len(parallel.device_ids), parallel.output_device) == (0, 1, 0)
    assert same(Listed(net, ids)(x)[0])
    assert same(data_parallel(net, x, ids)) and same(data_parallel(net, (x,), ids, 0))
net.zero_grad()
Balanced(0, net)(x).sum().backward()
assert torch.equal(net[1].weight.grad, grad) and torch.equal(norm.running_mean, x.mean(0))
with torch.no_grad():
    assert same(Balanced(0, net)(x))

inputs, kwargs = scatter_kwargs((x, {"a": [x], "n": 3}), {"mask": x}, [0])
assert torch.equal(inputs[0][0], x) and inputs[0][1]["n"] == 3 and torch.equal(kwargs[0]["mask"], x)
assert [len(each) for each in scatter(x, [0, 1, 2])] == [2, 2]  # as torch cuts
assert torch.equal(gather(scatter(x, ["cuda:0", "cuda:1"]), 0), x)
assert torch.equal(gather([{"loss": x.sum(), "y": x}], "cpu")["loss"], x.sum().view(1))
replica, = replicate(net, [0])
assert same(replica(x)) and same(parallel_apply([replica], [x])[0])
assert all(map(same, apply_of_module(replicate(net, [0, 1]), [x, (x,)], [{}, {}], [0, 1])))
try:
    parallel_apply([replica], [x, x])
except ValueError:
    part, = comm.scatter(x, [0])
y = x.clone().requires_grad_()
assert torch.equal(comm.gather(comm.scatter(y, [0, 1], [1, 3]), 0), x) and torch.equal(part, x)
Gather.apply(0, 1, *Scatter.apply([0, 1], None, 1, y)).pow(2).sum().backward()
assert torch.equal(y.grad, 2 * x)
copies = *comm.broadcast(x, [0, 1]), *comm.broadcast_coalesced([x, x], [0])[0], *Broadcast.apply([0, 1], x, x)
assert len(copies) == 8 and all(torch.equal(copy, x) for copy in copies)
assert torch.equal(comm.reduce_add([x, x]), 2 * x)
assert torch.equal(comm.reduce_add_coalesced([[x], [x]])[0], 2 * x)
assert torch.equal(ReduceAddCoalesced.apply(0, 2, x, 2 * x, x, x)[1], 3 * x)
print("parallel")
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


def run_on_cpu(folder, script, *options, launch=(), **environment):
    (folder / "main.py").write_text(script)
    command = [sys.executable, *launch, "-m", "fastvit.compat", "--cpu", *options]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=clean)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.nightly
def test_a_recipe_of_apex_trains_on_two_ranks(tmp_path):
    lines, said = run_on_cpu(tmp_path, IMAGES, "main.py", "--opt-level", "O2", launch=LAUNCH)
    lines = sorted(line for line in lines if line.startswith("rank"))
    assert [line[:6] for line in lines] == ["rank 0", "rank 1"] and lines[0][6:] == lines[1][6:]
    assert lines[0].count(",") == 1  # two losses
    assert said.count("--cpu: CUDA calls of this script run on the CPU") == 1
    assert "terminate" not in said and "destroy_process_group" not in said  # which the script leaves open


@pytest.mark.nightly
def test_a_recipe_of_torch_amp_with_its_own_launcher_trains_on_two_ranks(tmp_path):
    environment = {"RANK": "9", "CUDA_VISIBLE_DEVICES": "0,1"}
    lines, said = run_on_cpu(tmp_path, NATIVE, "--half", "float16", "main.py", **environment)
    assert sorted(lines) == [f"rank {rank} torch.float16 True cpu True" for rank in (0, 1)], said


@pytest.mark.parametrize(
    ("half", "scripts"),
    [
        pytest.param("bfloat16", (ASKED, AUTOCAST), id="names_and_autocast-bfloat16"),
        pytest.param("float16", (AUTOCAST, PARALLEL), id="autocast_and_data_parallel-float16"),
    ],
)
def test_scripts_that_know_cuda_alone_run_on_the_cpu(tmp_path, half, scripts):
    """Names of torch.cuda and its kin answer, pass through, or raise one sentence that says what to do.

    The state of autocast is what the script expects, and custom functions run under it. The parts of
    DataParallel, functions and subclasses, run as on one GPU, whatever devices are named.
    """
    lines, _ = run_on_cpu(tmp_path, "".join(scripts), "--half", half, "main.py", CUDA_VISIBLE_DEVICES="0,1")
    said = {ASKED: "asked", AUTOCAST: f"autocast torch.{half}", PARALLEL: "parallel"}
    assert [line for line in lines if "USDT" not in line] == [said[script] for script in scripts]


@pytest.mark.packages("transformers", "accelerate")
def test_a_trainer_of_transformers_runs_on_the_cpu(tmp_path):
    path = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))
    assert run_on_cpu(tmp_path, TRAINER, "main.py", PYTHONPATH=path)[0][-1] == "steps 2"


def test_half_of_the_cpu_is_that_of_option_or_environment(monkeypatch):
    for given, expected in (("", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        monkeypatch.setenv("FASTVIT_HALF", given)
        assert cpu_half() is expected
        assert runner._parse_arguments(["main.py"])[0].half == given
    assert runner._parse_arguments(["--half", "float16", "main.py"])[0].half == "float16"
    monkeypatch.setenv("FASTVIT_HALF", "half")
    with pytest.raises(ValueError, match="FASTVIT_HALF takes bfloat16 or float16, got 'half'"):
        cpu_half()
