"""Proposals on a device on which a step is launched before the one before it is read. What it samples is a
function of what its cache holds, so a wrong place, a wrong input or a lost token shows in all ids behind.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.protocol import Grant
from tests.support.engine.batch_player import packed
from tests.support.engine.row_steps import BLOCK, EOS, start

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
            rows.apply(Grant(STEPS, 7, stops=[(0, "cancelled")]))
        current = in_flight or device.launch()
        in_flight = device.launch() if current and ahead and not current.is_unsure else None
        if current:
            rows.collect(current.slices, current.sampled, [0.0] * len(current.sampled))
        else:
            block += 10
            rows.apply(Grant(STEPS, 7, blocks=[(row, packed([block + row])) for row in rows.rows]))
        result = rows.take_result()
        for row, index, token, _ in result.samples:
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
    rows.apply(Grant(STEPS, 7, starts))
    for row, answer in enumerate(answers):
        rows.rows[row].proposer = Guesser(list(answer), wrong, sure, random.Random(seed + row))
    device = Device(rows)
    ids = run(device, ahead, stop_at)
    stopped = ids.pop(0)
    assert stopped == answers[0][: len(stopped)] and (stop_at < STEPS or stopped == answers[0])
    assert list(ids.values()) == answers[1:]


class Fixed:
    """Proposes three of these ids at a time."""

    is_sure = True
    waits = False
    method = "fixed"

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def propose(self, most: int, skipped: int = 0) -> list[int]:
        return self.ids[skipped : skipped + min(most, 3)]

    def learn(self, tokens: Sequence[int], num_proposed: int) -> None:
        self.ids = self.ids[len(tokens) :]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_row_goes_on_behind_sure_proposals_that_are_not_read(wrong: bool) -> None:
    """It proposes what no step in flight samples. Behind a wrong one the step in flight is void."""
    rows = Rows(BLOCK, [])
    rows.apply(Grant(STEPS, 7, [start(0, 3, end=30)]))
    answer = answer_of(range(3), 30)
    assert len(answer) == 13
    device, row = Device(rows), rows.rows[0]
    prompt = device.launch()
    row.proposer = Fixed([answer[0], answer[1], 99 if wrong else answer[2], *answer[3:]])
    steps = [prompt, device.launch(), device.launch()]
    for step in steps[:2]:
        assert step
        rows.collect(step.slices, step.sampled, [0.0] * len(step.sampled))
    steps.append(device.launch())
    slices = [step.slices[0] for step in steps if step]
    assert [(one.begin, one.count, one.source_place) for one in slices[:3]] == [
        (0, 3, None),
        (3, 4, 0),
        (7, 4, 3),
    ]
    assert (slices[2].is_void, slices[3].begin, slices[3].source_place) == (
        (True, 5, None) if wrong else (False, 11, 3)
    )
    assert [token for _, _, token, _ in rows.take_result().samples] == answer[: 3 if wrong else 5]


def test_a_row_does_not_go_on_behind_guesses_that_are_not_read() -> None:
    rows = Rows(BLOCK, [])
    rows.apply(Grant(STEPS, 7, [start(0, 3), start(1, 3)]))
    for row in rows.rows.values():
        row.proposer = Guesser([7] * 20, 0.0, False, random.Random(3))
    device = Device(rows)
    steps = [device.launch() for _ in range(2)]
    assert [step and step.is_unsure for step in steps] == [False, True]


def test_proposals_leave_room_for_the_tokens_of_other_rows() -> None:
    rows = Rows(BLOCK, [], max_decoded=5)
    rows.apply(Grant(STEPS, 100, [start(row, 3) for row in range(3)]))
    for row in rows.rows.values():
        row.proposer = Fixed([7] * 20)
    rows.collect(slices := rows.launch(), [7] * 3, [0.0] * 3)
    assert [row_slice.count for row_slice in slices] == [3, 3, 3]
    assert [row_slice.count for row_slice in rows.launch()] == [3, 1, 1]
