"""Messages with tokens, as a worker sends them."""

from collections.abc import Iterable
from typing import Any

from common.messages.events import TokenColumns, Tokens, pack_tokens


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
