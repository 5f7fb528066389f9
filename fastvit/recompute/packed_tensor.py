"""A `PackedTensor` is what a scope's pack hook returns for a saved tensor. It is in one of four states:

Pending     holds the tensor, which the planner has not planned yet
Kept        holds the tensor until the backward
Replaced    holds a bit mask of the tensor, or what the hooks around the scope packed
Recomputed  holds the recipe that recomputes the tensor

A packed tensor holds its recipe, and a recipe holds its operands. All are freed when autograd's graph drops
the packed tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .environment import Environment
from .masks import BitMask
from .pins import FREED, OperandChanged, PinnedTensor
from .policy import OpSite
from .storage import copy_memory, current_stream_id, is_freed, record_current_stream
from .views import as_strided_in

MIN_RECOMPUTE_BYTES = 4096  # smaller tensors are kept: they are worth neither a recipe nor a mask


class AsStridedArgs(NamedTuple):
    """The arguments of torch.as_strided that make a view."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> AsStridedArgs:
        """Returns the size, strides and storage offset of `tensor`."""
        # The constructor of a named tuple is a function in Python, and takes longer than the three reads.
        return share_args(tuple.__new__(cls, (tensor.size(), tensor.stride(), tensor.storage_offset())))


_known_args: dict[AsStridedArgs, AsStridedArgs] = {}
_MAX_KNOWN_ARGS = 4096  # at this number all are dropped, because sizes may change at every step


def share_args(args: AsStridedArgs) -> AsStridedArgs:
    """Returns the same object for equal arguments, because the tensors of a model have few layouts.

    The garbage collector's time grows with the square of the number of objects that saved tensors have.
    """
    try:
        shared_args = _known_args.get(args)
    except TypeError:  # sizes that are symbols have no hash
        return args
    if shared_args is None:
        if len(_known_args) >= _MAX_KNOWN_ARGS:
            _known_args.clear()
        shared_args = _known_args[args] = args
    return shared_args


