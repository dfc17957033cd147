"""Packed records: a token id and its log-probability in eight bytes, as `tokens:{request}` holds them."""

import struct

from common.messages.events import Tokens

RECORD = struct.Struct("<if")
"""An id and its log-probability; `Generate.width` of them are one token in the string `tokens:{request}`, in
order, from index 0.
"""


ONE_RECORD = struct.Struct("4s4s")


TopTokens = list[tuple[int, float]]
"""The likeliest tokens at one position, likeliest first: id, log-probability."""


def pack_tokens(tokens: Tokens) -> bytes:
    """Packed records of tokens."""
    return pack_records(tokens.ids, tokens.logprobs, tokens.top_ids, tokens.top_logprobs)


def pack_records(ids: bytes, logprobs: bytes, top_ids: bytes, top_logprobs: bytes) -> bytes:
    """Of each token its own record, then those of its likeliest tokens."""
    own = pack_pairs(ids, logprobs)
    if not top_ids:
        return b"".join(own)
    top, n = pack_pairs(top_ids, top_logprobs), len(top_ids) // len(ids)
    return b"".join(record + b"".join(top[i * n : (i + 1) * n]) for i, record in enumerate(own))


def pack_pairs(ids: bytes, logprobs: bytes) -> list[bytes]:
    return [ids[i : i + 4] + logprobs[i : i + 4] for i in range(0, len(ids), 4)]


def unpack_columns(records: bytearray, begin: int, width: int) -> tuple[bytes, bytes, bytes, bytes]:
    """The columns that `pack_records` joined, of the records from byte `begin` on."""
    if len(records) - begin == RECORD.size:  # one token, as a step brings it
        return *ONE_RECORD.unpack_from(records, begin), b"", b""
    words, step = memoryview(records)[begin:].cast("i"), 2 * width
    own = words[::step].tobytes(), words[1::step].tobytes()
    if width == 1:
        return *own, b"", b""
    tops = [words[i + 2 : i + step] for i in range(0, len(words), step)]
    return *own, b"".join(top[::2].tobytes() for top in tops), b"".join(top[1::2].tobytes() for top in tops)


def unpack_records(records: bytes, width: int = 1) -> tuple[list[int], list[float], list[TopTokens]]:
    """Ids, log-probabilities and likeliest tokens (nothing where `width` is 1) of packed records."""
    unpacked: TopTokens = list(struct.iter_unpack(RECORD.format, records))
    own = unpacked[::width]
    tops = [unpacked[i + 1 : i + width] for i in range(0, len(unpacked), width)] if width > 1 else []
    return [token_id for token_id, _ in own], [logprob for _, logprob in own], tops
