"""Which units of pictures a step encodes, and how they share its budget with the tokens of prompts."""

from concurrent.futures import Future
from typing import Any

import numpy as np

from gpu_worker.engine.batch.encoding import EncodingSchedule
from gpu_worker.engine.batch.row import Row
from gpu_worker.engine.batch.row_pictures import PictureShape, PictureState, PlacedPicture, RowPictures
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.protocol import Grant, StartRow
from tests.support.engine.row_steps import run_step
from tests.support.engine.start_rows import start_row

BLOCK = 16
TILE = 8
"""Placeholders of a tile, and what its encoding costs."""


def row_of(num_tiles: int, before: int = 4, after: int = 4, blocks: int = 100, cost: float = 1.0) -> Row:
    """A prompt of `before` tokens, a picture, and `after` tokens."""
    shape: Future[PictureShape] = Future()
    shape.set_result(PictureShape(num_tiles * TILE, num_tiles))
    picture = PictureState(num_tiles * TILE, shape, token_cost=cost)
    places = np.arange(before, before + num_tiles * TILE)
    ids = np.zeros(before + num_tiles * TILE + after, np.int32)
    row = Row(0, ids, 0, 9, np.arange(1, 1 + blocks, dtype=np.int32))
    row.pictures = RowPictures([PlacedPicture(picture, places)])
    return row


def scheduled(
    schedule: EncodingSchedule, row: Row, budget: int, is_mixed: bool = True
) -> tuple[list[int], int]:
    """Numbers of the units of a step, and what is left of the budget."""
    left = schedule.schedule([row], BLOCK, budget, is_mixed)
    return [unit.number for unit in schedule.take()], left


def test_units_share_the_budget_with_tokens() -> None:
    schedule, row = EncodingSchedule(), row_of(num_tiles=4)
    assert scheduled(schedule, row, 20) == ([0, 1], 4)
    row.kv_len = 8
    assert scheduled(schedule, row, 20) == ([2, 3], 4)
    assert scheduled(schedule, row, 20) == ([], 20)


def test_a_unit_larger_than_a_budget_is_made_up_for_beside_rows_that_decode() -> None:
    schedule, row = EncodingSchedule(), row_of(num_tiles=2, cost=5.0)  # 40 tokens a unit
    assert scheduled(schedule, row, 16) == ([0], 0)
    assert scheduled(schedule, row, 16) == ([], 0)
    assert scheduled(schedule, row, 16) == ([], 8)
    assert scheduled(schedule, row, 16) == ([1], 0)
    assert scheduled(schedule, row, 16, is_mixed=False) == ([], 16)  # nobody decodes: nothing to make up for


def test_units_beyond_the_blocks_of_a_row_wait() -> None:
    row = row_of(num_tiles=4, blocks=1)  # 16 tokens: the picture's first 12 placeholders
    assert scheduled(EncodingSchedule(), row, 1000)[0] == [0, 1]


def test_prompts_first_in_line_are_not_held_up_by_pictures() -> None:
    text = Row(1, np.zeros(16, np.int32), 0, 9, np.arange(1, 2, dtype=np.int32))
    schedule = EncodingSchedule()
    assert schedule.schedule([text, row_of(num_tiles=4, cost=5.0)], BLOCK, 20, is_mixed=True) == 20
    assert schedule.take() == []


def test_a_row_is_computed_up_to_the_first_placeholder_that_is_not_encoded() -> None:
    row = row_of(num_tiles=3)

    def pictures_of(start: Any) -> RowPictures | None:
        return row.pictures

    rows = Rows(block_size=BLOCK, eos_ids=[], make_pictures=pictures_of)
    start = start_row(0, row.ids.tolist(), 9, blocks=list(range(1, 9)))
    rows.apply(Grant(100, 14, [start]))
    chunks: list[tuple[int, int, list[int]]] = []
    while not chunks or chunks[-1][1] < len(row.ids):
        slices = rows.launch()
        units = [unit.number for unit in rows.encoding.take()]
        chunks += [(one.begin, one.kv_len, units) for one in slices]
        rows.collect(slices, [0] * sum(one.num_samples for one in slices), [0.0] * len(slices))
    # 14 tokens a step: a tile costs 8 of them
    assert chunks == [(0, 6, [0]), (6, 12, [1]), (12, 18, [2]), (18, 32, [])]


def test_rows_of_batches_decode_while_a_callers_picture_takes_the_whole_step() -> None:
    """A step without any row would be taken for the end of all work."""
    picture = row_of(num_tiles=1, before=0, cost=5.0)

    def pictures_of(start: StartRow) -> RowPictures | None:
        return picture.pictures if start.class_index == 0 else None

    rows = Rows(block_size=BLOCK, eos_ids=[], make_pictures=pictures_of)
    bulk = [start_row(number, range(3), 9, blocks=[number + 1], class_index=2) for number in range(8)]
    rows.apply(Grant(100, 24, bulk))
    run_step(rows)
    rows.apply(Grant(100, 24, [start_row(8, picture.ids.tolist(), 9, blocks=[9, 10], class_index=0)]))
    assert [one[0] for one in run_step(rows)[0]] == [*range(9)]
    assert [one[0] for one in run_step(rows)[0]] == [8]
