"""Packed numbers, as little-endian int32 and float32; and records: a token id and its log-probability.

The string `tokens:{request}` has `Generate.width` records for each token, in order, from index 0. That of a
beam search has no records until its end. Then it has those of all sequences, the best first; after each
stands one more record: its finish reason as a negative id, and its score.
"""

import struct
from array import array
from collections.abc import Sequence
from sys import byteorder
from typing import Any, NamedTuple

from common.messages.codec import WireError

if byteorder != "little":
    raise ImportError("token ids travel as little-endian int32; this machine is big-endian")

RECORD = struct.Struct("<if")
"""A token id and its log-probability."""
PACKED_RECORD = struct.Struct("4s4s")
"""The same, both still packed."""
TopTokens = list[tuple[int, float]]
"""(id, log-probability) of the likeliest tokens at one position, likeliest first."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Token ids of `pack_ids`. Raises WireError when the length is no multiple of four bytes."""
    return unpack("i", data)


def pack_floats(values: Sequence[float]) -> bytes:
    """Log-probabilities as little-endian float32."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Values of `pack_floats`. Raises WireError when the length is no multiple of four bytes."""
    return unpack("f", data)


def unpack(code: str, data: bytes) -> list[Any]:
    if len(data) == 4:  # the common case: the one token of a step
        return [*struct.unpack(code, data)]
    if len(data) % 4:
        raise WireError(f"{len(data)} bytes are no multiple of 4")
    values = array(code)
    values.frombytes(data)
    return values.tolist()


def pack_records(ids: bytes, logprobs: bytes, top_ids: bytes, top_logprobs: bytes) -> bytes:
    """Pack for each token its own record, then those of the likeliest tokens at its place."""
    own = pack_pairs(ids, logprobs)
    if not top_ids:
        return b"".join(own)
    top, n = pack_pairs(top_ids, top_logprobs), len(top_ids) // len(ids)
    return b"".join(record + b"".join(top[i * n : (i + 1) * n]) for i, record in enumerate(own))


def pack_columns(ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[TopTokens]) -> bytes:
    """Pack what `unpack_records` returns."""
    width = 1 + (len(tops[0]) if tops else 0)
    records = bytearray(len(ids) * RECORD.size * width)
    for i, own in enumerate(zip(ids, logprobs, strict=True)):
        for j, record in enumerate((own, *tops[i]) if tops else (own,)):
            RECORD.pack_into(records, (i * width + j) * RECORD.size, *record)
    return bytes(records)


def pack_pairs(ids: bytes, logprobs: bytes) -> list[bytes]:
    """Return one record for each packed id and its packed log-probability."""
    return [ids[i : i + 4] + logprobs[i : i + 4] for i in range(0, len(ids), 4)]


def unpack_columns(records: bytearray, begin: int, width: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the arguments of `pack_records` for the records from byte `begin` on."""
    if len(records) - begin == RECORD.size:  # the common case: the one token of a step
        return *PACKED_RECORD.unpack_from(records, begin), b"", b""
    words, step = memoryview(records)[begin:].cast("i"), 2 * width
    own = words[::step].tobytes(), words[1::step].tobytes()
    if width == 1:
        return *own, b"", b""
    tops = [words[i + 2 : i + step] for i in range(0, len(words), step)]
    return *own, b"".join(top[::2].tobytes() for top in tops), b"".join(top[1::2].tobytes() for top in tops)


def unpack_records(records: bytes, width: int = 1) -> tuple[list[int], list[float], list[TopTokens]]:
    """Return ids, log-probabilities and likeliest tokens (an empty list where `width` is 1)."""
    unpacked: TopTokens = list(struct.iter_unpack(RECORD.format, records))
    own = unpacked[::width]
    tops = [unpacked[i + 1 : i + width] for i in range(0, len(unpacked), width)] if width > 1 else []
    return [token_id for token_id, _ in own], [logprob for _, logprob in own], tops


END_IDS = {"length": -1, "eos_token": -2, "stop_sequence": -3}
"""Finish reason of a sequence → the id of the record after it."""
REASONS = {number: reason for reason, number in END_IDS.items()}


class BeamSequence(NamedTuple):
    """One sequence that a beam search has found.

    Attributes:
        logprobs: natural logarithms of the probabilities of `ids`, each as the search has scored it.
        score: the sum of `logprobs`, divided by the number of `ids` to the power of the length penalty.
        reason: `length`, `eos_token` or `stop_sequence`.
    """

    ids: list[int]
    logprobs: list[float]
    score: float
    reason: str


def pack_sequences(sequences: Sequence[BeamSequence]) -> bytes:
    """Pack the sequences of a finished beam search, the best first."""
    return b"".join(
        pack_columns([*one.ids, END_IDS[one.reason]], [*one.logprobs, one.score], []) for one in sequences
    )


def num_group_blocks(num_prompt: int, kv_len: int, width: int, block_size: int) -> int:
    """Return how many blocks a beam search needs while its beams hold `kv_len` tokens, at least the prompt's:
    full blocks of the prompt are shared, and each beam has all others for itself.
    """
    shared = num_prompt // block_size
    return shared + width * (-(-kv_len // block_size) - shared)


def group_room(num_prompt: int, num_blocks: int, width: int, block_size: int) -> int:
    """Return how many tokens each beam can hold with `num_blocks`: the inverse of `num_group_blocks`."""
    shared = num_prompt // block_size
    return (shared + (num_blocks - shared) // width) * block_size
