"""What a training forward has left for backward: tensor by tensor, kept or to be rebuilt, and why.

Read from the graph that the forward has left. A tensor is named after the module whose op has saved it, by
that op's parameters; where an op has none, after the next module behind it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..recompute.graph import KEY
from ..recompute.saved import Kept, Recipe
from ..recompute.values import Value

_LEAF = "torch::autograd::AccumulateGrad"
_NUMBER = re.compile(r"(?<![^. ])\d+(?![^.])")  # a whole part of a name
_PASSING = ("TBackward", "ViewBackward", "ToCopyBackward", "TransposeBackward", "PermuteBackward", "Reshape")


@dataclass(frozen=True)
class Saved:
    """Tensors alike that backward needs, in as many places as a block repeats.

    `names` are who saved one of them, a number that changes from block to block written as *; `kept_bytes` is
    what stays in memory of them all, `saved_bytes` what is rebuilt instead; `reason` tells from what, or why
    not.
    """

    names: tuple[str, ...]
    count: int
    kept_bytes: int
    saved_bytes: int
    reason: str


def account(result: object, model: nn.Module) -> list[Saved]:
    """What the graph of `result`, returned by a forward of `model`, holds for backward; largest first."""
    graph = _Graph(result, model)
    groups: dict[tuple, list[int]] = {}
    for names, kept, saved, reason in graph.entries():
        total = groups.setdefault((names, reason), [0, 0, 0])
        for i, more in enumerate((1, kept, saved)):
            total[i] += more
    rows = [Saved(names, *total, reason) for (names, reason), total in groups.items()]
    return sorted(rows, key=lambda row: (-row.saved_bytes, -row.kept_bytes, row.names))


def rebuilt(result: object, model: nn.Module) -> list[Value]:
    """The values that the graph of `result` is to rebuild, each once."""
    return list(_Graph(result, model).rebuilt)


class _Graph:
    def __init__(self, result: object, model: nn.Module):
        self.parameters = {parameter: name for name, parameter in model.named_parameters()}
        given = [*model.parameters(), *model.buffers()]
        self.given = {tensor.untyped_storage()._cdata for tensor in given if torch._C._has_storage(tensor)}
        self.readers: dict[object, list[str]] = {}  # of a kept storage, or of a value that is rebuilt
        self.kept: dict[int, tuple[Kept, bool]] = {}  # by storage: whether it was to be rebuilt
        self.rebuilt: dict[Value, Recipe] = {}
        self.masks: set[int] = set()  # of dropout, by storage
        self.copies: set[int] = set()  # kept for recipes alone, by storage
        self.values: dict[int, Value] = {}  # by storage of who keeps it
        self._walk(result)

    def _walk(self, result: object) -> None:
        todo = [
            (t.grad_fn, "the result") for t in pytree.tree_leaves(_plain(result)) if isinstance(t, Tensor)
        ]
        seen = set()
        while todo:
            node, behind = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            module = self._module(node)
            label = module or f"{op_name(node.name())} before {behind}"
            for packed in _saved_by(node):
                self._note(packed, label, node.name())
            value = node.metadata.get(KEY)
            if isinstance(value, Value) and (kept := value.kept()) is not None:
                self.values[kept.tensor.untyped_storage()._cdata] = value
            todo += [(edge[0], module or behind) for edge in reversed(node.next_functions)]

    def _note(self, packed: Kept | Recipe, label: str, op: str) -> None:
        if type(packed) is Recipe and packed.kept is None:
            self.rebuilt[packed.value] = packed
            self._read(packed.value, label)
            return
        kept = packed if type(packed) is Kept else packed.kept
        tensor = kept.tensor
        if not isinstance(tensor, Tensor) or not torch._C._has_storage(tensor):
            return
        address = tensor.untyped_storage()._cdata
        if address in self.given:
            return
        self.kept.setdefault(address, (kept, type(packed) is Recipe))
        if op == "NativeDropoutBackward0" and tensor.dtype is torch.bool:
            self.masks.add(address)
        elif op == "MulBackward0" and type(packed) is Kept and _is_mask(tensor):
            self.masks.add(address)
        self._read(address, label)

    def _read(self, key: object, label: str) -> None:
        readers = self.readers.setdefault(key, [])
        if label not in readers:
            readers.append(label)

    def _module(self, node) -> str | None:
        """The module whose parameter goes into the op."""
        for source, _ in node.next_functions:
            for _ in range(3):
                if source is None or not source.name().startswith(_PASSING) or not source.next_functions:
                    break
                source = source.next_functions[0][0]
            if source is not None and source.name() == _LEAF:
                name = self.parameters.get(source.variable)
                if name is not None:
                    return name.rpartition(".")[0] or name
        return None

    def entries(self) -> Iterator[tuple[tuple[str, ...], int, int, str]]:
        # one with a single ingredient first: what nobody has saved counts with what it is kept for
        for value, recipe in sorted(self.rebuilt.items(), key=lambda item: len(item[1].source.ingredients)):
            made_from = [
                self._names(kept.tensor.untyped_storage()._cdata) for kept in recipe.source.ingredients
            ]
            made_from = [" and ".join(names) for names in dict.fromkeys(made_from) if names]
            own = [kept for kept in recipe.source.ingredients if self._is_nobodys(kept)]
            what = f" of what is kept for {'; '.join(made_from)}" if made_from else ""
            copies = sum(kept.tensor.nbytes for kept in own)
            yield self._names(value), copies, value.nbytes, f"{op_name(value.name)}{what}"
        for address, (kept, waited) in self.kept.items():
            size = kept.tensor.untyped_storage().nbytes()
            value = self.values.get(address)
            if value is None and address in self.masks:
                reason = "dropout's mask, not of an nn.Dropout"
            else:
                reason = self._against(value, waited)
            yield self._names(address), size, 0, reason

    def _is_nobodys(self, kept: Kept) -> bool:
        """Whether nobody has saved it, and it is seen for the first time: a dropout's mask, say."""
        address = kept.tensor.untyped_storage()._cdata
        if address in self.given or address in self.kept or address in self.copies:
            return False
        self.copies.add(address)
        return True

    def _names(self, key: object) -> tuple[str, ...]:
        return tuple(sorted({_NUMBER.sub("*", label) for label in self.readers.get(key, ())}))

    @staticmethod
    def _against(value: Value | None, waited: bool) -> str:
        if value is None:
            return "not an op's first result, or written to"
        if waited:
            return f"what {op_name(value.name)} makes it from is kept by nobody"
        return (value.against() or "was kept before it was known what it is made from").replace(
            value.name, op_name(value.name)
        )


def _is_mask(factor: Tensor) -> bool:
    """Whether this is what torch's dropout multiplies by where it has no op of its own: 0 or 1 / (1 - p).

    As often the latter as it should be, which sets it apart from other factors of two values.
    """
    if not factor.is_floating_point() or not factor.numel():
        return False
    most, count = factor.max().item(), factor.numel()
    if not 1 < most < math.inf or not ((factor == 0) | (factor == most)).all():
        return False
    mean = most * torch.count_nonzero(factor).item() / count
    return abs(mean - 1) < 5 * math.sqrt((most - 1) / count) + torch.finfo(factor.dtype).eps


def op_name(name: str) -> str:
    """`GeluBackward0` is gelu."""
    plain = re.sub(r"(Backward\d*|<.*>)$", "", name.split("::")[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower()


def _saved_by(node) -> Iterable[Kept | Recipe]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            for one in raw if isinstance(raw, (list, tuple)) else (raw,):
                packed = one.data
                if type(packed) in (Kept, Recipe):
                    yield packed


def _plain(output: object) -> object:
    """Outputs in dataclass-like objects (of transformers, say) as a dict."""
    return vars(output) if hasattr(output, "__dataclass_fields__") else output
