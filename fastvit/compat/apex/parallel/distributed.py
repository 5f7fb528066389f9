"""apex's DistributedDataParallel over torch's."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...apex_C import flatten, unflatten
from .._notices import warn_once

ReduceOp = dist.ReduceOp

_ONE_BUCKET_MB = 1 << 20  # larger than any model
_WITHOUT_EFFECT = {
    "shared_param": None,
    "allreduce_trigger_params": None,
    "retain_allreduce_buffers": False,
    "num_allreduce_streams": 1,
    "allreduce_communicators": None,
    "gradient_average_split_factor": None,
    "prof": False,
}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with apex's arguments.

    At construction parameters and buffers of rank 0 are broadcast. Buffers are not broadcast later, so a
    BatchNorm that is not synchronised has different statistics on each rank, as in apex.

    Args:
        module: on its device, after `amp.initialize`.
        message_size: elements per bucket; torch's bucket_cap_mb at four bytes each.
        delay_allreduce: one reduction after all gradients are computed; allows unused parameters.
        allreduce_always_fp32: reduce half gradients in float32.
        gradient_average: divide the sum of gradients by the number of ranks.
        gradient_predivide_factor: divide by it before the sum and, with gradient_average, by
            ranks / gradient_predivide_factor after it.
        without_effect: apex's other arguments, which warn once.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        *,
        allreduce_always_fp32: bool = False,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        **without_effect: Any,
    ) -> None:
        for name, value in without_effect.items():
            if name not in _WITHOUT_EFFECT:
                raise TypeError(f"DistributedDataParallel takes apex's arguments, got {name}")
            if value != _WITHOUT_EFFECT[name]:
                warn_once(f"DistributedDataParallel: {name} has no effect; see docs/migrating-from-apex.md")
        if not gradient_predivide_factor > 0:
            raise ValueError(
                "DistributedDataParallel: gradient_predivide_factor must be above 0, got "
                f"{gradient_predivide_factor}"
            )
        # torch 2.13 renamed the option.
        names = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
        options: dict[str, Any] = {buffers: False}
        super().__init__(
            module,
            bucket_cap_mb=_ONE_BUCKET_MB if delay_allreduce else max(1, message_size * 4 / 2**20),
            find_unused_parameters=delay_allreduce,
            **options,
        )
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            after = gradient_predivide_factor / dist.get_world_size() if gradient_average else 1.0
            self.register_comm_hook((1.0 / gradient_predivide_factor, after, allreduce_always_fp32), _reduce)

    def disable_allreduce(self) -> None:
        """Backwards leave gradients local until `enable_allreduce`, as within `no_sync`."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        self.require_backward_grad_sync = True


# torch reads these annotations, so they are not postponed in this file.
def _reduce(state: tuple[float, float, bool], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    before, after, in_float32 = state
    buffer = bucket.buffer()
    summed = buffer.float() if in_float32 and buffer.dtype != torch.float64 else buffer
    summed.mul_(before)

    def finish(future: torch.futures.Future) -> Tensor:
        summed.mul_(after)
        return summed if summed is buffer else buffer.copy_(summed)

    return dist.all_reduce(summed, async_op=True).get_future().then(finish)


@torch.no_grad()
def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """One collective for each dtype and device instead of one for each tensor; changes the tensors in place.

    Args:
        call: a collective such as `torch.distributed.broadcast`; sums of `all_reduce` become means.
        extra_args: arguments of `call` after the tensor.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype, tensor.device].append(tensor)
    for group in groups.values():
        flat = flatten(group)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat.div_(dist.get_world_size())
        torch._foreach_copy_(group, unflatten(flat, group))
