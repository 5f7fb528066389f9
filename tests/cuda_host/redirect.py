"""Runs the ops' CUDA kernels on CPU tensors: install() registers these kernels for the dispatch key CPU.

Schemas, fakes, autograd and Python layers remain the package's. FASTVIT_CUDA_HOST is the mode of the build:
plain, asan, race or contract. For asan, Python must be started with sanitizer_environment().
"""

import importlib.util
import os
import subprocess
import warnings
from pathlib import Path

import torch

NAMESPACE = "fastvit_cuda_host"
_installed = []  # the engine, and the Library objects, whose registrations end when the objects are freed


def sanitizer_environment() -> dict:
    """Returns the environment variables with which Python can load the asan build."""
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name=lib{name}.so"], capture_output=True, text=True
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    # Python leaks, and a test asks for more memory than there is.
    options = "detect_leaks=0:allocator_may_return_null=1"
    return {"LD_PRELOAD": ":".join(libraries), "ASAN_OPTIONS": options}


def list_registered_ops() -> list[str]:
    """Returns the names of the ops for which the loaded build has kernels."""
    prefix = f"{NAMESPACE}::"
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    return sorted(name.removeprefix(prefix) for name in registered if name.startswith(prefix))


def install():
    """Replaces the CPU's implementation of every op, and returns the engine's controls (`_cuda_host`)."""
    if _installed:
        return _installed[0]
    import fastvit.ops  # noqa: F401  defines the schemas

    mode = os.environ.get("FASTVIT_CUDA_HOST", "plain")
    path = Path(__file__).resolve().parents[2] / "build/cuda_host" / mode / "_cuda_host.so"
    if not path.exists():
        raise RuntimeError(f"{path} is missing; run: python tests/cuda_host/build.py {mode}")
    spec = importlib.util.spec_from_file_location("_cuda_host", path)
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    definitions = torch.library.Library(NAMESPACE, "DEF")
    overrides = torch.library.Library("fastvit", "IMPL")
    for name in list_registered_ops():
        schema = str(getattr(torch.ops.fastvit, name).default._schema)
        definitions.define(schema.removeprefix("fastvit::"))
        emulated = getattr(getattr(torch.ops, NAMESPACE), name).default
        with warnings.catch_warnings():  # torch warns that an implementation is replaced
            warnings.simplefilter("ignore")
            overrides.impl(name, emulated, "CPU", allow_override=True)
    _installed.extend([engine, definitions, overrides])
    return engine


if __name__ == "__main__":  # The scripts of tools/ read these variables.
    print(*(f"{name}={value}" for name, value in sanitizer_environment().items()))
