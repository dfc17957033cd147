"""Plays the batcher for an engine in this process: starts rows, grants blocks, collects tokens and checks
what the protocol promises.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from common.messages.plan import NewRow
from common.messages.records import BeamSequence, num_group_blocks, pack_columns, unpack_floats
from gpu_worker.engine.engine import Engine
from gpu_worker.protocol import StepResult
from tests.support.engine.row_steps import plan, start_row
from tests.support.events import unpack_sequences

AHEAD = pytest.mark.parametrize("engine", [True], ids=["ahead"], indirect=True)
"""A step is launched before the last one is read, as on a device that computes by itself. Without this mark
steps run in turn, as on CPU.
"""


def packed(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def unpacked(data: bytes) -> list[int]:
    return [int(value) for value in np.frombuffer(data, "<i4")]


@dataclass(slots=True)
class Played:
    length: int
    blocks: list[int]
    ids: list[int] = field(default_factory=list)


@dataclass
class Player:
    """Blocks go back to `free`, lowest first, as soon as the engine released them: so the next row gets what
    another just held. Those in `kept` never do.
    """

    engine: Engine
    free: list[int]
    prefill_tokens: int = 10_000
    rows: dict[int, Played] = field(default_factory=dict)
    starts: dict[int, NewRow] = field(default_factory=dict)
    again: list[NewRow] = field(default_factory=list)
    ids: dict[int, list[int]] = field(default_factory=dict)
    top_logprobs: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)  # by row and index
    prompt_logprobs: dict[int, list[float]] = field(default_factory=dict)  # of its tokens but the first
    prompt_tops: dict[int, list[dict[int, float]]] = field(default_factory=dict)
    logits: dict[int, dict[int, bytes]] = field(default_factory=dict)  # by row and first position
    sequences: dict[int, list[BeamSequence]] = field(default_factory=dict)
    ended: dict[int, tuple[str, int]] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)
    until: int = 0
    kept: set[int] = field(default_factory=set)
    tables: dict[int, list[int]] = field(default_factory=dict)

    @property
    def answer(self) -> tuple[Any, ...]:
        """What rows were told: ids, the likeliest tokens by row and index, ends."""
        return self.ids, self.top_logprobs, self.ended

    @property
    def num_proposed(self) -> int:
        """Proposals that steps have checked."""
        return sum(number for step in self.steps for _, number, _ in step.proposals)

    @property
    def num_row_steps(self) -> int:
        """Steps of each row that brought tokens."""
        return sum(len({row for row, *_ in step.sampled}) for step in self.steps)

    @property
    def share_right(self) -> float:
        """Of the proposals, those that were right: a row has one token a step by itself."""
        return (sum(map(len, self.ids.values())) - self.num_row_steps) / max(1, self.num_proposed)

    def start(self, number: int, ids: Sequence[int], end: int, base: int = 0, **params: Any) -> NewRow:
        """A row that owns blocks for its first chunk only; `run` grants the others. `params` as in
        `start_row`.
        """
        return self.start_behind([], number, ids, end, base, **params)

    def start_behind(
        self, cached: Sequence[int], number: int, ids: Sequence[int], end: int, base: int = 0, **params: Any
    ) -> NewRow:
        """As `start`, after blocks that are computed already."""
        blocks = [*cached, *self.take(1)]
        params["num_cached"] = len(cached) * self.engine.block_size
        self.rows[number] = Played(len(ids), blocks)
        self.tables[number] = blocks
        self.ids[number] = []
        self.starts[number] = start_row(number, ids, end, base, blocks, **params)
        return self.starts[number]

    def start_after(
        self, first: int, number: int, ids: Sequence[int], end: int, base: int = 0, **params: Any
    ) -> NewRow:
        """As `start`, after the blocks that a row, which has ended, has filled with the same ids and kept."""
        computed = len(unpacked(self.starts[first].ids)) + len(self.ids[first]) - 1
        num_blocks = min(computed, len(ids) - 1) // self.engine.block_size
        return self.start_behind(self.tables[first][:num_blocks], number, ids, end, base, **params)

    def start_resumed(self, numbers: Sequence[int], end: int, base: int, by: int) -> list[NewRow]:
        """Rows, `by` higher in number, that go on after the first `base` tokens of others."""
        starts = []
        for number in numbers:
            first = self.starts[number]
            known = [*unpacked(first.ids), *self.ids[number][:base]]
            params = {"sampling": first.request.sampling, "ignore_eos": first.request.stopping.ignore_eos}
            starts.append(self.start_after(number, by + number, known, end, base, **params))
        assert any(start.num_cached for start in starts)
        return starts

    def take(self, count: int) -> list[int]:
        self.free.sort()
        blocks, self.free = self.free[:count], self.free[count:]
        return blocks

    def grow(self, lead: int, served: int) -> list[tuple[int, bytes]]:
        """Plan blocks to the `served` oldest rows, as far as there are any, for up to `lead` tokens beyond
        what a row holds.
        """
        added = []
        for number, row in list(self.rows.items())[:served]:
            blocks = self.take(max(0, self.num_needed(number, lead) - len(row.blocks)))
            if blocks:
                row.blocks += blocks
                added.append((number, packed(blocks)))
        return added

    def num_needed(self, number: int, lead: int) -> int:
        """Blocks for `lead` tokens more than a row holds; a beam search has as many as its longest beam."""
        row, size, beams = self.rows[number], self.engine.block_size, self.starts[number].request.beams
        if beams is None:
            return -(-(row.length + len(row.ids) + lead) // size)
        held: Any = self.engine.rows.rows.get(number)
        searched = held.output.search.length if held else 0
        return num_group_blocks(row.length, row.length + searched + lead, beams.width, size)

    def run(
        self, starts: Sequence[NewRow], horizon: int = 4, lead: int = 4, served: int = 1000
    ) -> dict[int, list[int]]:
        """Run all rows to their end. Returns the new ids of each."""
        self.again = list(starts)
        while self.rows:
            starts, self.again = self.again, []
            self.engine.apply(plan(self.until, self.prefill_tokens, starts))
            self.until += horizon
            self.engine.apply(plan(self.until, self.prefill_tokens, blocks=self.grow(lead, served)))
            frames = list(iter(self.engine.step, None))
            assert frames, f"nothing moves: {self.rows}"
            for frame in frames:
                self.collect(frame)
        return self.ids

    def collect(self, step: StepResult) -> None:
        assert step.step <= self.until
        assert not self.steps or step.step >= self.steps[-1].step
        self.steps.append(step)
        samples = list(step.sampled)
        for number, _, token, logprob in samples:
            sampling = self.starts[number].request.sampling
            assert math.isfinite(logprob) and (logprob <= 0 or (sampling and sampling.report_logits))
            self.rows[number].ids.append(token)
            self.ids[number].append(token)
        for place, top_ids, top_logprobs in step.top_logprobs:
            number, index, token, logprob = samples[place]
            tops = dict(zip(unpacked(top_ids), unpack_floats(top_logprobs), strict=True))
            self.top_logprobs[number, index] = tops
            assert tops.get(token, logprob) == logprob
        for number, first, values, top_ids, top_logprobs in step.prompt_logprobs:
            self.add_prompt_logprobs(
                number, first, unpack_floats(values), unpacked(top_ids), unpack_floats(top_logprobs)
            )
        for number, first, values in step.logits:
            assert first not in self.logits.setdefault(number, {})
            self.logits[number][first] = values
        for number, records in step.sequences:
            self.sequences[number] = unpack_sequences(records)
        for number, why, end in step.ended:
            assert number not in self.ended
            self.ended[number] = (why, end)
        for number, kv_len in step.released:
            row = self.rows.pop(number)
            beams = self.starts[number].request.beams
            assert kv_len <= len(row.blocks) * self.engine.block_size * (beams.width if beams else 1)
            self.free += [block for block in row.blocks if block not in self.kept]
            if self.ended[number][0] == "preempted":
                self.start_again(number, row.ids)

    def start_again(self, number: int, ids: list[int]) -> None:
        """Start again a row that the engine itself preempted."""
        start, blocks = self.starts[number], self.take(1)
        del self.ended[number]
        self.starts[number] = replace(
            start,
            committed=start.committed + pack_columns(ids, [0.0] * len(ids), []),
            base=start.base + len(ids),
            blocks=packed(blocks),
        )
        self.rows[number] = Played(len(start.ids) // 4 + len(ids), blocks)
        self.again.append(self.starts[number])

    def add_prompt_logprobs(
        self, number: int, first: int, logprobs: list[float], top_ids: list[int], top_logprobs: list[float]
    ) -> None:
        """Prompt log-probabilities come in order, and none after the first sampled token."""
        prompt_logprobs = self.prompt_logprobs.setdefault(number, [])
        tops = self.prompt_tops.setdefault(number, [])
        assert first == len(prompt_logprobs) + 1 and logprobs and len(self.ids[number]) <= 1
        prompt_logprobs += logprobs
        width = len(top_ids) // len(logprobs)
        pairs = list(zip(top_ids, top_logprobs, strict=True))
        tops += [dict(pairs[i * width : (i + 1) * width]) for i in range(len(logprobs))]


def player(engine: Any, prefill_tokens: int = 1000, num_blocks: int = 0, **options: Any) -> Player:
    """A player with all blocks of an engine, or few; rows of earlier tests have all ended."""
    assert not engine.rows.rows
    free = list(range(1, (num_blocks or engine.ready.num_blocks) + 1))
    return Player(engine, free, prefill_tokens, until=engine.rows.step, **options)
