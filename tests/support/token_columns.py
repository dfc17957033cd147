"""Messages with tokens, as a worker sends them, and the sequences of a beam search."""

from collections.abc import Iterable
from typing import Any

from common.messages.events import TokenColumns, Tokens, pack_tokens
from common.messages.records import REASONS, BeamSequence, unpack_records


def as_sent(tokens: Iterable[Tokens]) -> dict[str, Any]:
    """The fields of `Events` with these tokens: those that fit a column are in columns."""
    columns, others = TokenColumns([], [], [], b"", []), []
    for one in tokens:
        if one.index and len(one.ids) == len(one.logprobs) == 4 and len(one.texts) == 1 and not one.top_ids:
            columns.request_ids.append(one.request_id)
            columns.attempts.append(one.attempt)
            columns.indices.append(one.index)
            columns.records += pack_tokens(one)
            columns.texts += one.texts
        else:
            others.append(one)
    return {"tokens": others, "columns": columns if columns.request_ids else None}


def unpack_sequences(records: bytes) -> list[BeamSequence]:
    """The sequences of a finished beam search, the best first."""
    ids, values, _ = unpack_records(records)
    ends = [i for i, token_id in enumerate(ids) if token_id in REASONS]
    begins = [0, *(end + 1 for end in ends)]
    assert begins[-1] == len(ids), "the last record is that of an end"
    return [
        BeamSequence(ids[begin:end], values[begin:end], values[end], REASONS[ids[end]])
        for begin, end in zip(begins, ends, strict=False)
    ]
