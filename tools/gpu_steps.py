"""The steps of tools/gpu.py: their commands, and the programs `facts` and `passes`, which two of them run."""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CARRIED = ROOT / "build/carried"  # libraries from `make gpu BUILD=1` on another machine, and their commit
DRIVER_SECONDS = 90  # A driver may take a minute to start.
NO_GPU = 4
PYTEST = "-m pytest -q -rfE --tb=short -o addopts= -p no:cacheprovider --timeout 100 --timeout-method thread"
XDIST = "--durations 8 --dist worksteal --max-worker-restart 40 -n"
KERNELS = "ops layer_norm act messages"
OTHERS = "arguments layers batch_norm_act fuse convert_syncbn recompute recompute_scopes convert convert_vit"
# float32 and bfloat16 over planes, rows, short planes and memory with gaps; few enough for a sanitizer
SANITIZED = (
    "(nchw_wide or nhwc_c96 or one_sample or cropped_nhwc) and (dtype0 or dtype2)"
    " and (leaky and test_ops_that_invert_y or test_batch_norm_ops and -relu-)"
    " or test_layer_norm and (768 or 9001 or 2100) and (bfloat16 or float32-float32)"
    " or test_activation_ops and (every_other or nchw_wide) and (gelu_tanh or silu) and (dtype0 or dtype2)"
    " or test_collective_messages_merge and (2-6 or 5-12)"
)
# The cache of torch's allocator would hide an overrun. torch expects some calls of CUDA's to fail.
RACECHECK = "env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 99 --tool racecheck"
MEMCHECK = RACECHECK.replace("racecheck", "memcheck --report-api-errors no")
NCU = "ncu --clock-control none --kernel-name-base demangled"
NCU += " -k regex:(stats|forward|reduce|backward)(_single_launch)?_kernel"
NCU += " --section SpeedOfLight --section MemoryWorkloadAnalysis --section WarpStateStats"
CONVERT = "--models vit_small_patch16_224,resnet50 --precision bf16 --batch 512"
CONVERT += " --contenders convert,products,sac,checkpoint"
CONVERT_ONCE = "--models resnet18 --batch 1 --repeats 1 --contenders convert"


def plan(device: str, out: Path, named: str) -> dict[str, tuple[int, str, list[str]]]:
    """Returns each step's seconds, what it needs, and its command. A GPU's own tests come first."""
    python, programs, cores = sys.executable, "tools/gpu_steps.py", len(os.sched_getaffinity(0))
    few, many = ([*XDIST.split(), str(n)] for n in (max(1, min(3, cores // 4)), max(2, cores * 5 // 8)))
    kernels, others = ([f"tests/test_{name}.py" for name in names.split()] for names in (KERNELS, OTHERS))
    gpu = device == "cuda"
    build = f"env FASTVIT_CPU=native FASTVIT_CUDA={int(gpu)} {python} setup.py -q build_ext --inplace".split()
    sanitizer, ncu = ("compute-sanitizer", "ncu") if gpu else ("GPU", "GPU")

    def pytest(files: list[str], *options: str) -> list[str]:
        return [python, *PYTEST.split(), "-m", "not slow and not models", *options, *files]

    def bench(name: str, arguments: str, rehearsal: str) -> list[str]:
        command = [python, f"benchmarks/bench_{name}.py", "--device", device, "--out", str(out)]
        return [*command, *(arguments if gpu else rehearsal).split()]

    return {
        "facts": (120, "", [python, programs, "facts", device]),
        "build": (200, "", build),
        "named": (100, "", pytest(re.split(r"\s+(?=tests/)", named.strip()), *few)),  # Names may have spaces.
        "test_cuda": (110, "", pytest(["tests/test_cuda.py", "tests/test_peer_faults.py"], *few)),
        "tests": (180, "", pytest(kernels + others, *many)),
        "memcheck": (130, sanitizer, [*MEMCHECK.split(), *pytest(kernels, "-k", SANITIZED)]),
        "racecheck": (130, sanitizer, [*RACECHECK.split(), *pytest(kernels, "-k", SANITIZED)]),
        "bench_ops": (60, "", bench("ops", "", "--quick")),
        "bench_layers": (150, "", bench("layers", "", "--quick")),
        "bench_convert": (90, "timm torchvision", bench("convert", CONVERT, CONVERT_ONCE)),
        "bench_host": (80, "timm torchvision", bench("host", "--rounds 60", "--rounds 1")),
        "test_compile": (120, "", pytest(["tests/test_compile.py"], *few)),
        "ncu": (80, ncu, [*NCU.split(), python, programs, "passes"]),
    }


def checksum() -> str:
    """Returns the checksum of the C++ sources, which setup.py puts into the library."""
    paths = sorted((ROOT / "csrc").rglob("*.*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]


def fits(folder: Path, device: str) -> bool:
    """Returns whether the libraries in a folder were built from these sources, for the device."""
    cpu, cuda = folder / "_C.so", folder / "_cuda.so"
    stamped = cpu.exists() and f"; sources {checksum()}".encode() in cpu.read_bytes()
    return stamped and (device == "cpu" or cuda.exists())


def facts(device: str) -> None:
    """Prints what the machine has. Fails unless libraries of these sources run on the device."""
    import torch

    end = time.monotonic() + DRIVER_SECONDS
    program = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda')"]
    while device == "cuda" and subprocess.run(program).returncode:
        if time.monotonic() > end or not os.path.exists("/dev/nvidiactl"):
            print("there is no GPU")
            sys.exit(NO_GPU)
        time.sleep(3)
    print(f"python {sys.version}, {len(os.sched_getaffinity(0))} cores", flush=True)
    os.system("nvidia-smi")
    packages = {f"{package.name} {package.version}" for package in importlib.metadata.distributions()}
    print(*sorted(packages), sep=", ", flush=True)
    tree, carried = ROOT / "fastvit", CARRIED / "fastvit"
    if not fits(tree, device):
        if not fits(carried, device):
            sys.exit(f"no libraries of the sources {checksum()} in fastvit or build/carried")
        for library in ("_C.so", "_cuda.so")[: 1 if device == "cpu" else 2]:
            (tree / library).unlink(missing_ok=True)  # not overwritten, since a process may have it mapped
            shutil.copy2(carried / library, tree)
    from fastvit import info, ops

    info.main()
    ops.bn_stats(torch.ones(2, 3, device=device)).sum().item()  # raises without code for this GPU
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    print(f"a kernel runs on {name}, sources {checksum()}")


def passes() -> None:
    """Launches the four passes of a batch norm, over rows and over planes, for a profiler."""
    import torch

    from fastvit import ops

    for layout in (torch.channels_last, torch.contiguous_format):
        pair = torch.randn(2, 128, 256, 56, 56, device="cuda", dtype=torch.bfloat16)
        x, dy = (one.contiguous(memory_format=layout) for one in pair)
        _, saved = ops.bn_forward(x, activation="relu", moments=ops.bn_stats(x))
        (sums,) = ops.bn_reduce(x, dy, saved, activation="relu")
        ops.bn_backward(x, dy, saved, activation="relu", global_sums=sums)


if __name__ == "__main__":
    {"facts": facts, "passes": passes}[sys.argv[1]](*sys.argv[2:])
