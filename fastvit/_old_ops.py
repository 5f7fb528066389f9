"""Old names of ops, for saved graphs and for scripts, with the arguments that they had.

Each old op warns, and calls an op of `fastvit.ops`. `abn_*` (activated batch norm) let x be recovered from
y, which abn_forward_ writes into x; `glu_*` have a gate. bn_forward, bn_reduce, bn_backward, act_forward and
act_backward are not here: each has a new order of arguments, so an old graph with one must be exported anew.
"""

from typing import Any, NamedTuple

import torch

from ._deprecation import warn_renamed
from ._library import increment_versions

_PARAMETERS = "Tensor? weight=None, Tensor? bias=None, "
_ACTIVATION = "str activation='leaky_relu', float activation_param=0.01, int channel_dim=1"
_STATISTICS = "Tensor? moments=None, " + _PARAMETERS
_UPDATES = (
    "Tensor(b!)? running_mean=None, Tensor(c!)? running_var=None, Tensor(d!)? num_batches_tracked=None, "
    "float? momentum=0.1, float eps=1e-05, "
)
_GATE = "str activation='silu', float activation_param=0.0"


class _Replacement(NamedTuple):
    op: str  # The op of `fastvit.ops` to call.
    constants: dict[str, bool] = {}  # Arguments that the old op did not have.
    argument_names: dict[str, str] = {}  # Old name to new name.
    results: tuple[int, ...] | None = None  # The old op's results, by index into the new op's; None for all.


_FORWARD = f"{_STATISTICS}{_UPDATES}{_ACTIVATION}, bool training=True"
_BACKWARD = f"Tensor dy, Tensor saved, Tensor? sums=None, {_PARAMETERS}{_ACTIVATION}, bool training=True"
_REDUCE = f"Tensor dy, Tensor saved, {_PARAMETERS}{_ACTIVATION}, Tensor? exchange=None"
_FROM_OUTPUT = {"from_output": True}
_BACKWARD_NAMES = {"y": "input", "sums": "global_sums"}
_GATE_NAMES = {"a": "x", "b": "gate"}
_REPLACEMENTS = {  # The replacements by the schemas of the old ops.
    f"abn_forward(Tensor x, {_FORWARD}) -> (Tensor, Tensor)": _Replacement(
        "bn_forward", constants={"invertible": True}
    ),
    f"abn_forward_(Tensor(a!) x, {_FORWARD}) -> Tensor": _Replacement("bn_forward_inplace"),
    f"abn_reduce(Tensor y, {_REDUCE}) -> Tensor": _Replacement("bn_reduce", _FROM_OUTPUT, _BACKWARD_NAMES),
    f"abn_backward(Tensor y, {_BACKWARD}) -> (Tensor, Tensor)": _Replacement(
        "bn_backward", _FROM_OUTPUT, _BACKWARD_NAMES, results=(0, 2)
    ),
    f"glu_forward(Tensor a, Tensor b, {_GATE}) -> Tensor": _Replacement(
        "act_forward", argument_names=_GATE_NAMES
    ),
    f"glu_backward(Tensor a, Tensor b, Tensor dy, {_GATE}) -> (Tensor, Tensor)": _Replacement(
        "act_backward", argument_names=_GATE_NAMES
    ),
}
NAMES = frozenset(schema.partition("(")[0] for schema in _REPLACEMENTS)
_definitions = torch.library.Library("fastvit", "FRAGMENT")  # The ops exist as long as this object.


def _define(schema: str, replacement: _Replacement) -> None:
    name = _definitions.define(schema).removeprefix("fastvit::")
    op = getattr(torch.ops.fastvit, replacement.op).default
    arguments = getattr(torch.ops.fastvit, name).default._schema.arguments
    defaults: dict[str, Any] = {argument.name: argument.default_value for argument in arguments}
    written = [argument.name for argument in arguments if argument.is_write]

    def call(*args, **kwargs):
        warn_renamed(f"the op {name}", replacement.op)
        named = defaults | dict(zip(defaults, args, strict=False)) | kwargs
        results = op(
            **{replacement.argument_names.get(n, n): value for n, value in named.items()},
            **replacement.constants,
        )
        # An op that writes x always does; running statistics are written in training only.
        increment_versions(*(named[n] for n in written if n == "x" or named["training"]))
        return results if replacement.results is None else tuple(results[i] for i in replacement.results)

    _definitions.impl(name, call, "CompositeImplicitAutograd")


def define_old_ops() -> None:
    for schema, replacement in _REPLACEMENTS.items():
        _define(schema, replacement)
