"""A `Policy` says which outputs of ops a recompute scope may recompute."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from .._deprecation import renamed_state


class OpSite(NamedTuple):
    """One op call in the forward of a block."""

    block: str
    node_name: str  # name of the autograd node of the op
    number: int  # 1 for the first call of this op in the block's forward


class RecomputeLevel(IntEnum):
    """The ops that a scope may recompute; each level adds ops to the level below."""

    CHEAP = 0  # ops with little arithmetic
    MATMULS = 1  # Linears whose output is no narrower than their input
    EVERY_OP = 2  # every op with a rule: attention, convolutions and Linears that narrow


@dataclass(frozen=True)
class Policy:
    """The choice of outputs that a scope may recompute.

    Args:
        level: the ops that a scope may recompute. The highest level keeps inputs and outputs of blocks,
            unless `only_sites` is set.
        weight_casts: whether autocast's copies of weights are recomputed too.
        only_sites: the op calls whose outputs are recomputed; None for all calls.
        skip: skip keys of the ops whose outputs are kept.
        kept_fraction: the fraction of the kept bytes that a budget leaves, for compiled code; 0 if unknown.
    """

    level: RecomputeLevel = RecomputeLevel.CHEAP
    weight_casts: bool = False
    only_sites: frozenset[OpSite] | None = None
    skip: frozenset[tuple[str, str]] = frozenset()
    kept_fraction: float = 1.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loads pickles with the older names of fields."""
        self.__dict__.update(renamed_state(state, sites="only_sites", share="kept_fraction"))

    def reason_to_keep(self, site: OpSite | None) -> str:
        """Returns why the output of `site` is kept; empty if it may be recomputed."""
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

    The op's name is that of a report. `skip` also takes the result of `op_name`.
    """
    return site.block, display_op_name(site.node_name)


_DISPLAY_NAMES = {  # by `op_name`
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
    name = re.sub(r"((Function)?Backward\d*|<.*>)$", "", node_name.split("::")[-1])
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[0-9]D)(?=[A-Z])", "_", name).lower().removeprefix("native_")
