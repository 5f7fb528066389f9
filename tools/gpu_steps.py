"""The steps of tools/run_gpu_checks.py: their commands, and two programs that steps run.

python tools/gpu_steps.py facts cpu|cuda    prints what the machine has, and tries the libraries
python tools/gpu_steps.py passes            launches the passes of a batch norm for a profiler
"""

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
CARRIED = ROOT / "build/carried"  # libraries of tools/build_for_gpu.sh, with their commit
DRIVER_SECONDS = 90  # A driver may take a minute to start.
NO_GPU_STATUS = 4  # the exit status of `facts` without a GPU
PYTEST_OPTIONS = (
    "-m pytest -q -rfE --tb=short -o addopts= -p no:cacheprovider --timeout 100 --timeout-method thread"
)
XDIST_OPTIONS = "--durations 8 --dist worksteal --max-worker-restart 40 -n"
KERNEL_TESTS = ["tests/ops", "tests/sync/test_messages.py"]
OTHER_TESTS = ["tests/layers", "tests/recompute", "tests/conversion/test_transformers.py"]
COMPILE_TESTS = "tests/layers/test_compile.py"
# These tests take float32 and bfloat16 over planes, rows, short planes and memory with gaps. They are few,
# since a sanitizer is slow.
SANITIZED_TESTS = (
    "(nchw_wide or nhwc_c96 or one_sample or cropped_nhwc) and (float32 or bfloat16)"
    " and (test_ops_that_invert_y or test_batch_norm_ops)"
    " or test_layer_norm_ops and (768 or 9001 or 2100) and (bfloat16-bfloat16 or float32-float32)"
    " or test_activation_ops and (every_other or nchw_wide) and (float32 or bfloat16)"
    " or test_collective_messages_merge and (2-6 or 5-12)"
)
# The cache of torch's allocator would hide an overrun. memcheck does not report failed calls of CUDA, since
# torch expects some to fail.
RACECHECK = "env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 99 --tool racecheck"
MEMCHECK = RACECHECK.replace("racecheck", "memcheck --report-api-errors no")
NCU = "ncu --clock-control none --kernel-name-base demangled"
NCU += " -k regex:(stats|forward|reduce|backward)(_single_launch)?_kernel"
NCU += " --section SpeedOfLight --section MemoryWorkloadAnalysis --section WarpStateStats"
CONVERT_OPTIONS = "--models vit_small_patch16_224,resnet50 --precision bf16 --batch 512"
CONVERT_OPTIONS += " --contenders convert,matmuls,sac,checkpoint"
CONVERT_REHEARSAL = "--models resnet18 --batch 1 --repeats 1 --contenders convert"


