"""Bits: unpacks words that hold several quants each."""

import torch


def unpack_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words, int32 [rows, n], as one row of bits from the lowest of the first word on → quants of 2, 3, 4 or
    8 bits, uint8 [rows, n * 32 / bits]
    """
    octets = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        quants: torch.Tensor = octets[..., None] >> shifts & 2**bits - 1
        return quants.flatten(-2)
    threes = octets.view(len(octets), -1, 3).int()  # 24 bits are eight quants of 3
    joined = threes[..., 0] | threes[..., 1] << 8 | threes[..., 2] << 16
    shifts = torch.arange(0, 24, bits, dtype=torch.int32)
    return (joined[..., None] >> shifts).bitwise_and(2**bits - 1).to(torch.uint8).flatten(-2)
