"""fastvit's own layers: the function of a node says how its result is made from what it has saved."""

from __future__ import annotations

from torch import Tensor

from .graph import Node
from .values import Rebuild, Unknown


def layer(read: Node) -> Rebuild:
    rebuild = read.node._forward_cls.rebuilding(read.node)
    if rebuild is None:
        raise Unknown("the layer keeps its output")
    packed = [raw.data for raw in read.node._raw_saved_tensors]
    saved = [None if one is None else read.packed(one) for one in packed]
    present = [one is not None for one in saved]

    def from_saved(*tensors: Tensor) -> Tensor:
        left = iter(tensors)
        return rebuild(*[next(left) if there else None for there in present])

    return from_saved, tuple([one for one in saved if one is not None])
