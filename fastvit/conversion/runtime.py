"""The forwards of converted modules.

A proof holds for the forward that was traced. A converted layer runs as converted only inside the forward of
the traced module (`ConvertedRoot`), called as it was traced, with the same modules, without hooks that would
see other tensors, on plain tensors that the ops take, and not under a compiler or exporter. Everywhere else
it runs as the original layer. A layer that has applied the activation marks its output. The activation module
returns a marked tensor unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils import _pytree as pytree

from .. import _library
from .._norm import next_layer_number
from ..batch_norm_act import BatchNormAct, BatchNormActSync
from ..recompute import Policy, policy_scope
from ..sync_batchnorm import SyncBatchNorm
from . import prove
from .adopted import Adopted, Converted, References, adopt, class_of, conversions, release
from .calls import Arguments, Signature, same_value
from .deferred import Deferred
from .watch import Watch, watched_globally

_MARK = "_fastvit_activated"
_running = threading.local()


@dataclass
class _Frame:
    """A traced forward that runs in this thread."""

    token: str
    void: frozenset[str]  # keys of layers that must run as the original in this call


def _frames() -> list[_Frame]:
    if not hasattr(_running, "frames"):
        _running.frames = []
    return _running.frames


def _traced() -> bool:
    """Whether a compiler or exporter records this call, which then must consist of plain ops.

    Code that runs eagerly inside a compiled call counts too: a graph break may separate a layer from its
    activation.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or get_eval_frame_callback() is not None


@contextlib.contextmanager
def _frame(frame: _Frame) -> Iterator[None]:
    frames = _frames()
    frames.append(frame)
    try:
        yield
    finally:
        frames.pop()


@dataclass
class Proven:
    """The proof of one layer: its key, the values of `training` it holds for, the modules without hooks."""

    key: str
    modes: frozenset[bool]
    unhooked: References

    def is_void(self, training: bool) -> bool:
        hooked = any(module is None or prove.hooked(module) for module in self.unhooked)
        return hooked or training not in self.modes


class Proof:
    """The conditions under which a module was traced, checked at each call.

    Args:
        layers: the layers proven in its forward.
        constants: the arguments that the trace took as constants.
        example: the exported call, where the graph holds for its shapes only.
        policy: of the scope that the forward opens; None for no scope.
    """

    def __init__(
        self,
        token: str,
        root: nn.Module,
        layers: list[Proven],
        constants: Mapping[str, object],
        example: Arguments | None,
        policy: Policy | None,
    ):
        self.token = token
        self.policy = policy
        self.layers = layers
        self.watch: Watch | None = None
        self._warned = False
        self.signature = Signature(type(root).forward)
        self.constants = dict(constants)
        self.example = example and _shapes(self.signature.bind(*example))

    def begin(self, root: nn.Module) -> None:
        """Records the state of `root`. Called when its conversion or its copy is complete."""
        if self.watch is not None:
            self.watch.record()
        elif self.layers:
            self.watch = Watch(root)

    @contextlib.contextmanager
    def call(self, root: nn.Module, args: tuple, kwargs: dict[str, object]) -> Iterator[None]:
        """Around a forward of `root`: checks the call, and lets its layers run as converted."""
        seen = not self.layers or watched_globally()
        changed = None if seen else self.watch.changed()
        before = None if changed is None else self.watch.differing()
        if changed is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"fastvit.convert: {changed} since {type(root).__name__} was converted, so its layers run as "
                "the original ones and reduce no memory; convert the model again",
                stacklevel=6,
            )
        if seen or changed or self._is_another_call(args, kwargs) or self.watch.in_mixed_modes(root.training):
            void = frozenset(layer.key for layer in self.layers)
        else:
            void = frozenset(layer.key for layer in self.layers if layer.is_void(root.training))
        try:
            with _frame(_Frame(self.token, void)), self._scope():
                yield
        finally:
            if not seen:
                self.watch.accept(before)

    def _scope(self) -> contextlib.AbstractContextManager:
        return policy_scope(self.policy) if self.policy is not None else contextlib.nullcontext()

    def _is_another_call(self, args: tuple, kwargs: dict[str, object]) -> bool:
        given = self.signature.bind(args, kwargs)
        if self.example is not None and not same_value(_shapes(given), self.example):
            return True
        return any(
            # The trace had a proxy for this argument, and a proxy is never None.
            value is None if name not in self.constants else not same_value(value, self.constants[name])
            for name, value in given.items()
        )


def _shapes(given: dict[str, object]) -> object:
    """The arguments with shapes and dtypes in place of tensors, as an export depends on them."""
    return pytree.tree_map_only(Tensor, lambda t: (t.shape, str(t.dtype)), given)


