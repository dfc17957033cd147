"""Messages with tokens, as a worker sends them: events of a scripted answer, sequences of a beam search, and
streams that take them.
"""

from collections.abc import Iterable
from typing import Any

from api.streams.stream import Stream
from common.messages.codec import encode
from common.messages.events import Events, Terminal, TokenColumns, Tokens, pack_tokens
from common.messages.records import REASONS, BeamSequence, pack_floats, pack_ids, unpack_records
from common.messages.request import Generate, StoppingParams
from tests.support.tokenizer import TOKENIZER, model_tokenizer


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


# --- events -------------------------------------------------------------------------------------------------

IDS: list[int] = TOKENIZER.encode(" zero one two three four five six seven eight nine").ids


def tokens(first: int, last: int, attempt: int = 1, request_id: str = "r") -> Tokens:
    """Tokens `first` up to `last`, exclusive, of the scripted answer; attempt n adds n - 1 to each id, so
    that it shows.
    """
    ids = [token_id + attempt - 1 for token_id in IDS[first:last]]
    return Tokens(
        request_id,
        attempt,
        first,
        pack_ids(ids),
        pack_floats([0.0] * len(ids)),
        [TOKENIZER.decode([i]) for i in ids],
    )


def new_stream(request_id: str = "r", stopping: dict[str, Any] | None = None, **options: Any) -> Stream:
    limits = StoppingParams(100, **stopping or {})
    return Stream(Generate(request_id, "d", pack_ids([28]), limits, **options), model_tokenizer())


def end(num_tokens: int, request_id: str = "r") -> Terminal:
    return Terminal(request_id, "length", num_tokens)


def event_message(sequence: int, *events: Tokens | Terminal, source: str = "w0") -> bytes:
    tokens = as_sent(event for event in events if isinstance(event, Tokens))
    terminals = [event for event in events if isinstance(event, Terminal)]
    return encode(Events(source, sequence, terminals=terminals, **tokens))
