"""What a recompute scope may recompute: `Policy`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple


class OpSite(NamedTuple):
    """One op call in the forward of a block."""

    block: str
    node_name: str  # of the autograd node of the op
    number: int  # among the calls of this op in the block's forward


class RecomputeLevel(IntEnum):
    """Which ops a scope may recompute; each level adds to the one before."""

    CHEAP = 0  # ops that take little arithmetic
    MATMULS = 1  # Linears that do not narrow
    EVERY_OP = 2  # every op with a rule: attention, convolutions and Linears that narrow


@dataclass(frozen=True)
class Policy:
    """What a scope recomputes.

    Args:
        level: which ops a scope may recompute. The highest level keeps inputs and outputs of blocks, unless
            `only_sites` are given.
        weight_casts: recompute autocast's copies of weights too.
        only_sites: the op calls whose outputs are recomputed; None for all.
        skip: keep the outputs of ops with these skip keys.
        kept_fraction: fraction of the kept bytes that a budget leaves. Compiled code uses it. 0 if unknown.
    """

    level: RecomputeLevel = RecomputeLevel.CHEAP
    weight_casts: bool = False
    only_sites: frozenset[OpSite] | None = None
    skip: frozenset[tuple[str, str]] = frozenset()
    kept_fraction: float = 1.0

    def __setstate__(self, state: dict[str, object]) -> None:
        """Loads pickles with the older names of fields."""
        for old, new in {"sites": "only_sites", "share": "kept_fraction"}.items():
            if old in state:
                state[new] = state.pop(old)
        self.__dict__.update(state)

    def reason_to_keep(self, site: OpSite | None) -> str:
        """Returns why the output of `site` is kept; empty where it may be recomputed."""
        if self.only_sites is not None and site not in self.only_sites:
            return "the budget is met without it"
        return "skipped" if self.skips(site) else ""

    def skips(self, site: OpSite | None) -> bool:
        """Returns whether the user wants the output of `site` to be kept."""
        if not self.skip or site is None:
            return False
        return skip_key(site) in self.skip or (site.block, op_name(site.node_name)) in self.skip


def skip_key(site: OpSite) -> tuple[str, str]:
    """Returns the pair of a block's name and an op's name by which `convert(skip=)` takes this site.

    The op's name is the one that a report prints. Its plain name is taken too.
    """
    return site.block, display_op_name(site.node_name)


_DISPLAY_NAMES = {
    "to_copy": "cast",
    "clone": "copy",
    "reshape_alias": "view",
    "copy_slices": "write to a view",
}


def display_op_name(node_name: str) -> str:
    """Returns what a report calls the op of an autograd node."""
    name = op_name(node_name)
    return _DISPLAY_NAMES.get(name, name)


@lru_cache(1024)
def op_name(node_name: str) -> str:
    """Returns the plain op name of an autograd node: `GeluBackward0` is gelu."""
    plain = re.sub(r"((Function)?Backward\d*|<.*>)$", "", node_name.split("::")[-1])
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[0-9]D)(?=[A-Z])", "_", plain).lower().removeprefix("native_")
