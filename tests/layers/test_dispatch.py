"""The choices of layers for tensors on a GPU, tested with CPU tensors that say that they are there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode

import fastvit
from fastvit import _autograd, _library, info, sync
from fastvit.fusion import TorchDtypeLayerNorm
from fastvit.training.config import Config, ConfigError
from fastvit.training.run import _check_norm_runs_on


@pytest.fixture
def say_is_cuda(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.fixture
def gpu_without_kernels(monkeypatch):
    """Makes torch see a GPU for which nothing was built."""
    monkeypatch.setattr(_library, "HAS_CUDA_KERNELS", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(_library, "has_code_for", lambda built, capability: False)
    try:
        with FakeTensorMode():
            torch.empty(1, device="cuda")
    except RuntimeError as error:  # of a torch that was built for CUDA
        pytest.skip(f"a fake tensor on cuda: {error}")
    _library._missing_code_message.cache_clear()
    yield
    _library._missing_code_message.cache_clear()


NO_CODE = "no code for this Tesla V100, .* TORCH_CUDA_ARCH_LIST=7.0 and a toolkit before CUDA 13"


def test_a_gpu_without_kernels_is_named_before_any_launch(gpu_without_kernels):
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 3, 4, device="cuda")
        for layer in (fastvit.SyncBatchNorm(3), fastvit.functional.act):
            with pytest.raises(
                ValueError, match=f"the input is on cuda:0, but the CUDA kernels have {NO_CODE}"
            ):
                layer(x)
    assert info.facts()["GPUs"] == "1 x Tesla V100 (sm_70, without kernels)"
    with pytest.raises(
        ConfigError, match=f"--norm inplace-abn needs fastvit's kernels: the CUDA kernels have {NO_CODE}"
    ):
        _check_norm_runs_on(Config(norm="inplace-abn"), torch.device("cuda", 0))
    _check_norm_runs_on(Config(norm="torch"), torch.device("cuda", 0))


def test_fuse_leaves_a_model_on_a_gpu_without_kernels(gpu_without_kernels):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(nn.LayerNorm(3, device="cuda"), nn.ReLU(), nn.GELU("tanh"))
        kinds = [type(layer) for layer in fastvit.fuse(model)]
    assert kinds == [nn.LayerNorm, nn.ReLU, nn.GELU]


def test_beside_other_ranks_no_grid_waits_for_itself(monkeypatch, say_is_cuda):
    for world_size, is_fused in [(None, True), (1, True), (2, False)]:
        monkeypatch.setattr(dist, "is_initialized", lambda size=world_size: size is not None)
        monkeypatch.setattr(dist, "get_world_size", lambda size=world_size: size)
        assert _autograd.fuses_statistics(sync.LOCAL_TRANSPORT, torch.ones(1)) == is_fused


def test_a_gradient_of_other_strides_is_copied_where_x_has_no_gaps(say_is_cuda):
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dy = torch.randn(2, 3, 4, 5)
    copy = _autograd.match_strides(dy, x)
    assert copy.stride() == x.stride() and torch.equal(copy, dy)
    assert _autograd.match_strides(copy, x) is copy
    assert _autograd.match_strides(torch.ones(()).expand(2, 3, 4, 5), x).stride() == x.stride()
    assert _autograd.match_strides(dy, torch.randn(2, 3, 4, 10)[..., ::2]) is dy  # no copy has such gaps


def test_a_fused_layer_norm_takes_float32_in_autocast_alone(monkeypatch, say_is_cuda):
    monkeypatch.setattr(fastvit.functional, "layer_norm", lambda input, *_, **__: input)
    for autocast, dtype in [(False, torch.half), (True, torch.float32)]:
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device, enabled=autocast: enabled)
        assert TorchDtypeLayerNorm(8)(torch.ones(2, 8, dtype=torch.half)).dtype is dtype
