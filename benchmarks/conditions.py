"""Says on which machine, when and with which code a result was measured."""

import datetime
import hashlib
import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
# The beginning of a result's name -> the code that the result measures, as globs. A result on a CPU does not
# measure csrc/cuda, and one on a GPU does not measure csrc/cpu.
MEASURED_CODE = {
    "batches": ("fastvit/memory.py", "fastvit/recompute/*.py", "fastvit/conversion/*.py"),
    "convert_vits": ("fastvit/memory.py", "fastvit/recompute/*.py", "fastvit/conversion/*.py"),
    "convert": ("csrc/**/*", "fastvit/*.py", "fastvit/recompute/*.py", "fastvit/conversion/*.py"),
    "curve": ("fastvit/memory.py", "fastvit/recompute/*.py", "fastvit/conversion/*.py"),
    "host": ("csrc/**/*", "fastvit/*.py", "fastvit/recompute/*.py", "fastvit/conversion/*.py"),
    "layers": ("csrc/**/*", "fastvit/*.py"),
    "ops": ("csrc/**/*", "fastvit/ops.py"),
    "sync": ("csrc/**/*", "fastvit/*.py", "fastvit/sync/*.py"),
    "train": ("csrc/**/*", "fastvit/**/*.py"),
}


def checksum_sources(name: str) -> str:
    """Returns a checksum of the code that the result of this name measures."""
    globs = next((globs for prefix, globs in MEASURED_CODE.items() if name.startswith(prefix)), None)
    if globs is None:
        raise ValueError(f"a result's name begins with {', '.join(MEASURED_CODE)}, got {name}")
    other_kernels = ROOT / "csrc" / ("cpu" if "cuda" in name else "cuda")
    paths = {path for pattern in globs for path in ROOT.glob(pattern) if other_kernels not in path.parents}
    sources = b"".join(path.read_bytes() for path in sorted(paths) if path.is_file())
    return hashlib.sha256(sources).hexdigest()[:8]


def run_command(*command: str) -> str:
    """Returns the output of a command, or an empty string if the command is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def identify_measurement(name: str, device: str) -> tuple[str, str, str]:
    """Returns device, torch and checksum of the sources: rows with these are not measured again."""
    return device_name(device), torch.__version__, checksum_sources(name)


def current_commit() -> str:
    """Returns the last commit that changed the code or the benchmarks, by git or FASTVIT_COMMIT.

    A copy without this history needs the variable.
    """
    if commit := os.environ.get("FASTVIT_COMMIT"):
        return commit
    git = ("git", "-c", "safe.directory=*", "-C", str(ROOT))
    code = ("--", "csrc", "fastvit", "setup.py", "benchmarks/*.py")
    commit = run_command(*git, "log", "-1", "--format=%h", *code)
    if not commit:
        return "unknown"
    return commit + ("+changes" if run_command(*git, "status", "--porcelain", *code) else "")


def provenance(device: str) -> dict[str, str]:
    """Returns the device, the software and the date of a measurement, by column."""
    drivers = run_command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    is_gpu = torch.device(device).type == "cuda"
    return {
        "device": device_name(device),
        "driver": (drivers or ["unknown"])[0] if is_gpu else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "commit": current_commit(),
        "date": datetime.date.today().isoformat(),
    }


def format_conditions(row: dict[str, str], *details: str) -> str:
    """Returns a phrase on where and when a row was measured."""
    return ", ".join(
        [row["device"], *details, f"torch {row['torch']}", f"commit {row['commit']}", row["date"]]
    )


def describe_changes(name: str, rows: list[dict[str, str]]) -> str:
    """Returns a sentence if the code that a result measures has changed since, or else an empty string."""
    checksum = checksum_sources(name)
    is_current = all(row.get("sources") == checksum for row in rows)
    return "" if is_current else "The code that this measures has changed since."