def plan_steps(device: str, out: Path, named_tests: str) -> dict[str, tuple[int, str, list[str]]]:
    """Returns the seconds of each step, the programs and packages that the step needs, and its command.

    The tests that only a GPU can run come first.
    """
    python, this_file, cores = sys.executable, "tools/gpu_steps.py", len(os.sched_getaffinity(0))
    few_workers, many_workers = (
        [*XDIST_OPTIONS.split(), str(n)] for n in (max(1, min(3, cores // 4)), max(2, cores * 5 // 8))
    )
    is_gpu = device == "cuda"
    build = (
        f"env FASTVIT_CPU=native FASTVIT_CUDA={int(is_gpu)} {python} setup.py -q build_ext --inplace".split()
    )
    # No program is named GPU, so that steps with this need do not run.
    sanitizer, ncu = ("compute-sanitizer", "ncu") if is_gpu else ("GPU", "GPU")

    def pytest_command(files: list[str], *options: str) -> list[str]:
        selected = ["-m", "not memory and not packages", "--device", device]
        return [python, *PYTEST_OPTIONS.split(), *selected, *options, *files]

    def bench_command(name: str, arguments: str, rehearsal: str) -> list[str]:
        command = [python, f"benchmarks/bench_{name}.py", "--device", device, "--out", str(out)]
        return [*command, *(arguments if is_gpu else rehearsal).split()]

    named_test_ids = re.split(r"\s+(?=tests/)", named_tests.strip())  # Names may have spaces.
    sanitized_command = pytest_command(KERNEL_TESTS, "-k", SANITIZED_TESTS)
    return {
        "facts": (120, "", [python, this_file, "facts", device]),
        "build": (200, "", build),
        "named": (100, "", pytest_command(named_test_ids, *few_workers)),
        "test_cuda": (110, "", pytest_command(["tests/gpu"], *few_workers)),
        "tests": (
            180,
            "",
            pytest_command(KERNEL_TESTS + OTHER_TESTS, *many_workers, "--ignore", COMPILE_TESTS),
        ),
        "memcheck": (130, sanitizer, [*MEMCHECK.split(), *sanitized_command]),
        "racecheck": (130, sanitizer, [*RACECHECK.split(), *sanitized_command]),
        "bench_ops": (60, "", bench_command("ops", "", "--quick")),
        "bench_layers": (150, "", bench_command("layers", "", "--quick")),
        "bench_convert": (
            90,
            "timm torchvision",
            bench_command("convert", CONVERT_OPTIONS, CONVERT_REHEARSAL),
        ),
        "bench_host": (80, "timm torchvision", bench_command("host", "--rounds 60", "--rounds 1")),
        "test_compile": (120, "", pytest_command([COMPILE_TESTS], *few_workers)),
        "ncu": (80, ncu, [*NCU.split(), python, this_file, "passes"]),
    }


def source_checksum() -> str:
    """Returns the checksum of the C++ sources, which setup.py puts into the library."""
    paths = sorted((ROOT / "csrc").rglob("*.*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]


def are_current(folder: Path, device: str) -> bool:
    """Returns whether the libraries in a folder were built from these sources, for the device."""
    cpu, cuda = folder / "_C.so", folder / "_cuda.so"
    has_checksum = cpu.exists() and f"; sources {source_checksum()}".encode() in cpu.read_bytes()
    return has_checksum and (device == "cpu" or cuda.exists())


def facts(device: str) -> None:
    """Prints the machine, GPU and packages. Fails unless libraries of these sources run on the device."""
    import torch

    end = time.monotonic() + DRIVER_SECONDS
    gpu_probe = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda')"]
    while device == "cuda" and subprocess.run(gpu_probe).returncode:
        if time.monotonic() > end or not os.path.exists("/dev/nvidiactl"):
            print("there is no GPU")
            sys.exit(NO_GPU_STATUS)
        time.sleep(3)
    print(f"python {sys.version}, {len(os.sched_getaffinity(0))} cores", flush=True)
    os.system("nvidia-smi")
    packages = {f"{package.name} {package.version}" for package in importlib.metadata.distributions()}
    print(*sorted(packages), sep=", ", flush=True)
    tree, carried = ROOT / "fastvit", CARRIED / "fastvit"  # folders of the libraries
    if not are_current(tree, device):
        if not are_current(carried, device):
            sys.exit(
                f"gpu_steps: no libraries of the sources {source_checksum()} in fastvit or build/carried"
            )
        for library in ("_C.so", "_cuda.so")[: 1 if device == "cpu" else 2]:
            # A process may have mapped the old file, so the file is replaced and not overwritten.
            (tree / library).unlink(missing_ok=True)
            shutil.copy2(carried / library, tree)
    from fastvit import info, ops

    info.main()
    # This raises if the library has no code for the GPU.
    ops.bn_stats(torch.ones(2, 3, device=device)).sum().item()
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    print(f"a kernel runs on {name}, sources {source_checksum()}")


def passes() -> None:
    """Launches the four passes of a batch norm, over rows and over planes, for a profiler."""
    import torch

    from fastvit import ops

    for layout in (torch.channels_last, torch.contiguous_format):
        pair = torch.randn(2, 128, 256, 56, 56, device="cuda", dtype=torch.bfloat16)
        x, dy = (tensor.contiguous(memory_format=layout) for tensor in pair)
        _, saved = ops.bn_forward(x, activation="relu", moments=ops.bn_stats(x))
        (sums,) = ops.bn_reduce(x, dy, saved, activation="relu")
        ops.bn_backward(x, dy, saved, activation="relu", global_sums=sums)


if __name__ == "__main__":
    {"facts": facts, "passes": passes}[sys.argv[1]](*sys.argv[2:])
