"""Old names of ops, for saved graphs and for scripts, with the arguments that they had.

Each warns, and calls an op of `fastvit.ops`. A saved graph with an op whose name stayed, but whose arguments
have another order (bn_forward, bn_reduce, bn_backward, act_forward, act_backward), must be exported anew.
"""

import warnings
from typing import Any, NamedTuple

import torch

from ._library import bump_versions

_PARAMETERS = "Tensor? weight=None, Tensor? bias=None, "
_ACTIVATION = "str activation='leaky_relu', float activation_param=0.01, int channel_dim=1"
_STATISTICS = "Tensor? moments=None, " + _PARAMETERS
_UPDATES = (
    "Tensor(b!)? running_mean=None, Tensor(c!)? running_var=None, Tensor(d!)? num_batches_tracked=None, "
    "float? momentum=0.1, float eps=1e-05, "
)
_GATE = "str activation='silu', float activation_param=0.0"


class _Renamed(NamedTuple):
    op: str  # of today
    constants: dict[str, bool]  # arguments that the old op did not have
    names: dict[str, str]  # of arguments, old to new
    results: tuple[int, ...] | None = None  # which of the op's results, where not all


_FORWARD = f"{_STATISTICS}{_UPDATES}{_ACTIVATION}, bool training=True"
_BACKWARD = f"Tensor dy, Tensor saved, Tensor? sums=None, {_PARAMETERS}{_ACTIVATION}, bool training=True"
_REDUCE = f"Tensor dy, Tensor saved, {_PARAMETERS}{_ACTIVATION}, Tensor? exchange=None"
_FROM_OUTPUT, _GRADIENT_NAMES = {"from_output": True}, {"y": "input", "sums": "global_sums"}
_GATE_NAMES = {"a": "x", "b": "gate"}
_SCHEMAS = {
    f"abn_forward(Tensor x, {_FORWARD}) -> (Tensor, Tensor)": _Renamed(
        "bn_forward", {"invertible": True}, {}
    ),
    f"abn_forward_(Tensor(a!) x, {_FORWARD}) -> Tensor": _Renamed("bn_forward_inplace", {}, {}),
    f"abn_reduce(Tensor y, {_REDUCE}) -> Tensor": _Renamed("bn_reduce", _FROM_OUTPUT, _GRADIENT_NAMES),
    f"abn_backward(Tensor y, {_BACKWARD}) -> (Tensor, Tensor)": _Renamed(
        "bn_backward", _FROM_OUTPUT, _GRADIENT_NAMES, results=(0, 2)
    ),
    f"glu_forward(Tensor a, Tensor b, {_GATE}) -> Tensor": _Renamed("act_forward", {}, _GATE_NAMES),
    f"glu_backward(Tensor a, Tensor b, Tensor dy, {_GATE}) -> (Tensor, Tensor)": _Renamed(
        "act_backward", {}, _GATE_NAMES
    ),
}
NAMES = frozenset(schema.partition("(")[0] for schema in _SCHEMAS)
_definitions = torch.library.Library("fastvit", "FRAGMENT")  # undoes them when it is freed


def _define(schema: str, renamed: _Renamed) -> None:
    name = _definitions.define(schema).removeprefix("fastvit::")
    op = getattr(torch.ops.fastvit, renamed.op).default
    arguments = getattr(torch.ops.fastvit, name).default._schema.arguments
    defaults: dict[str, Any] = {argument.name: argument.default_value for argument in arguments}
    written = [argument.name for argument in arguments if argument.is_write]

    def call(*args, **kwargs):
        message = f"fastvit: the op {name} is {renamed.op} now; the old name is gone in the next release"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        named = defaults | dict(zip(defaults, args, strict=False)) | kwargs
        results = op(**{renamed.names.get(n, n): value for n, value in named.items()}, **renamed.constants)
        bump_versions(*(named[n] for n in written if n == "x" or named["training"]))
        return results if renamed.results is None else tuple(results[at] for at in renamed.results)

    _definitions.impl(name, call, "CompositeImplicitAutograd")


def define_old_ops() -> None:
    for schema, renamed in _SCHEMAS.items():
        _define(schema, renamed)
