"""Messages that ranks exchange by collectives are merged in rank order, or not at all.

CPUs merge by merge_received. GPUs, and the model of CUDA, use pack_message, a collective and merge_messages.
"""

import pytest
import torch
import torch.distributed as dist
from ops import reference

from fastvit.sync.collective import ALL_GATHER_NAME, GpuCollectiveBackend
from fastvit.sync.protocol import FLOAT64, Exchange, ExchangeState, NumberKind, Tag
from fastvit.sync.store_consensus import StoreConsensus
from sync.one_process import assert_mismatch, describe_tag, make_rank_rows
from sync.wire_format import encode_collective_message

ops = torch.ops.fastvit
F32, F64 = torch.float32, torch.float64
CAPACITY = 14
on_model = pytest.mark.cuda_model
each_kind = pytest.mark.parametrize("sums", [False, True], ids=["moments", "sums"])


@pytest.fixture
def is_gpu(device_option) -> bool:
    """Returns whether the ranks send the messages of GPUs."""
    return device_option != "cpu"


@pytest.fixture
def gpu(is_gpu, device) -> str:
    """Returns the device of a test of GPU messages."""
    if not is_gpu:
        pytest.skip("CPUs send other messages")
    return device


def make_exchanges(tags, device, uses_float64=False):
    exchanges = [Exchange(rank, len(tags), device != "cpu") for rank in range(len(tags))]
    for exchange, tag in zip(exchanges, tags, strict=True):
        exchange.descriptor.capacity, exchange.descriptor.float64_messages = CAPACITY, uses_float64
        exchange.with_tag(tag)
    return exchanges


def receive_on_cpu(rank, numbers, tags):
    """Returns the messages that a CPU's rank receives: `(world - 1, words)`, wider than a layer's."""
    messages = [encode_collective_message(row, tag) for row, tag in zip(numbers, tags, strict=True)]
    padded = torch.nn.functional.pad(torch.stack(messages), (0, 4), value=-1)
    return torch.cat([padded[:rank], padded[rank + 1 :]])


def receive_on_gpu(numbers, exchanges):
    """Returns the messages of GPUs after an all_gather of moments, or an all_reduce of sums."""
    packed = [ops.pack_message(row, e.tensor) for row, e in zip(numbers, exchanges, strict=True)]
    return torch.cat(packed) if numbers[0].dim() == 1 else torch.stack(packed).sum(0)


def merge(rank, numbers, tags, exchanges, is_gpu):
    exchange = exchanges[rank].tensor
    if is_gpu:
        return ops.merge_messages(receive_on_gpu(numbers, exchanges), numbers[rank], exchange)
    return ops.merge_received(receive_on_cpu(rank, numbers, tags), numbers[rank], exchange)


# The type of the numbers, and whether messages are of float64
FORMATS = [("float32", False), ("float32", True), ("float64", True)]


@on_model
@pytest.mark.parametrize(
    ("world", "n", "dtype", "uses_float64", "sums"),
    [
        *((5, 12, *message_format, sums) for message_format in FORMATS for sums in (False, True)),
        (1, 14, "float32", False, False),
        (1, 14, "float64", True, True),
        (2, 6, "float32", True, False),
        (2, 6, "float32", False, True),
        (300, 8, "float64", True, False),
        (300, 8, "float32", False, False),
        (300, 8, "float32", True, True),
    ],
    ids=lambda value: {False: "no", True: "yes"}[value] if isinstance(value, bool) else str(value),
)
def test_collective_messages_merge_in_rank_order(world, n, dtype, uses_float64, sums, device, is_gpu):
    tags, rank = [Tag(2**24 - 1, 2**24 - 3)] * world, world // 2
    numbers = make_rank_rows(world, n, sums, getattr(torch, dtype), device)
    exchanges = make_exchanges(tags, device, uses_float64)
    merged = merge(rank, numbers, tags, exchanges, is_gpu)
    assert merged.dtype == numbers[0].dtype and not exchanges[rank].report.fault
    rows = torch.stack(numbers)
    if not sums:
        torch.testing.assert_close(merged, reference.merge_moments(rows), rtol=1e-5, atol=1e-6)
        return
    if is_gpu:
        messages = receive_on_gpu(numbers, exchanges)
        assert messages.dtype == (F64 if uses_float64 else F32)
        total = messages[:n]
    else:
        total = sum(rows.double())[0]  # in rank order
    assert torch.equal(merged, torch.stack([numbers[rank][0], total.to(merged.dtype)]))
    torch.testing.assert_close(merged[1], rows.sum((0, 1)), rtol=1e-4, atol=1e-4)


