"""fastvit.compat besides imports: a distribution for `importlib.metadata`, names of apex.parallel."""

import importlib.metadata
import sys

import pytest
import torch.distributed as dist

import fastvit
from fastvit.compat import _finder, install
from fastvit.compat.apex import parallel


@pytest.fixture
def installed(monkeypatch, tmp_path):
    monkeypatch.setattr(_finder, "_install_in_children", lambda: None)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, _finder._Finder)])
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apex")
    install()
    return tmp_path


def test_distribution(installed):
    """Programs such as transformers read it before they import."""
    assert importlib.metadata.version("apex") == "25.05+fastvit"
    assert importlib.metadata.version("inplace-abn") == importlib.metadata.version("inplace_abn")
    found = importlib.metadata.distribution("apex")
    assert found.metadata["Name"] == "apex" and "fastvit.compat" in found.metadata["Summary"]
    assert found.read_text("RECORD") is None and found.requires is None
    assert {"apex", "inplace_abn"} <= {d.metadata["Name"] for d in importlib.metadata.distributions()}
    assert importlib.metadata.packages_distributions()["apex"] == ["apex"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("apexes")


@pytest.mark.parametrize("prefer", ["apex", "fastvit"])
def test_distribution_of_a_real_one(installed, prefer):
    install(prefer)
    folder = installed / "apex-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    importlib.invalidate_caches()
    assert importlib.metadata.version("apex") == "0.1"
    assert [d.version for d in importlib.metadata.distributions() if d.metadata["Name"] == "apex"] == ["0.1"]


def test_names_of_parallel():
    assert parallel.ReduceOp is dist.ReduceOp
    for module in (parallel.sync_batchnorm, parallel.optimized_sync_batchnorm):
        assert module.SyncBatchNorm is fastvit.SyncBatchNorm
