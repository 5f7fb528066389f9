"""What a recompute scope rebuilds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

# The name of a block, the name of an autograd node, and its number among those of this name in the block.
OpSite = tuple[str, str, int]


class RecomputeLevel(IntEnum):
    """Which ops a scope may recompute; each level adds to the one before."""

    CHEAP = 0  # ops that take little arithmetic
    MATMULS = 1  # Linears that do not narrow
    EVERY_OP = 2  # every op with a rule: attention, convolutions and Linears that narrow
    ACROSS_BLOCKS = 3  # the inputs and outputs of blocks, which EVERY_OP keeps


@dataclass(frozen=True)
class Policy:
    """What a scope rebuilds.

    Args:
        level: which ops a scope may recompute.
        weight_casts: autocast's copies of weights too.
        sites: only the results of these ops in these blocks; None for all.
        skip: not the results of ops of these plain names in these blocks.
        share: of the kept bytes that a budget leaves, for compiled code; 0 where it is not known.
    """

    level: RecomputeLevel = RecomputeLevel.CHEAP
    weight_casts: bool = False
    sites: frozenset[OpSite] | None = None
    skip: frozenset[tuple[str, str]] = frozenset()
    share: float = 1.0

    def against(self, site: OpSite | None) -> str:
        """Why the result of `site` is kept; empty where it may be rebuilt."""
        if self.sites is not None and site not in self.sites:
            return "the budget is met without it"
        if self.skip and site is not None and pair(site) in self.skip:
            return "skipped"
        return ""


def pair(site: OpSite) -> tuple[str, str]:
    """The pair of `Policy.skip` that has this site."""
    return site[0], op_name(site[1])


_PLAIN = {"to_copy": "cast", "clone": "copy", "reshape_alias": "view"}


def plain(name: str) -> str:
    """What a report calls the op of an autograd node."""
    op = op_name(name)
    return _PLAIN.get(op, op)


@lru_cache(1024)
def op_name(name: str) -> str:
    """The plain name of an autograd node: `GeluBackward0` is gelu."""
    plain = re.sub(r"((Function)?Backward\d*|<.*>)$", "", name.split("::")[-1])
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[0-9]D)(?=[A-Z])", "_", plain).lower().removeprefix("native_")
