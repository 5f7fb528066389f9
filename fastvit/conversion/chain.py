"""What follows a BatchNorm in a trace, up to its activation."""

from __future__ import annotations

from torch import fx, nn

from . import activations, residuals
from .activations import Activation
from .prove import describe
from .tracing import Trace, is_permutation, is_reshape
from .watch import runs_as


class Chain:
    """From a BatchNorm's output to the one activation that reads it.

    Through views and Identity modules, or through Identity modules and the addition of a residual.
    """

    def __init__(self, trace: Trace, start: fx.Node):
        self.trace = trace
        self.values = [start]  # the output and its views, and the sum
        self.activation: Activation | None = None
        self.reader: fx.Node | None = None  # of the last value, where it is the only one
        self.reshaped = False
        self.addition: fx.Node | None = None  # in between, of a residual
        self.residual: fx.Node | None = None
        self.against: str | None = None
        self._follow()
        if self.residual is not None:
            self._check_addition()

    def _follow(self) -> None:
        permuted = False
        while True:
            value = self.values[-1]
            readers = self.trace.readers(value)
            if len(readers) != 1:
                names = ", ".join(sorted({describe(self.trace, reader) for reader in readers}))
                self.against = f"its output is read by {names}" if readers else "its output is not read"
                return
            self.reader = reader = readers[0]
            module = self.trace.module(reader)
            if self.residual is None and (residual := residuals.added_to(reader, value)) is not None:
                self.addition, self.residual = reader, residual
                self.values.append(reader)
                continue
            if reader.args[:1] != (value,) or reader.all_input_nodes.count(value) != 1:
                self.against = f"its output is read by {describe(self.trace, reader)}"
                return
            if runs_as(module) is nn.Identity:
                self.values.append(reader)
                continue
            if is_permutation(reader) or (is_reshape(reader, module) and not permuted):
                # after a permutation a reshape may copy, and a copy no longer says who made it
                permuted = permuted or is_permutation(reader)
                self.reshaped = self.reshaped or not is_permutation(reader)
                self.values.append(reader)
                continue
            self.activation = (
                activations.of_module(module)
                if module is not None
                else activations.of_function(reader.target, reader.args, reader.kwargs)
            )
            if self.activation is None:
                self.against = f"its output is read by {describe(self.trace, reader)}"
            return

    def _check_addition(self) -> None:
        """Ends at the addition, unless the layer can do it and the activation that follows."""
        against = "no activation module follows"
        if self.module is not None:
            against = residuals.against_adding(
                self.trace, self.values, self.addition, self.residual, self.reader
            )
        if against is not None:
            self.against = f"its output is read by {describe(self.trace, self.addition)}; {against}"
            self.values = self.values[: self.values.index(self.addition)]
            self.activation, self.reader, self.reshaped = None, self.addition, False
            self.residual = self.addition = None

    @property
    def module(self) -> nn.Module | None:
        """The activation as a module; None where it is a function."""
        return self.trace.module(self.reader) if self.activation else None

    def watchers(self) -> list[nn.Module]:
        """Modules that return or receive what no longer exists once the activation has moved."""
        return [module for value in self.values for module in self.trace.seen_by.get(value, ())]
