"""fastvit's own layers: the function of a node says how its result is made from what it has saved."""

from __future__ import annotations

from .graph import Node, is_lost
from .values import Rebuild, Unknown


def layer(read: Node) -> Rebuild:
    node = read.node
    rebuild, unsaved = node._forward_cls.rebuilding(node), getattr(node, "fastvit_unsaved", {})
    if rebuild is None:
        raise Unknown("the layer keeps its output")
    if any(is_lost(read.edges[index][0], read.policy) for index in unsaved.values()):
        raise Unknown("a term of the sum is not kept", lasts=True)
    return rebuild, tuple(
        read.edge(unsaved[i]) if i in unsaved else read.packed(one.data)
        for i, one in enumerate(node._raw_saved_tensors)
    )
