"""direct_merge: what the ranks have sent each other is merged in rank order, or not at all."""

import numpy as np
import pytest
import torch
from loopback import check_mismatch, rows

from fastvit import reference
from fastvit.sync.protocol import HEADER_WORDS, Exchange, Fault, Kind, Tag

ops = torch.ops.fastvit
TAG = Tag(7, 5)


def messages(rank, numbers, tags, room=4):
    """What a rank has received: `(world - 1, words)`, wider than this layer's messages."""
    double = Kind.DOUBLE if numbers[0].dtype == torch.float64 else 0
    words = numbers[0].numel() * numbers[0].element_size() // 4
    rows = torch.full((len(numbers), HEADER_WORDS + words + room), -1, dtype=torch.int32)
    for row, one, tag in zip(rows, numbers, tags, strict=True):
        header = [*tag, words, Kind(one.dim() - 1) | double]
        row[:HEADER_WORDS] = torch.tensor(header, dtype=torch.int32)
        row[HEADER_WORDS : HEADER_WORDS + words] = one.view(-1).view(torch.int32)
    return torch.cat([rows[:rank], rows[rank + 1 :]])


def exchange(rank, world, tag=TAG):
    made = Exchange(rank, world)
    made.handle.capacity = 1
    made.of(tag)
    return made


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world,n", [(1, 14), (2, 6), (5, 5000), (300, 8)])
def test_numbers_are_merged(world, n, dtype, sums):
    numbers, rank = rows(world, n, sums, dtype), world // 2
    received, made = messages(rank, numbers, [TAG] * world), exchange(rank, world)
    got = ops.direct_merge(received, numbers[rank], made.tensor)
    assert got.dtype == dtype and not made.report.fault
    everything = torch.stack(numbers)
    if sums:
        in_order = torch.from_numpy(np.add.accumulate(everything.double().numpy().squeeze(1), 0)[-1])
        assert torch.equal(got, torch.stack([numbers[rank][0], in_order.to(dtype)]))
    else:
        torch.testing.assert_close(got, reference.merge_moments(everything), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("other", [Tag(8, 5), Tag(7, 9)])
@pytest.mark.parametrize("rank", [0, 2])
def test_tags_that_differ(rank, other, sums):
    tags = [TAG, TAG, other, TAG]
    numbers, made = rows(4, 6, sums), exchange(rank, 4, tags[rank])
    got = ops.direct_merge(messages(rank, numbers, tags), numbers[rank], made.tensor)
    check_mismatch(got, made, tags, rank, sums)


@pytest.mark.parametrize("change", [(2, 4), (3, Kind.SUMS), (3, Kind.DOUBLE)])
def test_a_message_of_another_length_or_kind(change):
    numbers, made = rows(2, 6, False), exchange(0, 2)
    received = messages(0, numbers, [TAG, TAG])
    received[0, change[0]] = change[1]
    assert ops.direct_merge(received, numbers[0], made.tensor).isnan().all()
    assert made.report.fault == Fault.MISMATCH


def test_bad_arguments():
    row, one = torch.zeros(6), exchange(0, 3).tensor
    for wrong in (torch.zeros(2, 8), torch.zeros(3, 10), torch.zeros(2, 11), torch.zeros(20)):
        with pytest.raises(RuntimeError, match=r"direct_merge: messages is Int .*; Int \(2, 10\) or wider"):
            ops.direct_merge(wrong.int(), row, one)
    with pytest.raises(RuntimeError, match="direct_merge: messages is Float"):
        ops.direct_merge(torch.zeros(2, 10), row, one)
    with pytest.raises(RuntimeError, match="direct_merge: numbers is Half"):
        ops.direct_merge(torch.zeros(2, 10).int(), row.half(), one)
    with pytest.raises(RuntimeError, match="direct_merge: messages has shape .*freed or shrunk"):
        freed = torch.zeros(2, 10, dtype=torch.int32)
        freed.untyped_storage().resize_(8)
        ops.direct_merge(freed, row, one)
