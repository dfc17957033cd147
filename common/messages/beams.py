"""Beams: the sequences that a beam search has found, as packed records; and the KV blocks that it needs.

The string `tokens:{request}` of a beam search has no records until its end. Then it has those of all
sequences, the best first; after each stands one more record: its finish reason as a negative id, and its
score.
"""

from collections.abc import Sequence
from typing import NamedTuple

from common.messages.codec import WireError
from common.messages.records import pack_columns, unpack_records

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


def unpack_sequences(records: bytes) -> list[BeamSequence]:
    """Return the sequences of a finished beam search. Raises WireError."""
    ids, values, _ = unpack_records(records)
    sequences, begin = [], 0
    for end, token_id in enumerate(ids):
        if token_id in REASONS:
            sequences.append(BeamSequence(ids[begin:end], values[begin:end], values[end], REASONS[token_id]))
            begin = end + 1
    if begin != len(ids):
        raise WireError(f"the last {len(ids) - begin} records of a beam search belong to no sequence")
    return sequences


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
