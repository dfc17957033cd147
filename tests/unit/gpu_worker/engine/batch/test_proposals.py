"""Proposals on a device on which a step is launched before the one before it is read, and beams whose blocks
always suffice: a wrong place, a wrong input or a lost block shows in all ids behind.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.records import num_group_blocks, pack_ids
from common.messages.request import BeamParams
from gpu_worker.engine.batch.beams import BeamBlocks, BeamToken, Candidate
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.rows import Rows
from tests.support.engine.batch_player import packed
from tests.support.engine.row_steps import BLOCK, EOS, start
from tests.support.engine.start_rows import plan

GUESSES = (5, 6, 7)
"""Few, so that guesses are often right."""
MAX_DECODED = 9
STEPS = 10_000


def id_behind(tokens: Sequence[int]) -> int:
    """What is sampled behind these tokens."""
    return random.Random(repr(list(tokens))).choice([EOS, *10 * GUESSES])


def answer_of(prompt: Sequence[int], end: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < end and EOS not in ids:
        ids.append(id_behind([*prompt, *ids]))
    return ids


@dataclass
class Guesser:
    """Proposes what follows, or for a share `wrong` of the tokens anything."""

    answer: list[int]
    wrong: float
    is_sure: bool
    draw: random.Random
    waits: bool = False
    method: str = "guesses"

    def propose(self, most: int, skipped: int = 0) -> list[int]:
        right = self.answer[skipped : skipped + self.draw.randint(0, min(most, 4))]
        return [self.draw.choice(GUESSES) if self.draw.random() < self.wrong else token for token in right]

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        self.answer = self.answer[len(tokens) :]


@dataclass
class Step:
    slices: list[RowSlice]
    sampled: list[int]

    @property
    def is_unsure(self) -> bool:
        return any(row_slice.is_unsure for row_slice in self.slices)


@dataclass
class Device:
    """Computes steps in the order in which they are launched.

    Attributes:
        caches: of each row the id at each position.
        sampled: by the step that was launched last.
    """

    rows: Rows
    caches: dict[int, dict[int, int]] = field(default_factory=dict)
    sampled: list[int] = field(default_factory=list)

    def launch(self) -> Step | None:
        slices = self.rows.launch()
        assert sum(row_slice.count for row_slice in slices if row_slice.decodes) <= MAX_DECODED
        self.sampled = [token for row_slice in slices for token in self.compute(row_slice)]
        return Step(slices, self.sampled) if slices else None

    def compute(self, row_slice: RowSlice) -> list[int]:
        row, cache = row_slice.row, self.caches.setdefault(row_slice.row.number, {})
        assert row_slice.kv_len <= len(row.blocks) * BLOCK
        source = row_slice.source_place
        newest = row.last_id if source is None else self.sampled[source]
        chunk = row.ids[row_slice.begin : row_slice.kv_len].tolist()
        cache |= enumerate([newest, *row_slice.proposed] if row_slice.decodes else chunk, row_slice.begin)
        ends = range(row_slice.kv_len - row_slice.num_samples, row_slice.kv_len)
        return [id_behind([cache[place] for place in range(end + 1)]) for end in ends]


def run(device: Device, ahead: bool, stop_at: int) -> dict[int, list[int]]:
    """All rows to their end, one of which is stopped at a step → their ids."""
    rows, in_flight, block = device.rows, None, 1000
    ids: dict[int, list[int]] = {row: [] for row in rows.rows}
    while rows.rows:
        assert rows.step < 1000 and block < 10_000
        if rows.step >= stop_at:
            rows.apply(plan(STEPS, 7, stops=[(0, "cancelled")]))
        current = in_flight or device.launch()
        in_flight = device.launch() if current and ahead and not current.is_unsure else None
        if current:
            rows.collect(current.slices, current.sampled, [0.0] * len(current.sampled))
        else:
            block += 10
            rows.apply(plan(STEPS, 7, blocks=[(row, packed([block + row])) for row in rows.rows]))
        result = rows.take_result()
        for row, index, token, _ in result.sampled:
            assert index == len(ids[row])
            ids[row].append(token)
        for row, kv_len in result.released:
            tokens = [*range(3 + row), *ids[row]]
            assert [device.caches.get(row, {})[place] for place in range(kv_len)] == tokens[:kv_len]
    return ids


@given(
    ends=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    ahead=st.booleans(),
    sure=st.booleans(),
    wrong=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
    num_blocks=st.sampled_from([2, 100]),
    stop_at=st.sampled_from([STEPS, 4, 9]),
)
def test_ids_are_those_of_one_token_a_step(
    ends: list[int], ahead: bool, sure: bool, wrong: float, seed: int, num_blocks: int, stop_at: int
) -> None:
    """Whatever is proposed, wherever rows run out of blocks, and whichever is stopped."""
    answers = [answer_of(range(3 + row), end) for row, end in enumerate(ends)]
    rows = Rows(BLOCK, [EOS], max_decoded=MAX_DECODED)
    starts = [start(row, 3 + row, num_blocks, end=end) for row, end in enumerate(ends)]
    rows.apply(plan(STEPS, 7, starts))
    for row, answer in enumerate(answers):
        rows.rows[row].proposer = Guesser(list(answer), wrong, sure, random.Random(seed + row))
    device = Device(rows)
    ids = run(device, ahead, stop_at)
    stopped = ids.pop(0)
    assert stopped == answers[0][: len(stopped)] and (stop_at < STEPS or stopped == answers[0])
    assert list(ids.values()) == answers[1:]


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


def run_search(num_prompt: int, max_new_tokens: int, seed: int, num_blocks_at_once: int) -> None:
    """Run a search whose candidates are random; blocks are granted as they are needed, few at a time."""
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
        memory.copy(rows.take_copies())
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
        rows.collect(slices, [7] * num_samples, [-1.0] * num_samples, candidates={1: candidates})
        check_blocks(group.blocks)
    result = rows.take_result()
    assert [row for row, _ in result.released] == [1] and not rows.groups and not rows.copies
    assert len(result.sequences) == 1


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
    run_search(num_prompt, max_new_tokens, seed, num_blocks_at_once)
