"""The text of rows, without broker and engine."""

from typing import Any

from common.messages.plan import NewRow
from common.messages.records import RECORD, pack_floats, pack_ids, pack_records, unpack_ids, unpack_records
from common.messages.request import Generate, StoppingParams
from gpu_worker.agent.publish import Spill
from gpu_worker.agent.row_text import RowTable, RowText
from tests.support.agents import PROMPT
from tests.support.tokenizer import TOKENIZER
from tests.support.tokenizer import ids as ids_of


def start_row(
    table: RowTable, row: int = 1, committed: bytes = b"", blocks: list[int] | None = None, **fields: Any
) -> RowText:
    stopping = StoppingParams(10, **fields)
    request = Generate(f"r{row}", "d", pack_ids(PROMPT), stopping)
    base = len(committed) // RECORD.size
    return table.start(NewRow(row, 1, base, committed, pack_ids(blocks or [1]), request))


def committed(ids: list[int]) -> bytes:
    return bytes(pack_records(pack_ids(ids), pack_floats([-1.0] * len(ids)), b"", b""))


def test_new_tokens_are_returned_once() -> None:
    row = start_row(RowTable(TOKENIZER))
    the, sea = ids_of(" the sea")
    assert (row.add(the, -0.5), row.add(sea, -0.25)) == (" the", " sea")
    tokens = row.new_tokens()
    assert (tokens.index, unpack_ids(tokens.ids), tokens.texts) == (0, [the, sea], [" the", " sea"])
    row.add(the, -0.5)
    tokens = row.new_tokens()
    assert (tokens.index, unpack_ids(tokens.ids), tokens.texts) == (2, [the], [" the"])


def test_a_stop_string_across_two_tokens_matches_with_the_second() -> None:
    row = start_row(RowTable(TOKENIZER), stop=["e sea"])
    assert [row.matches_stop_string(row.add(token, -0.5)) for token in ids_of(" the sea")] == [False, True]


def test_a_stop_string_within_min_new_tokens_is_ignored() -> None:
    row = start_row(RowTable(TOKENIZER), stop=["the"], min_new_tokens=1)
    assert [row.matches_stop_string(row.add(token, -0.5)) for token in ids_of(" the sea")] == [False, False]


def test_committed_tokens_count_but_are_not_new() -> None:
    the, sea = ids_of(" the sea")
    row = start_row(RowTable(TOKENIZER), committed=committed([the]), stop=["the sea"])
    assert (row.num_tokens, row.num_spilled, row.texts, Spill.rest(row).records) == (1, 1, [], b"")
    assert row.matches_stop_string(row.add(sea, -0.5))
    assert row.new_tokens().index == 1 and unpack_records(Spill.rest(row).records)[0] == [sea]


def test_live_rows_have_not_ended() -> None:
    table = RowTable(TOKENIZER)
    first, second = start_row(table, 1), start_row(table, 2)
    first.ended = True
    assert table.live == [second]


def test_blocks_are_counted_for_prompt_and_tokens_those_that_rows_share_once() -> None:
    table = RowTable(TOKENIZER)
    row = start_row(table, blocks=[1, 2, 3])
    assert table.num_blocks(block_size=2) == 1
    row.add(5, -0.5)
    start_row(table, 2, blocks=[4])
    assert table.num_blocks(block_size=2) == 3
    start_row(table, 3, blocks=[1])
    assert table.num_blocks(block_size=2) == 3