class Kept:
    """The tensor is held until the backward."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int):
        self.tensor, self.version = tensor, version

    def is_unwritten(self) -> bool:
        return self.tensor._version == self.version

    def unpack(self) -> Tensor:
        tensor = self.tensor
        if tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: [{tensor.type()} {list(tensor.shape)}] is at version "
                f"{tensor._version}; expected version {self.version} instead."
            )
        return tensor


class Pending(Kept):
    """The tensor is held, and the planner has not planned it yet."""

    __slots__ = ("base", "block", "is_half_precision", "producer")

    def __init__(self, tensor: Tensor, version: int, producer: Any, block: str, is_half_precision: bool):
        self.tensor, self.version = tensor, version
        self.producer = producer  # the node that made the tensor, or the base of a view
        self.block = block  # the block whose forward saved the tensor
        self.is_half_precision = is_half_precision  # the op ran in half precision, or under autocast
        self.base: AsStridedArgs | None = None  # where a view's base lies in its storage


class Replaced:
    """The tensor is dropped; `replacement` is a bit mask of it, or holds what the outer hooks packed."""

    __slots__ = ("as_strided_args", "replacement", "storage_nbytes")

    def __init__(self, replacement: OuterPackedTensor | BitMask, tensor: Tensor):
        self.replacement = replacement
        self.as_strided_args = AsStridedArgs.of_tensor(tensor)
        self.storage_nbytes = tensor.untyped_storage().nbytes()

    def unpack(self) -> Tensor:
        return self.replacement.unpack()


class Recomputed:
    """The tensor is dropped; a recipe recomputes the tensor, or the base of which it is a view."""

    __slots__ = ("as_strided_in_base", "recipe")

    def __init__(self, recipe: Any, as_strided_in_base: AsStridedArgs | None):
        self.recipe = recipe  # a Recipe; recipe.py imports this module
        self.as_strided_in_base = as_strided_in_base  # its offset counts from the base's first element

    def unpack(self) -> Tensor:
        return run_without_grad_or_autocast(self._recompute)

    def _recompute(self) -> Tensor:
        tensor = self.recipe.get_tensor()
        if self.as_strided_in_base is not None:
            tensor = as_strided_in(tensor, *self.as_strided_in_base)
        return tensor


class PackedTensor:
    """Holds a saved tensor, its recipe or what replaces it, by a state.

    Autograd packs thousands of tensors a step. Attributes of all are in slots. Attributes that few have
    are in a dictionary, which the first of these attributes creates. Their defaults are class attributes.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "environment",
        "holds_base",
        "info",
        "is_excluded",
        "is_recipe_operand",
        "pin",
        "reason",
        "source_address",
        "source_reference",
        "state",
    )

    bias: PinnedTensor | None = None  # the bias of a SyncBatchNorm that has saved the tensor
    pre_write_copy: Tensor | None = None  # a copy for recipes, made before a write to the tensor
    make_mask: Callable[[Tensor], BitMask | None] | None = None  # makes the mask, if a mask is enough
    mask_node: Any = None  # the node of the op that asks for the mask, until the plan
    mask_site: OpSite | None = None  # the site of the op that asks for the mask
    writes = 0  # number of untracked writes to the memory before the op
    stream = 0  # the stream of the op that saved the tensor
    is_overwritten = False  # a borrower of the memory wrote to it before the scope could copy it

    def __init__(self, state: Kept, reason: str = ""):
        self.state: Kept | Replaced | Recomputed = state
        self.reason = reason  # why the tensor is kept; `report` prints it
        self.info: Any = None  # the OutputInfo of the op output that the tensor is, or is a view of
        self.environment: Environment | None = None  # environment of the op that saved the tensor
        self.pin: PinnedTensor | None = None  # a small tensor as the op read it, for recipes
        self.is_recipe_operand = False
        self.is_excluded = False  # recipes may not read it: it was written to, or is a mask
        self.holds_base = False  # recipes may read all memory of the op output
        # The address of the program's tensor, of which the state holds a detached alias. The reference
        # reserves the address.
        self.source_address, self.source_reference = 0, None
        if state.tensor.is_cuda and (stream := current_stream_id(state.tensor)):
            self.stream = stream

    def unpack(self) -> Tensor:
        return self.state.unpack()

    def is_valid_operand(self) -> bool:
        """Returns whether a recipe may read the tensor."""
        state = self.state
        if self.pre_write_copy is not None or self.make_mask is not None or self.is_excluded:
            return False
        if isinstance(state, Kept):
            return state.is_unwritten()
        return isinstance(state, Replaced)

    def is_of(self, tensor: Tensor) -> bool:
        """Returns whether `tensor` is the program's tensor that the op saved."""
        return self.source_address == tensor._cdata

    def is_sharded_now(self) -> bool:
        """Returns whether FSDP has freed the tensor, a parameter or a view of one, for now."""
        state = self.state
        if not isinstance(state, Kept) or (
            state.tensor.grad_fn is None and type(state.tensor) is not Parameter
        ):
            return False
        return is_freed(state.tensor)

    def size(self) -> tuple[int, ...]:
        state = self.state
        if isinstance(state, Kept):
            return state.tensor.shape
        if isinstance(state, Replaced):
            return state.as_strided_args.size
        args = state.as_strided_in_base or state.recipe.info.as_strided_args
        assert args is not None
        return args.size

    def held_tensor(self) -> Tensor | None:
        """Returns the tensor whose memory recipes read, if it is held; None if it is recomputed."""
        return getattr(self.state, "tensor", None)

    @property
    def nbytes(self) -> int:
        state = self.state
        if isinstance(state, Kept):
            return state.tensor.numel() * state.tensor.element_size()
        return state.storage_nbytes if isinstance(state, Replaced) else state.recipe.nbytes

    def get_tensor(self) -> Tensor:
        """Returns the tensor as it was saved, for a recipe.

        Raises:
            OperandChanged: the tensor was written to, or its memory is freed.
        """
        if self.pre_write_copy is not None:
            return self.pre_write_copy
        state = self.state
        if isinstance(state, Kept):
            if self.is_overwritten:
                raise OperandChanged(state.tensor, "has been written to by NumPy, DLPack or its storage")
            if not state.is_unwritten():
                raise OperandChanged.by_version(state.tensor, state.version)
        if isinstance(state, Replaced) and isinstance(state.replacement, OuterPackedTensor):
            tensor = state.replacement.unpack_in_layout()
        else:
            tensor = state.unpack()
        if is_freed(tensor):
            raise OperandChanged(tensor, FREED)
        if current_stream_id(tensor) != self.stream:
            is_mask = isinstance(state, Replaced) and isinstance(state.replacement, BitMask)
            record_current_stream(state.replacement.packed if is_mask else tensor)  # type: ignore[union-attr]
        return tensor

    def save_pre_write_copy(self) -> None:
        """Copies the memory before a write to it, for the recipes that read it."""
        if self.pre_write_copy is None and isinstance(self.state, Kept) and self.state.is_unwritten():
            self.pre_write_copy = copy_memory(self.state.tensor)

    def find_dropped_memory(self) -> tuple[torch.dtype, AsStridedArgs] | None:
        """Returns dtype and place in the storage of a tensor that is dropped; None if the tensor is held."""
        state, info = self.state, self.info
        if isinstance(state, Replaced) and isinstance(state.replacement, BitMask):
            return state.replacement.dtype, state.as_strided_args
        if isinstance(state, Recomputed) and info is not None and info.as_strided_args is not None:
            base, view = info.as_strided_args, state.as_strided_in_base
            assert state.recipe.dtype is not None
            if view is not None:
                base = view._replace(storage_offset=view.storage_offset + base.storage_offset)
            return state.recipe.dtype, base
        return None

    def keep(self, tensor: Tensor) -> None:
        """Keeps `tensor`, which has the memory that autograd would have kept, and that was written to."""
        self.state, self.is_excluded = Kept(tensor, tensor._version), True

    def replace_tensor(self, replacement: OuterPackedTensor | BitMask) -> None:
        assert isinstance(self.state, Kept)
        self.state = Replaced(replacement, self.state.tensor)

    def pack_by_outer_hooks(self, pack_hook: Callable, unpack_hook: Callable) -> None:
        assert isinstance(self.state, Kept)
        self.replace_tensor(OuterPackedTensor(self.state.tensor, pack_hook, unpack_hook))

    def is_maskable(self) -> bool:
        """Returns whether a bit mask may replace the tensor: only the op that asks for the mask reads it."""
        state = self.state
        if (
            self.is_recipe_operand
            or not isinstance(state, Kept)
            or not state.is_unwritten()
            or self.is_excluded
        ):
            return False
        if self.info is not None and any(one is not self for one in self.info.packed_tensors):
            return False
        tensor = state.tensor
        return tensor.nbytes >= MIN_RECOMPUTE_BYTES and not (tensor.is_leaf and tensor.requires_grad)


