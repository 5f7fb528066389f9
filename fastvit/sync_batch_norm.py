"""SyncBatchNorm: batch normalisation over a process group."""

from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor

from . import _checks, _norm_base

__all__ = ["BatchNorm", "SyncBatchNorm", "create_syncbn_process_group"]


class SyncBatchNorm(_norm_base.ProcessGroupMixin):
    """BatchNorm with statistics over a process group, on CPU and CUDA.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in torch.nn.BatchNorm2d; momentum=None averages
            cumulatively, without reading a number back to the host.
        process_group: the ranks that share statistics, the 6th argument, as in torch and apex; None is the
            default group, or this process alone when torch.distributed is not initialised.
        channel_last: C is the last dimension, (N, *, C), as in apex and for tokens (N, L, C). Tensors in
            torch's channels_last memory format need no flag.
        fuse_relu: apply ReLU after the normalisation, and after `z` is added.
        bias: False for no bias, as in torch.nn.SyncBatchNorm.

    `forward(input, z=None)`: input (N, C, *), 2 to 5 dimensions, any floating-point dtype; z a residual of
    the same shape that is added before the ReLU. Returns a new tensor. The state_dict is BatchNorm's.

    Evaluation exchanges nothing. In training with several ranks there is one exchange in each direction:
    through shared or peer memory where all ranks are CPU processes of one host or have a GPU of one host
    each, else by collectives: one all_to_all on CPUs, on GPUs one all_gather forward and one all_reduce
    backward. FASTVIT_STATISTICS=collective always uses collectives, and `peer` raises where they would be
    needed. The logger fastvit.sync names the choice of a group at level DEBUG. Every rank of the group must
    run the same layers in the same order, so DDP's Join needs throw_on_early_termination=True.

    Uneven and empty ranks are exact. Gradients of weight and bias are this rank's own, which DDP averages.
    Not differentiable twice. Copies share the group; pickles have None in its place, since a group is valid
    in its process only.

    Raises:
        ValueError: a wrong rank or channel count, a group without this rank, or one value per channel in
            training where the sizes are known.
        RuntimeError: on every rank, when ranks differ in channels, dtype, momentum or order of their layers,
            or when one died or did not arrive within the group's timeout. Nothing is written then. On GPUs
            the error is raised by the next call, in evaluation too, or by `fastvit.sync.check()`; until then
            outputs are NaN, and running statistics do not change.
    """

    repr_options = ("channel_last", "fuse_relu")
    functional_name = "sync_batch_norm"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: "dist.ProcessGroup | None" = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        batch_norm_args = num_features, eps, momentum, affine, track_running_stats
        super().__init__(*batch_norm_args, process_group=process_group, bias=bias, device=device, dtype=dtype)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        return self._forward_batch_norm(input, z, activation="relu" if self.fuse_relu else "identity")


class BatchNorm(_norm_base.BatchNormBase):
    """BatchNorm for 2 to 5 dimensions. `revert_syncbn_model` changes a SyncBatchNorm to it."""

    def _check_input_dim(self, input: Tensor) -> None:
        _checks.check_dimensions("BatchNorm", input)


def create_syncbn_process_group(group_size: int) -> "dist.ProcessGroup | None":
    """Splits the ranks into groups of `group_size` neighbours and returns this rank's group.

    A size of 0 returns None, the default group. Every rank must call this function, because every rank takes
    part in the creation of every group.

    Raises:
        ValueError: group_size is no int, is negative, or does not divide the number of ranks.
    """
    if isinstance(group_size, bool) or not isinstance(group_size, Integral) or group_size < 0:
        raise ValueError(
            f"create_syncbn_process_group: group_size is {group_size!r}; an int of at least 0 expected"
        )
    if group_size == 0:
        return None
    return dist.new_subgroups(group_size)[0]
