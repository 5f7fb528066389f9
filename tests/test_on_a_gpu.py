"""What the autograd functions choose on a GPU, with CPU tensors that claim to be there."""

import pytest
import torch
import torch.distributed as dist

from fastvit import _autograd, sync


@pytest.fixture
def claimed(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.parametrize("ranks,one", [(None, True), (1, True), (2, False)])
def test_beside_other_ranks_no_grid_waits_for_itself(monkeypatch, claimed, ranks, one):
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks is not None)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    assert _autograd.in_one_pass(sync.LOCAL, torch.ones(1)) == one


def test_a_gradient_that_lies_differently_is_copied(claimed):
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dy = torch.randn(2, 3, 4, 5)
    copy = _autograd.lying_like(dy, x)
    assert copy.stride() == x.stride() and torch.equal(copy, dy)
    assert _autograd.lying_like(copy, x) is copy
    assert _autograd.lying_like(torch.ones(()).expand(2, 3, 4, 5), x).stride() == x.stride()
    assert _autograd.lying_like(dy, torch.randn(2, 3, 4, 10)[..., ::2]) is dy  # gaps: no copy lies so
