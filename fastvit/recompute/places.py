"""What was decided for the saves of a block in earlier forwards."""

from __future__ import annotations

import torch

Save = tuple[str, torch.Size, torch.dtype]  # the node that made a tensor, and the tensor's size and dtype


class Place:
    """A place in the sequence of saves of a block: after all that lead here, by op, size and dtype.

    A forward goes from the start to one place after the other. Forwards that save other tensors (another
    size, another branch) have places of their own from there on. A decision to rebuild is no proof that it is
    possible: the recipe is read from the graph each time. Threads may share places, since each adds what any
    other would add.
    """

    __slots__ = ("_following", "_start", "depth", "is_rebuilt", "size")

    MOST = 4096  # places behind a start, which then begins anew: every batch may have a new size

    def __init__(self, start: Place | None = None, depth: int = 0):
        self._start = start  # None for a start
        self._following: dict[Save, Place] = {}
        self.depth = depth
        self.is_rebuilt: bool | None = None  # the decision for the last of the saves
        self.size = 0  # of a start: how many places are behind it

    def next(self, save: Save) -> Place:
        place = self._following.get(save)
        if place is None:
            start = self._start or self
            if start.size >= self.MOST:
                start._following, start.size = {}, 0
            start.size += 1
            place = self._following[save] = Place(start, self.depth + 1)
        return place
