"""Merges statistics over ranks.

A layer takes its moments and sums from a `Transport`. `LocalTransport` computes them in one process.
`GroupTransport` merges them over the ranks of a process group. A group chooses one backend for all its
layers: `SharedMemoryBackend` between the processes of one host, `CudaIpcBackend` between its GPUs, or a
`CollectiveBackend`, with one collective of torch.distributed in each direction. When a rank is in another
layer, dies or does not arrive, all other ranks raise. Ranks on CPUs raise before they write any result. The
host does not wait for a GPU, so ranks on GPUs raise at the next call.
"""

from .._deprecation import renamed_names
from .launcher_rendezvous import rendezvous
from .statistics_group import LayerKey, available_backends, check, describe_groups
from .transport import (
    LOCAL_TRANSPORT,
    GroupTransport,
    LocalTransport,
    Transport,
    default_group,
    get_transport,
)

__all__ = [
    "LOCAL_TRANSPORT",
    "GroupTransport",
    "LayerKey",
    "LocalTransport",
    "Transport",
    "available_backends",
    "check",
    "default_group",
    "describe_groups",
    "get_transport",
    "rendezvous",
]

__getattr__ = renamed_names(
    __name__,
    {
        "LOCAL": "fastvit.sync.LOCAL_TRANSPORT",
        "Local": "fastvit.sync.LocalTransport",
        "Shared": "fastvit.sync.GroupTransport",
        "transport_for": "fastvit.sync.get_transport",
    },
)
