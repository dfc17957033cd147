"""Rows as an agent starts them, with the parameters of their requests beside the others; and plans."""

from collections.abc import Sequence
from typing import Any

from common.messages.plan import NewRow, Plan
from common.messages.records import pack_columns, pack_ids
from common.messages.request import SERVICE_CLASSES, Generate, Picture, StoppingParams


def start_row(
    row: int,
    ids: Sequence[int],
    max_new_tokens: int,
    base: int = 0,
    blocks: Sequence[int] = (),
    num_cached: int = 0,
    class_index: int = 0,
    pictures: Sequence[tuple[int, int, str, bytes]] = (),
    top_n_tokens: int = 0,
    **params: Any,
) -> NewRow:
    """The last `base` of the `ids` are those of earlier attempts. `params` are fields of `Generate` and of
    `StoppingParams`; `pictures` have (place, number of placeholders, digest, bytes).
    """
    stopping = {name: params.pop(name) for name in StoppingParams.__slots__ if name in params}
    num_prompt = len(ids) - base
    tops = [[(0, 0.0)] * top_n_tokens] * base if top_n_tokens else []
    request = Generate(
        f"r{row}",
        "d",
        pack_ids(ids[:num_prompt]),
        StoppingParams(max_new_tokens, **stopping),
        top_n_tokens=top_n_tokens,
        class_name=SERVICE_CLASSES[class_index],
        pictures=[Picture(digest, place, count) for place, count, digest, _ in pictures],
        **params,
    )
    committed = pack_columns(ids[num_prompt:], [0.0] * base, tops)
    contents = [content for *_, content in pictures]
    return NewRow(row, 1, base, committed, pack_ids(blocks), request, num_cached, contents)


def plan(until: int, prefill_tokens: int, starts: Sequence[NewRow] = (), **fields: Any) -> Plan:
    """A plan as the engine has it."""
    return Plan(1, 1, until, prefill_tokens, [*starts], **fields)
