"""Ops by the names and arguments that they had in 0.1, for saved graphs and for scripts; until 0.3.

Each warns, and calls an op of `fastvit.ops`.
"""

import warnings
from typing import NamedTuple

import torch

_PARAMETERS = "Tensor? weight=None, Tensor? bias=None, "
_ACTIVATION = "str activation='leaky_relu', float activation_param=0.01, int channel_dim=1"
_STATISTICS = "Tensor? moments=None, " + _PARAMETERS
_UPDATES = (
    "Tensor(b!)? running_mean=None, Tensor(c!)? running_var=None, Tensor(d!)? num_batches_tracked=None, "
    "float? momentum=0.1, float eps=1e-05, "
)
_GATE = "str activation='silu', float activation_param=0.0"


class _New(NamedTuple):
    op: str
    given: dict[str, bool]  # arguments that the old op did not have
    names: dict[str, str]  # old to new
    results: tuple[int, ...] | None = None  # which of the new op's results, where not all


_TRAINING = ", bool training=True"
_OLD: dict[str, _New] = {
    f"abn_forward(Tensor x, {_STATISTICS}{_UPDATES}{_ACTIVATION}{_TRAINING}) -> (Tensor, Tensor)": _New(
        "bn_forward", {"invertible": True}, {}
    ),
    f"abn_forward_(Tensor(a!) x, {_STATISTICS}{_UPDATES}{_ACTIVATION}{_TRAINING}) -> Tensor": _New(
        "bn_forward_inplace", {}, {}
    ),
    f"abn_reduce(Tensor y, Tensor dy, Tensor saved, {_PARAMETERS}{_ACTIVATION}, Tensor? exchange=None) "
    "-> Tensor": _New("bn_reduce", {"from_output": True}, {"y": "input"}),
    f"abn_backward(Tensor y, Tensor dy, Tensor saved, Tensor? sums=None, {_PARAMETERS}{_ACTIVATION}{_TRAINING})"
    " -> (Tensor, Tensor)": _New(
        "bn_backward", {"from_output": True}, {"y": "input", "sums": "global_sums"}, (0, 2)
    ),
    f"glu_forward(Tensor a, Tensor b, {_GATE}) -> Tensor": _New("act_forward", {}, {"a": "x", "b": "gate"}),
    f"glu_backward(Tensor a, Tensor b, Tensor dy, {_GATE}) -> (Tensor, Tensor)": _New(
        "act_backward", {}, {"a": "x", "b": "gate"}
    ),
}
NAMES = frozenset(schema.partition("(")[0] for schema in _OLD)
_library = torch.library.Library("fastvit", "FRAGMENT")  # undoes its definitions when it is freed


def _define(schema: str, new: _New) -> None:
    name = _library.define(schema).removeprefix("fastvit::")
    op = getattr(torch.ops.fastvit, new.op).default
    arguments = getattr(torch.ops.fastvit, name).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}

    def call(*args, **kwargs):
        message = f"fastvit: the op {name} is {new.op} since 0.2, and goes with 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        named = defaults | dict(zip(defaults, args, strict=False)) | kwargs
        renamed = {new.names.get(argument, argument): value for argument, value in named.items()}
        results = op(**renamed, **new.given)
        return results if new.results is None else tuple(results[at] for at in new.results)

    _library.impl(name, call, "CompositeImplicitAutograd")


def define_old_ops() -> None:
    for schema, new in _OLD.items():
        _define(schema, new)
