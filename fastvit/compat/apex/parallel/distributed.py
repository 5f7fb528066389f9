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

__all__ = ["DistributedDataParallel", "ReduceOp", "flat_dist_call"]

ReduceOp = dist.ReduceOp

_ONE_BUCKET_MB = 1 << 20  # larger than any model


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
        gradient_average_split_factor: older name of gradient_predivide_factor.

    `shared_param`, `allreduce_trigger_params`, `retain_allreduce_buffers`, `num_allreduce_streams`,
    `allreduce_communicators` and `prof` have no effect, and warn once.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        without_effect = {
            "shared_param": shared_param is not None,
            "allreduce_trigger_params": allreduce_trigger_params is not None,
            "retain_allreduce_buffers": retain_allreduce_buffers,
            "num_allreduce_streams": num_allreduce_streams != 1,
            "allreduce_communicators": allreduce_communicators is not None,
            "prof": prof,
        }
        for name, is_set in without_effect.items():
            if is_set:
                warn_once(f"DistributedDataParallel: {name} has no effect; see docs/migrating-from-apex.md")
        predivide = gradient_average_split_factor or gradient_predivide_factor
        if not predivide > 0:
            raise ValueError(
                f"DistributedDataParallel: gradient_predivide_factor must be above 0, got {predivide}"
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
        if allreduce_always_fp32 or not gradient_average or predivide != 1.0:
            world = dist.get_world_size()
            after = predivide / world if gradient_average else 1.0
            self.register_comm_hook((1.0 / predivide, after, allreduce_always_fp32), _reduce)

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
    if before != 1.0:
        summed.mul_(before)

    def finish(future: torch.futures.Future) -> Tensor:
        if after != 1.0:
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
