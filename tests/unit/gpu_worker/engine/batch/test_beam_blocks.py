"""Blocks of beams: they suffice, and a wrong place or a lost block shows in what a beam reads."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.records import num_group_blocks, pack_ids
from common.messages.request import BeamParams
from gpu_worker.engine.batch.beams import BeamBlocks, BeamToken
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.step_result import Candidate, StepSamples
from tests.support.engine.row_steps import BLOCK, EOS, start
from tests.support.engine.start_rows import plan

WIDTH = 4


class Memory:
    """What each block holds, by its offsets: a hash of all tokens up to there."""

    def __init__(self) -> None:
        self.pages: dict[int, list[int]] = {}

    def copy(self, copies: list[tuple[int, int]]) -> None:
        assert not {source for source, _ in copies} & {target for _, target in copies}
        for source, target in copies:
            self.pages[target] = list(self.pages[source])

    def write(self, row_slice: RowSlice, ids: list[int]) -> None:
        """Write a slice of a row with these ids, and check what it reads."""
        blocks = row_slice.row.blocks.tolist()
        for position in range(row_slice.begin, row_slice.kv_len):
            page = self.pages.setdefault(blocks[position // BLOCK], [0] * BLOCK)
            page[position % BLOCK] = hash(tuple(ids[: position + 1]))
        for position in range(row_slice.kv_len):
            page = self.pages[blocks[position // BLOCK]]
            assert page[position % BLOCK] == hash(tuple(ids[: position + 1])), position


def texts_of(last: BeamToken | None) -> list[int]:
    return [*texts_of(last.previous), last.token] if last else []


def check_blocks(blocks: BeamBlocks | None) -> None:
    """Each block is free, or counted as often as beams have it."""
    if blocks is not None:
        uses = Counter(block for table in blocks.tables for block in table)
        assert uses == blocks.uses and not set(uses) & set(blocks.free)
        assert len(set(blocks.free)) == len(blocks.free)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3 * BLOCK),
    st.integers(1, 4 * BLOCK),
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 100]),
)
def test_beams_read_their_own_tokens_from_blocks_that_suffice(
    num_prompt: int, max_new_tokens: int, seed: int, num_blocks_at_once: int
) -> None:
    """Candidates of a search are random; blocks are granted as they are needed, few at a time."""
    random, memory = np.random.default_rng(seed), Memory()
    free = list(range(1, 1 + num_group_blocks(num_prompt, num_prompt + max_new_tokens - 1, WIDTH, BLOCK)))
    first = -(-num_prompt // BLOCK)
    beams = BeamParams(WIDTH, early_stopping=int(random.integers(3)))
    rows = Rows(BLOCK, [EOS])
    row = start(1, num_prompt, 0, end=max_new_tokens, beams=beams)
    rows.apply(plan(10_000, 1000, [replace(row, blocks=pack_ids(free[:first]))]))
    rest = free[first:]
    while 1 in rows.rows:
        slices = rows.launch()
        if not slices:
            assert rest, "the blocks do not suffice"
            more, rest = rest[:num_blocks_at_once], rest[num_blocks_at_once:]
            rows.apply(plan(10_000, 1000, blocks=[(1, pack_ids(more))]))
            continue
        memory.copy(rows.copies)
        rows.copies.clear()
        group = rows.groups[1]
        texts = [texts_of(beam.last) for beam in group.search.beams]
        for row_slice, text in zip(slices, texts, strict=True):
            memory.write(row_slice, [*range(num_prompt), *text])
        candidates = [
            Candidate(int(parent), int(token), -1.0, -float(total))
            for parent, token, total in zip(
                random.integers(len(texts), size=12),
                random.choice([EOS, *range(10, 200)], 12),
                np.sort(random.random(12)) + group.search.length,
                strict=True,
            )
        ]
        num_samples = len(slices)
        rows.collect(slices, StepSamples([7] * num_samples, [-1.0] * num_samples, candidates={1: candidates}))
        check_blocks(group.blocks)
    result = rows.take_result()
    assert [row for row, _ in result.released] == [1] and not rows.groups and not rows.copies
    assert len(result.sequences) == 1