class PackedShape:
    """Packs only size, strides, dtype and device of an input whose backward reads nothing else."""

    __slots__ = ("__weakref__", "device", "dtype", "size", "stride")

    def __init__(self, tensor: Tensor):
        self.size, self.stride = tensor.size(), tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device

    def unpack(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class OuterPackedTensor:
    """A tensor that the saved-tensor hooks around the scope packed, such as those of save_on_cpu."""

    __slots__ = ("packed", "size", "stride", "tensor", "unpack_hook")

    def __init__(self, tensor: Tensor, pack_hook: Callable, unpack_hook: Callable):
        self.size, self.stride = tensor.size(), tensor.stride()
        self.packed = pack_hook(tensor)
        self.unpack_hook = unpack_hook
        self.tensor: Tensor | None = None

    def unpack(self) -> Tensor:
        """Returns the result of the outer unpack hook. The hook may free its input, so it is called once."""
        if self.tensor is None:
            self.tensor, self.packed = self.unpack_hook(self.packed), None
        return self.tensor

    def unpack_in_layout(self) -> Tensor:
        """Returns the tensor in the layout in which the op read it, for a recipe."""
        tensor = self.unpack()
        if tensor.stride() == self.stride:
            return tensor
        options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        return torch.empty_strided(self.size, self.stride, **options).copy_(tensor)


def unpack_hook(packed: PackedTensor | PackedShape) -> Tensor:
    with torch._C.DisableTorchFunction():  # autograd itself calls no modes and subclasses
        return packed.unpack()


def run_without_grad_or_autocast(function: Callable[[], Tensor]) -> Tensor:
    """Runs `function` without grad mode and autocast, even if the backward runs in them."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return run_without_grad_or_autocast(function)
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():
            return function()
    return function()
