"""fastvit's own layers: the function of a node says how its result is made from what it has saved."""

from __future__ import annotations

from .graph import Node
from .values import Rebuild, Unknown


def layer(read: Node) -> Rebuild:
    rebuild = read.node._forward_cls.rebuilding(read.node)
    if rebuild is None:
        raise Unknown("the layer keeps its output")
    return rebuild, tuple([read.packed(one.data) for one in read.node._raw_saved_tensors])