@on_model
@each_kind
@pytest.mark.parametrize("other_tag", [Tag(8, 5), Tag(7, 9)], ids=["layer", "step"])
@pytest.mark.parametrize("rank", [0, 2])
def test_tags_that_differ_are_a_mismatch(rank, other_tag, sums, device, is_gpu):
    numbers, tags = make_rank_rows(4, 6, sums, device=device), [Tag(7, 5)] * 4
    tags[2] = other_tag
    exchanges = make_exchanges(tags, device)
    merged = merge(rank, numbers, tags, exchanges, is_gpu)
    if device != "cpu":
        torch.cuda.synchronize()
    assert_mismatch(merged, exchanges[rank], tags, rank, sums)


@pytest.mark.parametrize(
    ("word", "value"), [(2, 4), (3, NumberKind.SUMS), (3, FLOAT64)], ids=["length", "kind", "float64"]
)
def test_a_message_of_another_length_or_kind_is_a_mismatch(word, value):
    numbers, tags = make_rank_rows(2, 6, False), [Tag(7, 5)] * 2
    received, exchange = receive_on_cpu(0, numbers, tags), make_exchanges(tags, "cpu")[0]
    received[0, word] = value
    assert ops.merge_received(received, numbers[0], exchange.tensor).isnan().all()
    assert exchange.report.fault == ExchangeState.MISMATCH


@on_model
@each_kind
def test_a_captured_step_goes_with_every_other(sums, gpu):
    numbers = make_rank_rows(3, 6, sums, device=gpu)
    exchanges = make_exchanges([Tag(7, 5), Tag(7, 0), Tag(7, 5)], gpu)
    messages = receive_on_gpu(numbers, exchanges)
    for row, exchange in zip(numbers, exchanges, strict=True):
        assert ops.merge_messages(messages, row, exchange.tensor).isfinite().all()
        assert not exchange.report.fault


@on_model
def test_the_backend_merges_packed_collectives_and_reports_a_mismatch(monkeypatch, gpu):
    """Rank 0's exchanges, in both directions, with a rank 1 that is in the same layer and then in another."""
    moments_of_ranks, sums_of_ranks = (make_rank_rows(2, 14, sums, device=gpu) for sums in (False, True))
    exchange_of_peer = make_exchanges([Tag(0, 1)] * 2, gpu)[1].tensor

    def all_gather(messages, message, group):
        messages.copy_(torch.cat([message, ops.pack_message(moments_of_ranks[1], exchange_of_peer)]))

    def all_reduce(message, group):
        message += ops.pack_message(sums_of_ranks[1], exchange_of_peer)

    monkeypatch.setattr(dist, ALL_GATHER_NAME, all_gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    consensus = StoreConsensus(dist.HashStore(), 0, 2, 5.0)  # The stand-ins need no group.
    backend = GpuCollectiveBackend(consensus, consensus, torch.device(gpu), describe_tag)
    backend.try_reserve(6, torch.float32)
    moments, sums = (backend.merge_over_ranks(n, Tag(0, 1)) for n in (moments_of_ranks[0], sums_of_ranks[0]))
    backend.raise_reported_fault(wait=True)
    expected = reference.merge_moments(torch.stack(moments_of_ranks))
    torch.testing.assert_close(moments, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(sums, torch.cat([sums_of_ranks[0], sum(sums_of_ranks)]))
    assert backend.merge_over_ranks(moments_of_ranks[0], Tag(1, 2)).isnan().all()
    expected = "rank 0 is in forward of layer 1, step 2, but rank 1 in forward of layer 0, step 1"
    with pytest.raises(RuntimeError, match=expected):
        backend.raise_reported_fault(wait=True)
