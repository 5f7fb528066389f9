"""Messages of ranks are merged in rank order, or not at all. CPUs merge by merge_received,
GPUs, and the model of one, by pack_message, a collective and merge_messages.
"""

import pytest
import torch
import torch.distributed as dist
from ops import reference

from fastvit.sync.collective import ALL_GATHER_NAME, GpuCollectiveBackend
from fastvit.sync.protocol import FLOAT64, HEADER_WORDS, Exchange, ExchangeState, NumberKind, Tag
from fastvit.sync.store_consensus import StoreConsensus
from sync.one_process import assert_mismatch, describe_tag, make_rank_rows

pytestmark = pytest.mark.cuda_model

TEST_DEVICE = "cpu"  # TODO
on_cpu = pytest.mark.skipif(TEST_DEVICE != "cpu", reason="GPUs send other messages")
on_gpu = pytest.mark.skipif(TEST_DEVICE == "cpu", reason="CPUs send other messages")
ops = torch.ops.fastvit
CAPACITY = 14


def exchanges(tags, device, wide=False):
    made = []
    for rank, tag in enumerate(tags):
        made.append(Exchange(rank, len(tags), device != "cpu"))
        made[-1].descriptor.capacity, made[-1].descriptor.float64_messages = CAPACITY, wide
        made[-1].with_tag(tag)
    return made


def direct(rank, numbers, tags, room=4):
    """Returns the messages that a CPU's rank receives: `(world - 1, words)`, wider than a layer's."""
    double = FLOAT64 if numbers[0].dtype == torch.float64 else 0
    words = numbers[0].numel() * numbers[0].element_size() // 4
    received = torch.full((len(numbers), HEADER_WORDS + words + room), -1, dtype=torch.int32)
    for row, one, tag in zip(received, numbers, tags, strict=True):
        header = [*tag, words, NumberKind(one.dim() - 1) | double]
        row[:HEADER_WORDS] = torch.tensor(header, dtype=torch.int32)
        row[HEADER_WORDS : HEADER_WORDS + words] = one.view(-1).view(torch.int32)
    return torch.cat([received[:rank], received[rank + 1 :]])


def travel(numbers, exchanges):
    """The messages of GPUs after an all_gather of moments, or an all_reduce of sums."""
    packed = [ops.pack_message(row, e.tensor) for row, e in zip(numbers, exchanges, strict=True)]
    return torch.cat(packed) if numbers[0].dim() == 1 else torch.stack(packed).sum(0)


def merged(rank, numbers, tags, exchanges):
    if TEST_DEVICE == "cpu":
        return ops.merge_received(direct(rank, numbers, tags), numbers[rank], exchanges[rank].tensor)
    return ops.merge_messages(travel(numbers, exchanges), numbers[rank], exchanges[rank].tensor)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("dtype,wide", [("float32", False), ("float32", True), ("float64", True)])
