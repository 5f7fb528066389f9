"""What a group of CPU ranks on hosts of 8 would send, counted without starting processes."""

import time
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist
from harness import markdown

from fastvit import _library
from fastvit.sync import agreement, cpu_peer
from fastvit.sync.group import Group, LayerKey
from fastvit.sync.protocol import HEADER_WORDS, Exchange, Kind, Tag

PER_HOST = 8
REPEATS = 5
CHANNELS = (64, 2048)


class Counting(dist.Store):
    """A store in which every question has ended, so that ranks can ask one after the other."""

    def __init__(self):
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.requests = Counter()

    def set(self, key, value):
        self.requests["set"] += 1
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        self.requests["get"] += 1
        return b"all" if key.endswith("/end") else self.values[key]

    def add(self, key, number):
        self.requests["add"] += 1
        self.values[key] = str(int(self.values.get(key, b"0")) + number).encode()
        return int(self.values[key])

    def compare_set(self, key, expected, new):
        self.requests["compare_set"] += 1
        self.values.setdefault(key, new if isinstance(new, bytes) else new.encode())
        return self.values[key]

    def check(self, keys):
        self.requests["check"] += 1
        return all(key.endswith("/end") or key in self.values for key in keys)


def first_calls(world: int) -> list[Counter]:
    """All ranks' requests to the store at the first calls of a group's first layer, and of its second."""
    store, requests = Counting(), [Counter(), Counter()]
    if world > PER_HOST:  # known already when rank 0 asks for the place, the fourth question
        store.values["4/differ"] = b"yes"
    for rank in range(world):
        store.requests.clear()
        host = f"host {rank // PER_HOST}"
        with (
            mock.patch.object(agreement, "process_space", lambda host=host: host),
            mock.patch.object(cpu_peer, "place", lambda _, host=host: host),
        ):
            group = Group.__new__(Group)
            asks = agreement.Agreement(store, rank, world, 60.0)
            group.__dict__.update(name="0", _device=torch.device("cpu"), _names=[], _backends=[])
            group.__dict__.update(_process_group=lambda: store, _agreement=asks)
            for layer, counter in enumerate(requests):
                group._agree(LayerKey("sync_batch_norm", layer, 0.1), 64, torch.float32)
                counter.update(store.requests)
                store.requests.clear()
            assert world <= PER_HOST or group.why == "Collective: several hosts"
    return requests


def merge_us(world: int, channels: int) -> float:
    """Microseconds of a merge of moments."""
    numbers = torch.rand(2 * channels + 2)
    exchange = Exchange(0, world)
    exchange.handle.capacity = 1
    words = torch.tensor([*Tag(0, 1), numbers.numel(), Kind.MOMENTS], dtype=torch.int32)
    received = torch.cat([words, numbers.view(torch.int32)]).repeat(world - 1, 1)
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        _library.ops.direct_merge(received, numbers, exchange.of(Tag(0, 1)))
        times.append((time.perf_counter() - begin) * 1e6)
    assert not exchange.report.fault
    return min(times)


def table(worlds: list[int]) -> list[str]:
    """Lines: requests of a rank to the store, bytes that it sends in an exchange, and the time of a merge."""
    header = ["ranks", "requests of a rank, first layer", "later layer"]
    header += [f"{what}, C={channels}" for what in ("bytes sent", "us of a merge") for channels in CHANNELS]
    rows = []
    for world in worlds:
        first, later = (sum(counter.values()) / world for counter in first_calls(world))
        sent = [(world - 1) * 4 * (HEADER_WORDS + 2 * channels + 2) for channels in CHANNELS]
        merges = [merge_us(world, channels) for channels in CHANNELS]
        rows.append((world, f"{first:.1f}", f"{later:.1f}", *sent, *(f"{us:.0f}" for us in merges)))
    return markdown(header, rows)
