"""What a scope rebuilds, of all that it could."""

from __future__ import annotations

from dataclasses import dataclass

Site = tuple[str, str]  # the name of a block, and of an op as the graph has it


@dataclass(frozen=True)
class Policy:
    """`products`: by matrix products too. `weight_casts`: autocast's copies of weights. `sites`: nothing but
    what these ops make in these blocks; None for all.
    """

    products: bool = False
    weight_casts: bool = False
    sites: frozenset[Site] | None = None
