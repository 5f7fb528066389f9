"""What collectives carry: message_pack and message_unpack, here and on a GPU or its model."""

import pytest
import torch

import fastvit  # noqa: F401  (registers the ops)
from fastvit.statistics.exchange import MISMATCH, Report, Tag

ops = torch.ops.fastvit
CAPACITY = 14


def describe(tag, direction):
    return f"{direction} of layer {tag.layer}, step {tag.step}"


def travel(numbers, tags, wide, gathered):
    """Each rank's messages after an all_gather, or an all_reduce."""
    places = [0] * len(tags) if gathered else range(len(tags))
    packed = [
        ops.message_pack(row, *tag, place, 1 if gathered else len(tags), CAPACITY, wide)
        for row, tag, place in zip(numbers, tags, places, strict=True)
    ]
    return torch.cat(packed) if gathered else torch.stack(packed).sum(0)


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("dtype,wide", [("float32", False), ("float32", True), ("float64", True)])
@pytest.mark.parametrize("world,n", [(1, 14), (2, 6), (5, 12), (300, 8)])
def test_numbers_arrive(world, n, dtype, wide, gathered, device):
    numbers = torch.randn(world, n, dtype=getattr(torch, dtype), device=device)
    tag, report = Tag(2**24 - 1, 2**24 - 3), Report(device != "cpu")
    messages = travel(numbers, [tag] * world, wide, gathered)
    assert messages.dtype == (torch.float64 if wide else torch.float32)
    got = ops.message_unpack(messages, numbers[0], *tag, world - 1, world, gathered, report.memory)
    want = numbers if gathered else messages[:n].to(numbers.dtype)
    assert torch.equal(got, want) and got.dtype == numbers.dtype
    assert gathered or torch.allclose(got, numbers.sum(0), atol=1e-4)
    assert not report


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("other", [Tag(8, 5), Tag(7, 9)])
@pytest.mark.parametrize("rank", [0, 2])
def test_tags_that_differ(rank, other, gathered, device):
    """Nothing of the numbers is left, and the report names the first rank that is elsewhere."""
    numbers, tags = torch.randn(4, 6, device=device), [Tag(7, 5), Tag(7, 5), other, Tag(7, 5)]
    messages = travel(numbers, tags, False, gathered)
    report = Report(device != "cpu")
    got = ops.message_unpack(messages, numbers[0], *tags[rank], rank, 4, gathered, report.memory)
    assert got.isnan().all() and got.shape == ((4, 6) if gathered else (6,))
    assert report and report.fault == MISMATCH and report.epoch == max(5, other.step)
    direction, peer = ("forward" if gathered else "backward"), (2 if rank == 0 else 0)
    assert report.peer == peer and report.mine(describe) == describe(tags[rank], direction)
    assert report.theirs(describe) == describe(tags[peer], direction)
    report.clear()
    assert not report


@pytest.mark.parametrize("gathered", [True, False])
def test_a_captured_step_goes_with_every_other(gathered, device):
    numbers, tags = torch.randn(3, 6, device=device), [Tag(7, 5), Tag(7, 0), Tag(7, 5)]
    messages = travel(numbers, tags, False, gathered)
    for rank, tag in enumerate(tags):
        report = Report(device != "cpu")
        got = ops.message_unpack(messages, numbers[0], *tag, rank, 3, gathered, report.memory)
        assert got.isfinite().all() and not report


def test_bad_arguments(device):
    row, report = torch.zeros(6, device=device), Report(device != "cpu").memory
    with pytest.raises(RuntimeError, match="message_pack: numbers is .* .6.; at most 4 numbers of float32"):
        ops.message_pack(row, 0, 1, 0, 1, 4, False)
    with pytest.raises(
        RuntimeError, match="message_pack: numbers is Double .6.; at most 8 numbers of float32"
    ):
        ops.message_pack(row.double(), 0, 1, 0, 1, 8, False)
    with pytest.raises(RuntimeError, match="message_pack: tag is 2 of 2; one of at most"):
        ops.message_pack(row, 0, 1, 2, 2, 8, False)
    with pytest.raises(
        RuntimeError, match="messages is Float .21., which are no messages of 2 ranks with 6 numbers"
    ):
        ops.message_unpack(row.new_zeros(21), row, 0, 1, 0, 2, True, report)
    with pytest.raises(RuntimeError, match="report is not 12 int32 on the CPU"):
        ops.message_unpack(row.new_zeros(20), row, 0, 1, 0, 2, True, report[1:])


def test_sizes_that_overflow_are_refused(device):
    row, report = torch.zeros(6, device=device), Report(device != "cpu").memory
    for many in (2**62, 2**63 - 1):
        with pytest.raises(RuntimeError, match=f"message_pack: tag is 0 of {many}; one of at most"):
            ops.message_pack(row, 0, 1, 0, many, 8, False)
        with pytest.raises(RuntimeError, match=f"message_pack: capacity is {many}; at most"):
            ops.message_pack(row, 0, 1, 0, 1, many, False)
        for gathered in (False, True):
            with pytest.raises(RuntimeError, match=f"message_unpack: rank is 0 of {many}; one of at most"):
                ops.message_unpack(row.new_zeros(20), row, 0, 1, 0, many, gathered, report)


@pytest.mark.parametrize("freed", ["messages", "numbers", "report"])
def test_freed_storage_is_refused(freed, device):
    given = {
        "messages": torch.zeros(20, device=device),
        "numbers": torch.zeros(6, device=device),
        "report": torch.zeros(12, dtype=torch.int32),
    }
    storage = given[freed].untyped_storage()
    storage.resize_(storage.nbytes() - 1)
    messages, numbers, report = given.values()
    with pytest.raises(RuntimeError, match=f"message_unpack: {freed} has shape .*freed or shrunk"):
        ops.message_unpack(messages, numbers, 0, 1, 0, 2, True, report)
    if freed == "numbers":
        with pytest.raises(RuntimeError, match="message_pack: numbers has shape .*freed or shrunk"):
            ops.message_pack(numbers, 0, 1, 0, 1, 8, False)
