"""apex's DistributedDataParallel and Reducer: gradients are reduced as flat tensors.

The gradients of any graph are reduced in the same way: several forwards before a backward, unused or
frozen parameters, reentrant checkpoints. No reduction overlaps with backward, unlike those of torch's class.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..._import_hook import missing_attribute_getter
from ...apex_C import flatten, unflatten
from .._warn_once import warn_once

ReduceOp = dist.ReduceOp

_IGNORED_ARGUMENTS = {  # apex's arguments without an effect here, and their defaults
    "shared_param": None,
    "allreduce_trigger_params": None,
    "retain_allreduce_buffers": False,
    "num_allreduce_streams": 1,
    "allreduce_communicators": None,
    "gradient_average_split_factor": None,
    "prof": False,
}

_ddp_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The instances of torch's DistributedDataParallel and of this module's."""


class DistributedDataParallel(nn.Module):
    """Averages the gradients over the ranks at the end of each backward that reaches a parameter.

    At construction parameters and buffers of rank 0 are broadcast. Buffers are not broadcast later, so a
    BatchNorm that is not synchronised has different statistics on each rank, as in apex.

    Every `.grad` that any rank has is reduced; a rank that lacks a gradient takes part with zeros. Parameters
    may be frozen and thawed at any time. New parameters are broadcast in the next forward.

    Args:
        module: the model, on its device, after `amp.initialize`.
        message_size, delay_allreduce: have no effect, since there is one reduction after all gradients.
        allreduce_always_fp32: reduce half gradients in float32.
        gradient_average: divide the sum of gradients by the number of ranks. If False, a gradient that an
            earlier backward left is summed again, as in apex.
        gradient_predivide_factor: divisor before the sum. With gradient_average the divisor after the sum is
            ranks / gradient_predivide_factor.
        ignored_arguments: apex's other arguments, which have no effect and warn once.
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
        **ignored_arguments: Any,
    ) -> None:
        for name, value in ignored_arguments.items():
            if name not in _IGNORED_ARGUMENTS:
                raise TypeError(f"DistributedDataParallel takes apex's arguments, got {name}")
            if value != _IGNORED_ARGUMENTS[name]:
                warn_once(f"DistributedDataParallel: {name} has no effect; see docs/migrating-from-apex.md")
        if not gradient_predivide_factor > 0:
            raise ValueError(
                "DistributedDataParallel: gradient_predivide_factor must be above 0, got "
                f"{gradient_predivide_factor}"
            )
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True  # torch's name, which amp reads for either class
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        vars(self).update(_IGNORED_ARGUMENTS | ignored_arguments)
        self.message_size, self.delay_allreduce = message_size, delay_allreduce
        self.world_size = float(dist.get_world_size())
        self._tracked_parameters = list(module.parameters())
        self._hooked: set[nn.Parameter] = set()  # parameters with a hook of this model
        self._graph_task_ids: set[int] = set()  # backwards that end with a reduction
        _broadcast_from_rank_0([*module.parameters(), *module.buffers()])
        self._track_parameters()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            missing_attribute_getter("apex.parallel.DistributedDataParallel")(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._track_parameters()
        return self.module(*args, **kwargs)

    def disable_allreduce(self) -> None:
        """Leaves gradients local until `enable_allreduce`, as `no_sync` does in its block."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        self.require_backward_grad_sync = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves gradients local in the block; the next backward after the block reduces their sum."""
        previous, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = previous

    def __getstate__(self) -> dict[str, Any]:
        # A copy has parameters without hooks.
        return super().__getstate__() | {"_hooked": set(), "_graph_task_ids": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The next forward broadcasts all parameters, if the state has no `_tracked_parameters`.
        super().__setstate__({"_tracked_parameters": [], "_graph_task_ids": set()} | state)

    def _track_parameters(self) -> None:
        """Broadcasts new parameters, and puts hooks on those that require gradients now."""
        _ddp_models.add(self)  # a copy has not run __init__
        parameters, tracked = list(self.module.parameters()), set(self._tracked_parameters)
        _broadcast_from_rank_0([p for p in parameters if p not in tracked])
        self._tracked_parameters = parameters
        if torch._C._current_autograd_node() is None:
            self._graph_task_ids.clear()  # an interrupted backward leaves its id
        hook = functools.partial(self._queue_reduction, weakref.ref(self))
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooked:
                parameter.register_post_accumulate_grad_hook(hook)
                self._hooked.add(parameter)

    @staticmethod
    def _queue_reduction(model: weakref.ref[DistributedDataParallel], _parameter: Tensor) -> None:
        """Queues the reduction at the end of this backward. The hook does not keep the model alive."""
        self, task_id = model(), torch._C._current_graph_task_id()
        if self is not None and self.require_backward_grad_sync and task_id not in self._graph_task_ids:
            self._graph_task_ids.add(task_id)
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self._reduce_at_backward_end(task_id)
            )

    def _reduce_at_backward_end(self, task_id: int) -> None:
        self._graph_task_ids.discard(task_id)
        if self._graph_task_ids:  # the backward of a reentrant checkpoint ends before the one around it
            return
        if not self.gradient_average and torch._C._current_autograd_node() is not None:
            raise RuntimeError(
                "DistributedDataParallel: gradient_average=False needs checkpoint(..., use_reentrant=False), "
                "got a reentrant checkpoint"
            )
        prescale = 1.0 / self.gradient_predivide_factor
        postscale = 1.0 / prescale / self.world_size if self.gradient_average else 1.0
        reduce_gradients(self._tracked_parameters, prescale, postscale, self.allreduce_always_fp32)


