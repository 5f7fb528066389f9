"""The messages between ranks as Python writes them: an implementation that the ops are compared with."""

import torch
from torch import Tensor

from fastvit.sync.protocol import FLOAT64, NumberKind, Tag

HEADER_PACKETS = 2
PACKET_BYTES = 16
# The first inbox follows the rest of an arena, whose size does not depend on the capacity.
INBOX_OFFSET = torch.ops.fastvit.arena_bytes(1, 6) - 2 * (HEADER_PACKETS + 6) * PACKET_BYTES


def message_offset(capacity: int, sender: int, epoch: int, is_gpu: bool) -> int:
    """Returns where in an arena the message of a sender begins, in bytes."""
    payload_packets = capacity if is_gpu else (capacity + 1) // 2
    slot = sender * 2 + epoch % 2
    return INBOX_OFFSET + slot * (HEADER_PACKETS + payload_packets) * PACKET_BYTES


def make_header(numbers: Tensor, tag: Tag) -> Tensor:
    """Returns the four words that identify moments, `(2C + 2,)`, or sums, `(1, 2C)`."""
    kind = numbers.dim() - 1 | (FLOAT64 if numbers.dtype == torch.float64 else 0)
    words = numbers.numel() * numbers.element_size() // 4
    return torch.tensor([*tag, words, kind], dtype=torch.int32, device=numbers.device)


def pack_words(words: Tensor, epoch: int) -> Tensor:
    """Returns 32-bit words as packets `{word, epoch, word, epoch}`."""
    even, odd = words.view(-1, 2).T
    flags = torch.full_like(even, epoch - (epoch >> 31 << 32))
    return torch.stack([even, flags, odd, flags], 1).flatten()


def encode_message(numbers: Tensor, tag: Tag, epoch: int, is_gpu: bool) -> Tensor:
    """Returns the bytes that a rank writes into the inbox of a peer.

    A GPU sends packets, in which the two numbers of a channel are neighbours. A CPU sends the numbers as they
    are.
    """
    flat = numbers.flatten()
    payload = flat.view(torch.int32)
    if is_gpu:
        channels = flat.numel() // 2 - (numbers.dim() - 1 == NumberKind.MOMENTS)
        pairs = torch.stack([flat[:channels], flat[channels : 2 * channels]], 1).flatten()
        payload = pack_words(torch.cat([pairs, flat[2 * channels :]]).view(torch.int32), epoch)
    return torch.cat([pack_words(make_header(numbers, tag), epoch), payload]).view(torch.uint8)


def encode_collective_message(numbers: Tensor, tag: Tag) -> Tensor:
    """Returns the words that a CPU's rank sends by a collective."""
    return torch.cat([make_header(numbers, tag), numbers.flatten().view(torch.int32)])
