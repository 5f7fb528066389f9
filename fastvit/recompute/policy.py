"""What a recompute scope rebuilds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

# The name of a block, the name of an autograd node, and its number among those of this name in the block.
Site = tuple[str, str, int]


# What is rebuilt: what takes little arithmetic; matrix products too; all that has a rule, with attention,
# convolutions and Linears that narrow; and what goes into a block or comes out of one, which DEEP keeps.
CHEAP, PRODUCTS, DEEP, ACROSS = range(4)


@dataclass(frozen=True)
class Policy:
    """What a scope rebuilds.

    Args:
        level: one of CHEAP, PRODUCTS, DEEP and ACROSS.
        weight_casts: autocast's copies of weights too.
        sites: only the results of these ops in these blocks; None for all.
        skip: not the results of ops of these plain names in these blocks.
        share: of the kept bytes that a budget leaves, for compiled code; 0 where it is not known.
    """

    level: int = CHEAP
    weight_casts: bool = False
    sites: frozenset[Site] | None = None
    skip: frozenset[tuple[str, str]] = frozenset()
    share: float = 1.0

    def against(self, site: Site | None) -> str:
        """Why the result of `site` is kept; empty where it may be rebuilt."""
        if self.sites is not None and site not in self.sites:
            return "the budget is met without it"
        if self.skip and site is not None and pair(site) in self.skip:
            return "skipped"
        return ""


def pair(site: Site) -> tuple[str, str]:
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
