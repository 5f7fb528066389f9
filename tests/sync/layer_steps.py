"""Steps of layers that ranks make together, and the errors of such steps."""

import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastvit

CHANNELS = 6


class CaughtError(NamedTuple):
    message: str
    seconds: float  # the time until the error


def make_layers(count: int, **options) -> list[fastvit.SyncBatchNorm]:
    return [fastvit.SyncBatchNorm(CHANNELS, **options) for _ in range(count)]


def make_leaf(channels: int = CHANNELS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, channels, 3, dtype=dtype).requires_grad_()


def run_step(layer: nn.Module) -> Tensor:
    """Runs a forward and a backward of a layer on random input, and returns the output."""
    y = layer(make_leaf(layer.num_features, layer.weight.dtype))
    y.square().sum().backward()
    return y


def gather_samples(x: Tensor) -> Tensor:
    """Returns the samples of all ranks, which have equally many."""
    samples = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(samples, x.detach())
    return torch.cat(samples)


def check_steps(layers: list[nn.Module]) -> None:
    """Runs a step of every layer, and compares it with torch over the batches of all ranks."""
    for layer in layers:
        x, count = make_leaf(), layer.num_batches_tracked.item()
        y = layer(x)
        expected = nn.functional.batch_norm(gather_samples(x), None, None, training=True)
        torch.testing.assert_close(y, expected[4 * dist.get_rank() :][:4], rtol=1e-4, atol=1e-5)
        y.square().sum().backward()
        assert x.grad.isfinite().all() and layer.num_batches_tracked == count + 1


def catch_error(call, *layers: nn.Module) -> CaughtError:
    """Returns the RuntimeError of `call`, which may not change the layers."""
    before = _copy_states(layers)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    seconds = time.monotonic() - begin
    assert all(map(torch.equal, _copy_states(layers), before)), "an error left its mark on a layer"
    return CaughtError(str(caught.value), seconds)


def _copy_states(layers) -> list[Tensor]:
    return [t.detach().clone() for layer in layers for t in (*layer.parameters(), *layer.buffers())]


def check_group_has_failed(layers: list[nn.Module]) -> None:
    """Asserts that every exchange raises at once, as it must after one that failed."""
    for layer in (*layers, fastvit.SyncBatchNorm(4096)):  # the last would need more memory
        error = catch_error(lambda layer=layer: layer(make_leaf(layer.num_features)), layer)
        assert "an exchange of this group has failed (" in error.message
        assert "start them anew" in error.message and error.seconds < 1
