"""Rows without an engine: how they start, and their steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from common.messages.plan import NewRow, Plan
from common.messages.records import pack_columns, pack_ids
from common.messages.request import SERVICE_CLASSES, Generate, Picture, StoppingParams
from gpu_worker.engine.batch.row import Row, RowSlice, StepSlices
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.step_result import StepSamples
from gpu_worker.protocol import StepResult


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


# --- row steps ----------------------------------------------------------------------------------------------

BLOCK = 4
EOS = 2
TEXT = 7
"""Any id that ends no row."""


def start(
    row: int,
    num_ids: int,
    num_blocks: int = 100,
    base: int = 0,
    end: int = 10,
    **params: Any,
) -> NewRow:
    blocks = range(1 + 100 * row, 1 + 100 * row + num_blocks)
    return start_row(row, range(num_ids), end, base, blocks, **params)


def rows_with(*starts: NewRow, prefill_tokens: int = 1000) -> Rows:
    rows = Rows(BLOCK, [EOS])
    rows.apply(plan(1000, prefill_tokens, list(starts)))
    return rows


def spans_of(slices: Sequence[RowSlice]) -> list[tuple[int, int, int, bool]]:
    return [
        (row_slice.row.number, row_slice.begin, row_slice.count, row_slice.samples) for row_slice in slices
    ]


def collect(rows: Rows, slices: StepSlices, token: int = TEXT) -> StepResult:
    num_samples = sum(row_slice.samples for row_slice in slices)
    rows.collect(slices, StepSamples([token] * num_samples, [-0.5] * num_samples))
    return rows.take_result()


def run_step(rows: Rows) -> tuple[list[tuple[int, int, int, bool]], StepResult]:
    slices = rows.launch()
    return spans_of(slices), collect(rows, slices, TEXT)


def sampled_rows(result: StepResult) -> list[int]:
    """Rows that sampled."""
    return [row for row, *_ in result.sampled]


def sampled_indices(result: StepResult) -> list[int]:
    return [index for _, index, *_ in result.sampled]


# --- attention steps ----------------------------------------------------------------------------------------

CPU = torch.device("cpu")

BLOCKS = 99

STEPS = [
    [(0, 0, 41), (1, 0, 1), (2, 0, 33)],
    [(0, 41, 29), (1, 1, 1), (2, 33, 1), (3, 0, 90)],
    [(0, 70, 1), (1, 2, 1), (3, 90, 1)],
]
"""(row, begin, tokens): prompts in chunks, and rows that decode beside them."""


def rows(block_size: int, lengths: tuple[int, ...]) -> list[Row]:
    """With blocks in no order."""
    shuffled = np.random.default_rng(0).permutation(np.arange(1, BLOCKS + 1)).astype(np.int32)
    sizes = [-(-(length + 4) // block_size) for length in lengths]
    parts = np.split(shuffled, np.cumsum(sizes))
    return [
        Row(number, np.zeros(length, np.int32), 9, part)
        for number, (length, part) in enumerate(zip(lengths, parts, strict=False))
    ]


def chunk(row: Row, begin: int, count: int) -> RowSlice:
    return RowSlice(row, begin, count, samples=True)
