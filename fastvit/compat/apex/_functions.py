"""apex's form of a function that autograd differentiates."""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor


def as_function(function: Callable[..., Tensor]) -> type:
    """A class with `apply(...)`, which torch differentiates, and with `forward(ctx, ...)` and `backward`,
    which scripts look at and wrap.
    """

    def forward(ctx: Any, *arguments: Any) -> Tensor:
        return function(*arguments)

    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(
            "fastvit's functions have no backward of their own; use backward of the output"
        )

    ctx, signature = inspect.signature(forward).parameters["ctx"], inspect.signature(function)
    forward.__signature__ = signature.replace(parameters=[ctx, *signature.parameters.values()])  # type: ignore[attr-defined]
    parts = {"apply": function, "forward": forward, "backward": backward}
    return type("Function", (), {name: staticmethod(part) for name, part in parts.items()})
