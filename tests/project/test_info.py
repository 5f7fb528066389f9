"""`python -m fastvit.info` describes the build and the machine."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fastvit
from fastvit import _library, info


def test_facts_name_torch_and_the_kernels_that_were_built():
    facts = info.facts()
    assert facts["torch"].startswith(torch.__version__)
    kernels = {"default": ("baseline",), "avx2": ("baseline", "avx2")}  # as ATEN_CPU_CAPABILITY asks of torch
    wish = os.environ.get("ATEN_CPU_CAPABILITY")
    assert facts["CPU kernels"].split(",")[0] in kernels.get(wish, ("baseline", "avx2", "avx512"))
    built = torch.ops.fastvit.cuda_build()
    assert facts["CUDA kernels"].endswith(built)
    assert built.startswith("built for " if (_library.PACKAGE_DIR / "_cuda.so").exists() else "not built: ")
    assert _library.HAS_CUDA_KERNELS <= (torch.version.cuda is not None)
    assert "gloo" in facts["process groups"]


@pytest.mark.parametrize(
    "built,driver,problem",
    [
        ("built for sm_90 with CUDA 13.0", 12080, "CUDA 13 (580 or later); this driver supports CUDA 12"),
        ("built for sm_90 with CUDA 13.2", 13000, ""),
        ("built for sm_90 with CUDA 14.0", 13000, "a driver for CUDA 14; this driver supports CUDA 13"),
        ("built for sm_90 with CUDA 13.0", 0, ""),  # no driver, no GPU
        ("not built: FASTVIT_CUDA=0", 12080, ""),
    ],
    ids=["older_major", "older_minor", "later_major", "no_driver", "no_kernels"],
)
def test_a_driver_that_is_too_old_is_named(monkeypatch, built, driver, problem):
    monkeypatch.setattr(_library, "driver_cuda_version", lambda: driver)
    found = _library.driver_problem(built)
    assert problem in found and bool(problem) == bool(found)


BUILT = "built for sm_75, compute_75, sm_80, sm_90, sm_100f with CUDA 13.0"


@pytest.mark.parametrize(
    "built,capability,covered",
    [
        pytest.param(BUILT, (7, 5), True, id="of_its_own"),
        pytest.param(BUILT, (8, 9), True, id="of_sm_80"),
        pytest.param(BUILT, (11, 0), True, id="by_ptx"),
        pytest.param(BUILT, (7, 0), False, id="older_than_all"),
        pytest.param("built for sm_86 with CUDA 12.4", (8, 0), False, id="older_minor"),
        pytest.param("built for sm_90a, compute_90a with CUDA 12.4", (9, 0), True, id="sm_90a"),
        pytest.param("built for sm_90a, compute_90a with CUDA 12.4", (10, 0), False, id="later_than_sm_90a"),
    ],
)
def test_gpus_that_the_kernels_run_on(built, capability, covered):
    assert _library.has_code_for(built, capability) == covered


@pytest.mark.skipif(_library.HAS_CUDA_KERNELS, reason="the CUDA kernels are there")
def test_a_cuda_tensor_without_cuda_kernels_hears_why():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 3, 4, device="cuda")
    with pytest.raises(ValueError, match="the input is on cuda:0, but the CUDA kernels are") as error:
        fastvit.SyncBatchNorm(3)(x)
    assert str(error.value).endswith(_library.CUDA_STATUS)


PEP_440 = r"\d+(\.\d+)*\+[a-z0-9]+(\.[a-z0-9]+)*"


def test_two_checkouts_have_different_versions_unless_their_sources_are_equal(monkeypatch, tmp_path):
    """With and without changes that are committed, and with and without metadata of an installation."""
    only_sources = shutil.ignore_patterns("*.so", "__pycache__")

    def version(*parts, change=None):
        folder = shutil.copytree(_library.PACKAGE_DIR, tmp_path.joinpath(*parts), ignore=only_sources)
        if change is not None:
            change(folder)
        monkeypatch.setattr(_library, "PACKAGE_DIR", folder)
        found = _library.version.__wrapped__()
        monkeypatch.undo()
        return found

    assert fastvit.__version__ == info.facts()["fastvit"] == version("a") == version("b", "c")
    assert fastvit.__version__.startswith(importlib.metadata.version("fastvit") + "+")
    changed = [
        version("edited", change=lambda folder: (folder / "models/vit.py").open("a").write("#")),
        version("moved", change=lambda folder: (folder / "memory.py").rename(folder / "memories.py")),
        version("added", change=lambda folder: (folder / "new.py").touch()),
    ]
    monkeypatch.setattr(
        torch.ops.fastvit, "cuda_build", lambda: "not built: FASTVIT_CUDA=0; sources 12345678"
    )
    changed.append(_library.version.__wrapped__())
    monkeypatch.setattr(torch.ops.fastvit, "cuda_build", lambda: "built for sm_90; sources 12345678")
    assert _library.version.__wrapped__() == changed[-1]  # the same sources, built for another machine
    monkeypatch.setattr(
        importlib.metadata, "version", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError)
    )
    changed.append(_library.version.__wrapped__())
    assert len({fastvit.__version__, *changed}) == 6
    assert all(re.fullmatch(PEP_440, one) for one in changed)


def test_public_names_are_those_of_fastvit():
    """Functions of other libraries are no attributes."""
    public = {name for name in vars(fastvit) if not name.startswith("_")}
    modules = {name for name in public if f"fastvit.{name}" in sys.modules}
    assert public - modules <= {*fastvit.__all__}
    with pytest.raises(AttributeError, match="module 'fastvit' has no attribute 'version'"):
        fastvit.version  # noqa: B018


def test_command_line(capsys):
    info.main()
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == list(info.facts())


WITHOUT_KERNELS = """
import torch, fastvit
from fastvit.compat.apex import amp
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
x = torch.randn(64, 64)
fastvit.convert(model)
assert fastvit.report(model, x).freed_bytes > 0 and fastvit.verify(model, x)
amp.initialize(model, opt_level="O0", verbosity=0)
for use in (
    lambda: fastvit.InPlaceABN(3), lambda: fastvit.SyncBatchNorm(3), lambda: fastvit.LayerNorm(3),
    lambda: fastvit.fuse(model), lambda: fastvit.convert_syncbn_model(model),
    lambda: fastvit.functional.act(x), lambda: fastvit.ops.bn_stats(x),
):
    try:
        use()
    except ImportError as error:
        print(error)