class ForwardWrapper(Converted):
    """Runs the original forward inside `_run`. The original may have been patched after the conversion."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if not issubclass(cls.__dict__.get("_mixin", object), ForwardWrapper):
            return  # a subclass by amp or by other code, with its own forward

        @functools.wraps(cls._original.forward)  # tools read the names of a forward's arguments
        def forward(self, *args, **kwargs):
            original = cls._original.forward
            if _traced():
                return original(self, *args, **kwargs)
            return self._run(original, args, kwargs)

        cls.forward = forward


class ConvertedRoot(ForwardWrapper):
    """A module whose forward was traced. Checks the proof, and opens the recompute scope."""

    def _run(self, original, args, kwargs):
        proof = self.__dict__.get("_proof")
        if proof is None:
            return original(self, *args, **kwargs)
        with proof.call(self, args, kwargs):
            return original(self, *args, **kwargs)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if "_proof" in self.__dict__:
            self._proof.begin(self)


class _ConvertedNorm(Converted):
    """A BatchNorm that applies the activation after it, where that is proven."""

    @staticmethod
    def name_for(original: type) -> str:
        return "BatchNormAct"

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        if z is not None:  # a fastvit.SyncBatchNorm's residual
            return self._with_residual(input, z)
        if _traced() or not self._may_run(input):
            return self._plain.forward(self, input)
        check = getattr(self._plain, "_check_input_dim", None)
        if check is not None:
            check(self, input)
        if self._adds:
            return Deferred(self, input)
        # By name, since a fastvit.SyncBatchNorm comes first in the method resolution order.
        y = BatchNormAct.forward(self, input)
        if self._absorbs:
            setattr(y, _MARK, self._key)
        return y

    @property
    def _converted(self) -> type[Adopted]:
        """The class of the conversion; a layer that is the whole model has others on top."""
        return class_of(self, _ConvertedNorm)

    @property
    def _plain(self) -> type:
        return self._converted._original

    def extra_repr(self) -> str:
        return BatchNormAct.extra_repr(self)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if self._inside:
            self._inside.record()

    @contextlib.contextmanager
    def _as_original(self) -> Iterator[None]:
        """Reverts the layer while convert_syncbn_model makes another layer of it."""
        released = [(mixin, release(self, mixin)) for mixin in conversions(self)]
        yield
        for mixin, attributes in reversed(released):
            if issubclass(mixin, _ConvertedNorm):
                adopt_norm(self, **{name: attributes[name] for name in attributes["_proven"]})
            else:
                adopt(self, mixin, **attributes)

    def _with_residual(self, x: Tensor, z: Tensor) -> Tensor:
        alone = not self._absorbs and self.memory == "recompute"
        if _traced() or not alone or type(z) is not Tensor or not self._may_run(x):
            return self._plain.forward(self, x, z)
        return BatchNormAct.forward(self, x, z)

    def _may_run(self, x: Tensor) -> bool:
        if type(x) is not Tensor or not (x.device.type == "cpu" or (x.is_cuda and _library.HAS_CUDA)):
            return False
        if not x.is_floating_point() or _under_functorch():
            return False
        if self._through_views and torch.is_inference_mode_enabled():
            return False  # views have no _base there, by which the mark is found
        if self._reshaped and not x.is_contiguous():
            return False  # the reshape would copy the output, and a copy has no mark
        if self._plain.forward is not self._converted._fastvit_forward:
            return False  # the class was patched
        if getattr(self, "fuse_relu", False) != self._fused_relu:
            return False
        if self._inside and (self._inside.changed() or any(map(prove.hooked, self._modules.values()))):
            return False
        if not self._tokens:
            self._ran = True
            return True
        if torch._C._current_graph_task_id() != -1 and not _frames():
            # A checkpointed forward runs again in backward, and must repeat the first run.
            return self.__dict__.get("_ran", False)
        self._ran = any(frame.token in self._tokens and self._key not in frame.void for frame in _frames())
        return self._ran


class ConvertedNorm(_ConvertedNorm, BatchNormAct):
    pass


class ConvertedNormSync(_ConvertedNorm, BatchNormActSync):
    pass


def adopt_norm(module: nn.Module, **proven: object) -> None:
    """Converts a layer, with `proven` as attributes and those that follow from the layer's class."""
    synchronised = isinstance(module, (nn.SyncBatchNorm, SyncBatchNorm))
    # BatchNormAct reads these; mapillary's ABN or torch's SyncBatchNorm lack some.
    read: dict[str, object] = {"track_running_stats": True, "num_batches_tracked": None}
    if synchronised:
        read["layer_number"] = next_layer_number()
    adopt(
        module,
        ConvertedNormSync if synchronised else ConvertedNorm,
        channel_last=getattr(module, "channel_last", False),
        _ran=False,
        _inside=Watch(module) if len(module._modules) else None,
        _fused_relu=getattr(module, "fuse_relu", False),
        _proven=tuple(proven),
        **proven,
        **{name: value for name, value in read.items() if not hasattr(module, name)},
    )


class AbsorbedActivation(Converted):
    """An activation module that returns inputs unchanged where a BatchNorm has applied the activation."""

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is Deferred:
            return self._of_deferred(input)
        if not _traced() and _take_mark(input, self._keys):
            return input
        return self._original.forward(self, input)

    def _of_deferred(self, total: Deferred) -> Tensor:
        y = total.activated() if total.layer._key in self._keys else None
        return self._original.forward(self, total.computed()) if y is None else y

    def extra_repr(self) -> str:
        return ", ".join(filter(None, [self._original.extra_repr(self), f"in {', '.join(self._in)}"]))


def _take_mark(x: Tensor, keys: frozenset[str]) -> bool:
    """Whether a layer of `keys` has activated x or the base of x. Removes the mark."""
    for tensor in (x, x._base):
        if tensor is not None and getattr(tensor, _MARK, None) in keys:
            delattr(tensor, _MARK)
            return True
    return False


def _under_functorch() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None
