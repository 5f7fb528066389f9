"""apex's DistributedDataParallel and Reducer: gradients are reduced as flat tensors.

Any graph is reduced in the same way: several forwards before a backward, unused or frozen parameters,
reentrant checkpoints. Nothing overlaps with backward; torch's own DistributedDataParallel does that.
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
from .._notices import warn_once

ReduceOp = dist.ReduceOp

_WITHOUT_EFFECT = {
    "shared_param": None,
    "allreduce_trigger_params": None,
    "retain_allreduce_buffers": False,
    "num_allreduce_streams": 1,
    "allreduce_communicators": None,
    "gradient_average_split_factor": None,
    "prof": False,
}
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # in torch's DistributedDataParallel or this one


class DistributedDataParallel(nn.Module):
    """Averages the gradients over the ranks at the end of each backward that reaches a parameter.

    At construction parameters and buffers of rank 0 are broadcast. Buffers are not broadcast later, so a
    BatchNorm that is not synchronised has different statistics on each rank, as in apex.

    Every `.grad` that any rank has is reduced; a rank without it takes part with zeros. Parameters may be
    frozen and thawed at any time. New ones are broadcast in the next forward.

    Args:
        module: on its device, after `amp.initialize`.
        message_size, delay_allreduce: without effect, since there is one reduction after all gradients.
        allreduce_always_fp32: reduce half gradients in float32.
        gradient_average: divide the sum of gradients by the number of ranks. Without it gradients that were
            summed before, and are still there, are summed again, as in apex.
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
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True  # its name in torch, which amp reads
        self.allreduce_always_fp32 = allreduce_always_fp32
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = gradient_predivide_factor
        vars(self).update(_WITHOUT_EFFECT | without_effect)
        self.message_size, self.delay_allreduce = message_size, delay_allreduce
        self.world_size = float(dist.get_world_size())
        self._known = list(module.parameters())
        self._hooked: set[nn.Parameter] = set()
        self._tasks: set[int] = set()  # backwards at whose end gradients are reduced
        _broadcast([*module.parameters(), *module.buffers()])
        self._know()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            missing_attribute_getter("apex.parallel.DistributedDataParallel")(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._know()
        return self.module(*args, **kwargs)

    def disable_allreduce(self) -> None:
        """Backwards leave gradients local until `enable_allreduce`, as within `no_sync`."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        self.require_backward_grad_sync = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave gradients local; the next one outside reduces their sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __getstate__(self) -> dict[str, Any]:  # copies have parameters without hooks
        return super().__getstate__() | {"_hooked": set(), "_tasks": set()}

    def _know(self) -> None:
        """Broadcasts parameters that are new, and hooks those that are trained now."""
        _models.add(self)  # a copy too
        parameters, known = list(self.module.parameters()), set(self._known)
        _broadcast([p for p in parameters if p not in known])
        self._known = parameters
        if torch._C._current_autograd_node() is None:  # what an interrupted backward left
            self._tasks.clear()
        hook = functools.partial(self._begin, weakref.ref(self))
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooked:
                parameter.register_post_accumulate_grad_hook(hook)
                self._hooked.add(parameter)

    @staticmethod
    def _begin(model: weakref.ref[DistributedDataParallel], _parameter: Tensor) -> None:
        """The hook of parameters, which does not keep the model alive."""
        self, task = model(), torch._C._current_graph_task_id()
        if self is not None and self.require_backward_grad_sync and task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))

    def _end(self, task: int) -> None:
        self._tasks.discard(task)
        if self._tasks:  # a reentrant checkpoint inside a backward whose end comes
            return
        if not self.gradient_average and torch._C._current_autograd_node() is not None:
            raise RuntimeError(
                "DistributedDataParallel: gradient_average=False needs checkpoint(..., use_reentrant=False)"
            )
        before = 1.0 / self.gradient_predivide_factor
        after = 1.0 / before / self.world_size if self.gradient_average else 1.0
        reduce_gradients(self._known, before, after, self.allreduce_always_fp32)


def _record(module: nn.Module, _name: str, _child: nn.Module | None) -> None:
    if isinstance(module, (DistributedDataParallel, nn.parallel.DistributedDataParallel)):
        _models.add(module)


register_module_module_registration_hook(_record)  # called when a module is made an attribute of another


def without_sync() -> set[Tensor]:
    """The parameters of DDP models in `no_sync`, whose gradients are not reduced yet."""
    local = [model for model in _models if not getattr(model, "require_backward_grad_sync", True)]
    return {parameter for model in local for parameter in model.parameters()}


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
            _broadcast([*self.module.parameters(), *self.module.buffers()])

    def reduce(self) -> None:
        """Averages every `.grad` of the module that any rank has, or the gradients that were given."""
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
        else:
            reduce_gradients(list(self.module.parameters()), 1.0, 1.0 / dist.get_world_size())


def _broadcast(tensors: Sequence[Tensor]) -> None:
    """Gives all ranks the tensors of rank 0.

    Raises:
        RuntimeError: on every rank, when their numbers, shapes or dtypes differ.
    """
    if not tensors:
        return
    own = zlib.crc32(repr([(t.shape, t.dtype) for t in tensors]).encode())
    bounds = torch.tensor([own, -own], device=tensors[0].device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    largest, smallest = bounds.tolist()
    if largest != -smallest:
        raise RuntimeError(
            "apex.parallel: the ranks have modules of different parameters or buffers; build the same on each"
        )
    flat_dist_call([t.detach() for t in tensors], dist.broadcast, (0,))


@torch.no_grad()
def reduce_gradients(
    parameters: Sequence[Tensor], before: float, after: float, in_float32: bool = False
) -> None:
    """Multiplies every `.grad` by `before`, sums it over the ranks and multiplies by `after`, in place.

    Ranks agree on the gradients first. A rank that lacks one gets it, and takes part with zeros.
    """
    if not parameters:
        return
    kinds = [0 if p.grad is None else 2 if p.grad.is_sparse else 1 for p in parameters]
    agreed = torch.tensor(kinds, dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    dense = []
    for parameter, kind in zip(parameters, agreed.tolist(), strict=True):
        if not kind:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if kind == 2:
            gradient = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce().mul_(before)
            dist.all_reduce(gradient)
            gradient.mul_(after)
        else:
            dense.append(gradient)
        parameter.grad = gradient

    def scaled_sum(flat: Tensor) -> None:
        wide = flat.float() if in_float32 and flat.dtype != torch.float64 else flat
        dist.all_reduce(wide.mul_(before))
        flat.copy_(wide.mul_(after))

    flat_dist_call(dense, scaled_sum)


@torch.no_grad()
def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """One collective for each dtype and device instead of one for each tensor; changes the tensors in place.

    Args:
        call: a collective such as `torch.distributed.broadcast`, in place; sums of `all_reduce` become means.
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