"""


def test_a_package_without_kernels():
    command, environment = [sys.executable, "-c", WITHOUT_KERNELS], os.environ | {"FASTVIT_KERNELS": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    said = run.stdout.splitlines()
    assert len(said) == 7, run.stderr
    for line in said:
        assert "needs fastvit's kernels, but FASTVIT_KERNELS=0 says that none are loaded" in line


def test_kernels_that_were_not_built(monkeypatch, tmp_path):
    monkeypatch.setattr(_library, "PACKAGE_DIR", tmp_path)
    why, cuda, _ = _library.load_libraries()
    assert "_C.so is missing; build it with `make install` or `pip install .`" in why and not cuda
    monkeypatch.setenv("FASTVIT_KERNELS", "yes")
    with pytest.raises(ImportError, match="FASTVIT_KERNELS is 'yes'; 0 or 1 expected"):
        _library.load_libraries()


CHANGED = """
import sys, torch, torch.jit, torch.autograd.graph
before = {
    (name, key): value for name, module in list(sys.modules.items()) if name.split(".")[0] == "torch"
    for key, value in list(vars(module).items()) if callable(value)
}
import fastvit
def changed():
    return {f"{name}.{key}" for (name, key), value in before.items()
            if vars(sys.modules[name]).get(key) is not value}
assert not changed(), changed()
model = fastvit.convert(torch.nn.Linear(4, 4))
model(torch.ones(2, 4))
assert changed() == {"torch.jit._recursive.get_hook_stubs"}, changed()
with fastvit.recompute_scope():
    assert changed() == {
        "torch.jit._recursive.get_hook_stubs", "torch.autograd.graph.disable_saved_tensors_hooks",
        "torch.overrides.has_torch_function",
    }, changed()
fastvit.revert(model)
assert not changed(), changed()
"""


def test_an_import_changes_nothing_of_torch():
    """A converted model and an open scope do, as long as there are any."""
    subprocess.run([sys.executable, "-c", CHANGED], check=True, timeout=50)
