"""What a recompute scope rebuilds."""

from __future__ import annotations

from dataclasses import dataclass

Site = tuple[str, str]  # the name of a block, and the name of an autograd node


@dataclass(frozen=True)
class Policy:
    """What a scope rebuilds.

    Args:
        products: results of matrix products too.
        weight_casts: autocast's copies of weights too.
        sites: only the results of these ops in these blocks; None for all.
    """

    products: bool = False
    weight_casts: bool = False
    sites: frozenset[Site] | None = None