def _track_ddp_model(module: nn.Module, _name: str, _child: nn.Module | None) -> None:
    if isinstance(module, (DistributedDataParallel, nn.parallel.DistributedDataParallel)):
        _ddp_models.add(module)


# torch calls this hook when a module becomes an attribute of another module.
register_module_module_registration_hook(_track_ddp_model)


def parameters_without_sync() -> set[Tensor]:
    """Returns the parameters of DDP models in `no_sync`, whose gradients are not reduced yet."""
    local_models = [model for model in _ddp_models if not getattr(model, "require_backward_grad_sync", True)]
    return {parameter for model in local_models for parameter in model.parameters()}


class Reducer:
    """Averages gradients over the ranks when `reduce()` is called.

    Args:
        module_or_grads_list: a module, whose parameters and buffers of rank 0 are broadcast, or gradients.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        module = module_or_grads_list
        self.module = module if isinstance(module, nn.Module) else None
        self.grads = [] if isinstance(module, nn.Module) else list(module)
        if self.module is not None:
            _broadcast_from_rank_0([*self.module.parameters(), *self.module.buffers()])

    def reduce(self) -> None:
        """Averages every `.grad` of the module that any rank has, or the gradients of the list."""
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
        else:
            reduce_gradients(list(self.module.parameters()), 1.0, 1.0 / dist.get_world_size())


def _broadcast_from_rank_0(tensors: Sequence[Tensor]) -> None:
    """Copies the tensors of rank 0 to all ranks.

    Raises:
        RuntimeError: on every rank, if the ranks have different numbers, shapes or dtypes of tensors.
    """
    if not tensors:
        return
    checksum = zlib.crc32(repr([(t.shape, t.dtype) for t in tensors]).encode())
    # The maximum of -checksum is minus the smallest checksum.
    bounds = torch.tensor([checksum, -checksum], device=tensors[0].device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    largest, smallest = bounds.tolist()
    if largest != -smallest:
        raise RuntimeError(
            "apex.parallel: the ranks have modules of different parameters or buffers; build the same model "
            "on every rank"
        )
    flat_dist_call([t.detach() for t in tensors], dist.broadcast, (0,))


@torch.no_grad()
def reduce_gradients(
    parameters: Sequence[Tensor], prescale: float, postscale: float, in_float32: bool = False
) -> None:
    """Multiplies every `.grad` by `prescale`, sums it over the ranks and multiplies by `postscale`, in place.

    Ranks agree on the set of gradients first. A rank that lacks a gradient adds zeros, and gets it.
    """
    if not parameters:
        return
    no_gradient, dense, sparse = range(3)  # the largest kind of all ranks wins
    kinds = [no_gradient if p.grad is None else sparse if p.grad.is_sparse else dense for p in parameters]
    agreed_kinds = torch.tensor(kinds, dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(agreed_kinds, dist.ReduceOp.MAX)
    dense_gradients = []
    for parameter, kind in zip(parameters, agreed_kinds.tolist(), strict=True):
        if kind == no_gradient:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if kind == sparse:
            gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce().mul_(prescale)
            dist.all_reduce(gradient)
            gradient.mul_(postscale)
        else:
            dense_gradients.append(gradient)
        parameter.grad = gradient

    def all_reduce_scaled(flat: Tensor) -> None:
        flat_sum = flat.float() if in_float32 and flat.dtype != torch.float64 else flat
        dist.all_reduce(flat_sum.mul_(prescale))
        flat.copy_(flat_sum.mul_(postscale))

    flat_dist_call(dense_gradients, all_reduce_scaled)


@torch.no_grad()
def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Calls a collective for each dtype and device instead of for each tensor; changes the tensors in place.

    Args:
        call: a collective in place, such as `torch.distributed.broadcast`. Sums of `all_reduce` become means.
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