@pytest.mark.parametrize("world,n", [(1, 14), (2, 6), (5, 12), (300, 8)])
def test_collective_messages_merge_in_rank_order(world, n, dtype, wide, sums, device):
    numbers, tags = (
        make_rank_rows(world, n, sums, getattr(torch, dtype), device),
        [Tag(2**24 - 1, 2**24 - 3)] * world,
    )
    made, rank = exchanges(tags, device, wide), world // 2
    got = merged(rank, numbers, tags, made)
    assert got.dtype == numbers[0].dtype and not made[rank].report.fault
    everything = torch.stack(numbers)
    if not sums:
        torch.testing.assert_close(got, reference.merge_moments(everything), rtol=1e-5, atol=1e-6)
        return
    if TEST_DEVICE == "cpu":
        total = sum(everything.double())[0]  # in rank order
    else:
        messages = travel(numbers, made)
        assert messages.dtype == (torch.float64 if wide else torch.float32)
        total = messages[:n]
    assert torch.equal(got, torch.stack([numbers[rank][0], total.to(got.dtype)]))
    torch.testing.assert_close(got[1], everything.sum((0, 1)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("other", [Tag(8, 5), Tag(7, 9)])
@pytest.mark.parametrize("rank", [0, 2])
def test_tags_that_differ(rank, other, sums, device):
    numbers, tags = make_rank_rows(4, 6, sums, device=device), [Tag(7, 5), Tag(7, 5), other, Tag(7, 5)]
    made = exchanges(tags, device)
    got = merged(rank, numbers, tags, made)
    if device != "cpu":
        torch.cuda.synchronize()
    assert_mismatch(got, made[rank], tags, rank, sums)


@on_cpu
@pytest.mark.parametrize("change", [(2, 4), (3, NumberKind.SUMS), (3, FLOAT64)])
def test_a_message_of_another_length_or_kind(change):
    numbers, tags = make_rank_rows(2, 6, False), [Tag(7, 5)] * 2
    received, (made, _) = direct(0, numbers, tags), exchanges(tags, "cpu")
    received[0, change[0]] = change[1]
    assert ops.merge_received(received, numbers[0], made.tensor).isnan().all()
    assert made.report.fault == ExchangeState.MISMATCH


@on_cpu
def test_bad_arguments_of_cpus():
    row, one = torch.zeros(6), exchanges([Tag(7, 5)] * 3, "cpu")[0].tensor
    for wrong in (torch.zeros(2, 8), torch.zeros(3, 10), torch.zeros(2, 11), torch.zeros(20)):
        with pytest.raises(RuntimeError, match=r"merge_received: messages is Int .*; Int \(2, 10\) or wider"):
            ops.merge_received(wrong.int(), row, one)
    with pytest.raises(RuntimeError, match="merge_received: messages is Float"):
        ops.merge_received(torch.zeros(2, 10), row, one)
    with pytest.raises(RuntimeError, match="merge_received: numbers is Half"):
        ops.merge_received(torch.zeros(2, 10).int(), row.half(), one)
    with pytest.raises(RuntimeError, match="merge_received: messages has shape .*freed or shrunk"):
        freed = torch.zeros(2, 10, dtype=torch.int32)
        freed.untyped_storage().resize_(8)
        ops.merge_received(freed, row, one)


@on_gpu
@pytest.mark.parametrize("sums", [False, True])
def test_a_captured_step_goes_with_every_other(sums, device):
    numbers, made = (
        make_rank_rows(3, 6, sums, device=device),
        exchanges([Tag(7, 5), Tag(7, 0), Tag(7, 5)], device),
    )
    messages = travel(numbers, made)
    for row, exchange in zip(numbers, made, strict=True):
        assert ops.merge_messages(messages, row, exchange.tensor).isfinite().all()
        assert not exchange.report.fault


@on_gpu
def test_packed_collectives(monkeypatch, device):
    """Rank 0's exchanges, in both directions, with a rank 1 that is in the same layer and then in another."""
    numbers = [make_rank_rows(2, 14, sums, device=device) for sums in (False, True)]
    (other,) = exchanges([Tag(0, 1)] * 2, device)[1:]

    def all_gather(messages, message, group):
        messages.copy_(torch.cat([message, ops.pack_message(numbers[0][1], other.tensor)]))

    def all_reduce(message, group):
        message += ops.pack_message(numbers[1][1], other.tensor)

    monkeypatch.setattr(dist, ALL_GATHER_NAME, all_gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    consensus = StoreConsensus(dist.HashStore(), 0, 2, 5.0)
    backend = GpuCollectiveBackend(
        consensus, consensus, torch.device(device), describe_tag
    )  # the fakes need no group
    backend.try_reserve(6, torch.float32)
    moments, sums = (backend.merge_over_ranks(mine, Tag(0, 1)) for mine, _ in numbers)
    backend.raise_reported_fault(wait=True)
    wanted = reference.merge_moments(torch.stack(numbers[0]))
    torch.testing.assert_close(moments, wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(sums, torch.cat([numbers[1][0], sum(numbers[1])]))
    assert backend.merge_over_ranks(numbers[0][0], Tag(1, 2)).isnan().all()
    said = "rank 0 is in forward of layer 1, step 2, but rank 1 in forward of layer 0, step 1"
    with pytest.raises(RuntimeError, match=said):
        backend.raise_reported_fault(wait=True)


@on_gpu
def test_bad_arguments_of_gpus(device):
    row, (exchange,) = torch.zeros(6, device=device), exchanges([Tag(0, 1)], device)
    two = exchanges([Tag(0, 1)] * 2, device)[0].tensor
    exchange.descriptor.capacity = 4
    with pytest.raises(RuntimeError, match="pack_message: numbers is .* .6.; at most 4 numbers of float32"):
        ops.pack_message(row, exchange.tensor)
    exchange.descriptor.capacity = 8
    with pytest.raises(
        RuntimeError, match="pack_message: numbers is Double .6.; at most 8 numbers of float32"
    ):
        ops.pack_message(row.double(), exchange.tensor)
    with pytest.raises(RuntimeError, match="messages is Float .21.; 32 numbers expected, .* of 2 ranks"):
        ops.merge_messages(row.new_zeros(21), row, two)


@pytest.mark.parametrize("sums", [False, True])
def test_opcheck(sums, device):
    """They have no fakes: fastvit::share, which has one, stands for them."""
    numbers, tags = make_rank_rows(2, 6, sums, device=device), [Tag(7, 5)] * 2
    made = exchanges(tags, device)
    if TEST_DEVICE == "cpu":
        calls = [(ops.merge_received, (direct(0, numbers, tags), numbers[0], made[0].tensor))]
    else:
        pack = ops.pack_message, (numbers[0], made[0].tensor)
        calls = [pack, (ops.merge_messages, (travel(numbers, made), numbers[0], made[0].tensor))]
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils="test_schema")
    assert not made[0].report.fault


@on_gpu
@pytest.mark.parametrize("freed", ["messages", "numbers"])
def test_freed_storage_is_refused(freed, device):
    exchange = exchanges([Tag(0, 1)] * 2, device)[0].tensor
    given = {"messages": torch.zeros(32, device=device), "numbers": torch.zeros(6, device=device)}
    storage = given[freed].untyped_storage()
    storage.resize_(storage.nbytes() - 1)
    with pytest.raises(RuntimeError, match=f"merge_messages: {freed} has shape .*freed or shrunk"):
        ops.merge_messages(given["messages"], given["numbers"], exchange)
    if freed == "numbers":
        with pytest.raises(RuntimeError, match="pack_message: numbers has shape .*freed or shrunk"):
            ops.pack_message(given["numbers"], exchange)
