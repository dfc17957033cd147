"""A worker without model, text or Redis: the engine's own rows, with reports. It complains when a plan breaks
the rules of blocks.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from zlib import crc32

from common.messages.events import INTERRUPTED
from common.messages.plan import HeldRow, NewRow, Plan, Report
from common.messages.records import pack_ids, unpack_ids
from common.messages.request import HASHED_TOKENS, block_names, extend_hashes
from gpu_worker.engine.batch.adapters import Adapter
from gpu_worker.engine.batch.beams import BeamGroup
from gpu_worker.engine.batch.row import Row, RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.step_result import Candidate, StepSamples
from gpu_worker.protocol import StepResult
from tests.support.speculation.knowing_proposer import KnowingProposer

FIRST_ID, EOS = 1_000_000, 2
ANSWER = range(FIRST_ID, FIRST_ID + 2**16)
"""What every request generates, up to its end."""


def generated_id(index: int) -> int:
    """The token that every request generates at this index."""
    return ANSWER[index]


def ends_at(request_id: str, num_tokens: int, chance: float) -> bool:
    """Whether a request's token at this index ends it, on every worker and in every attempt."""
    return crc32(f"{request_id} {num_tokens}".encode()) < chance * 2**32


@dataclass(eq=False)
class SimulatedRow:
    """A row as the worker sees it: `row` is the engine's."""

    start: NewRow
    row: Row
    told_as: tuple[int, int] = (0, 0)
    is_ahead: bool = False
    ids: bytes = b""
    hashes: bytes = b""

    def __post_init__(self) -> None:
        self.ids = self.start.request.prompt_ids
        self.hashes = self.start.request.block_hashes

    @property
    def kv_len(self) -> int:
        return self.row.kv_len

    @property
    def num_tokens(self) -> int:
        return self.row.collected_index

    @property
    def is_prefilled(self) -> bool:
        return self.told_as != (0, 0)

    def names(self, block_size: int) -> list[bytes]:
        """Names of its full blocks; none if it shares no blocks."""
        if self.start.request.block_hashes:
            known = len(self.ids) // 4 - self.start.request.num_prompt
            self.ids += pack_ids(ANSWER[known : self.num_tokens])
            self.hashes = extend_hashes(self.hashes, self.ids[: 4 * self.kv_len])
        return block_names(self.hashes, block_size)[: self.kv_len // block_size]

    @property
    def generated_hashes(self) -> bytes:
        self.names(HASHED_TOKENS)
        return self.hashes[len(self.start.request.block_hashes) :]


def candidates(group: BeamGroup) -> list[Candidate]:
    """Continuations of which none ends a beam."""
    num_beams = len(group.search.beams)
    return [Candidate(i % num_beams, FIRST_ID + i, -1.0, -1.0) for i in range(group.search.params.width)]


@dataclass
class SimulatedWorker:
    """A worker that ends rows at their last token (`ends_at`) or their limit, and releases each some reports
    later (`draw`).
    """

    block_size: int
    draw: random.Random
    eos_chance: float = 0.02
    num_speculated: int = 0
    rows: dict[int, SimulatedRow] = field(default_factory=dict)
    leaving: list[tuple[int, SimulatedRow]] = field(default_factory=list)
    owned: dict[int, set[int]] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    computed: Counter[str] = field(default_factory=Counter)
    committed: dict[str, int] = field(default_factory=dict)
    plan: int = 0
    sequence: int = 0
    num_prefilled: int = 0
    num_decoded: int = 0
    most_rows: int = 0
    last_row: int = 0
    ended_requests: set[str] = field(default_factory=set)
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.engine = Rows(self.block_size, [EOS], prefix_caching=True, adapters=self.adapters)
        self.clear()

    @property
    def step(self) -> int:
        return self.engine.step

    @property
    def until(self) -> int:
        return self.engine.grant.until

    @property
    def report_at(self) -> int:
        return self.engine.grant.report_at

    def clear(self) -> None:
        self.sequence += 1
        self.report = Report(self.sequence, 1, self.plan, self.step)

    def apply_plan(self, plan: Plan) -> None:
        assert plan.number > self.plan, "plans come in order"
        self.plan = plan.number
        self.adapters |= {one.request.adapter: Adapter(one.request.adapter) for one in plan.starts}
        self.engine.apply(replace(plan, until=max(self.until, plan.until)))
        self.note(self.engine.take_result())
        for number, blocks in plan.blocks:
            if number in self.rows:
                self.own(number, unpack_ids(blocks))
        for start in plan.starts:
            assert start.row > self.last_row, "row numbers go on"
            self.last_row = start.row
            row = self.engine.rows[start.row]
            row.proposer = KnowingProposer(
                ANSWER, start.base, 0, self.draw.randrange(2**32), [], self.num_speculated, False
            )
            self.rows[start.row] = simulated = SimulatedRow(start, row)
            num_shared, held = start.num_cached // self.block_size, unpack_ids(start.blocks)
            self.share(simulated, held[:num_shared])
            self.own(start.row, held[num_shared:])

    def share(self, row: SimulatedRow, blocks: list[int]) -> None:
        assert len(blocks) * self.block_size == row.start.num_cached < len(row.row.ids)
        for name, block in zip(row.names(self.block_size), blocks, strict=True):
            held = self.contents.get(block)
            assert held == name, f"block {block} holds {held!r}"
            self.owned.setdefault(block, set()).add(row.start.row)

    def own(self, number: int, blocks: list[int]) -> None:
        for block in blocks:
            assert block > 0, "block 0 is scratch"
            assert block not in self.owned, (
                f"block {block} was handed out before row {self.owned.get(block)} was released"
            )
            self.owned[block] = {number}
            self.contents.pop(block, None)

    def end(self, number: int, why: str) -> None:
        row = self.rows.pop(number)
        self.report.ended.append((number, why, row.num_tokens))
        self.leaving.append((number, row))
        if why not in INTERRUPTED:
            self.ended_requests.add(row.start.request.request_id)

    def run(self) -> bool:
        """Run one step, if one is granted and a row can take part."""
        slices = self.engine.launch()
        self.most_rows = max(self.most_rows, len(slices))
        ids = [self.sample(one, place) for one in slices for place in range(one.num_samples)]
        found = {number: candidates(group) for number, group in self.engine.groups.items()}
        self.engine.collect(slices, StepSamples(ids, [0.0] * len(ids), candidates=found))
        for one in slices:
            self.fill(self.rows[one.row.number], one)
        self.note(self.engine.take_result())
        return bool(slices)

    def sample(self, one: RowSlice, place: int) -> int:
        index = one.first_index + place
        request_id = self.rows[one.row.number].start.request.request_id
        return EOS if ends_at(request_id, index + 1, self.eos_chance) else generated_id(index)

    def fill(self, row: SimulatedRow, one: RowSlice) -> None:
        """Note what a row has computed: blocks that are full now hold its ids."""
        count, request = max(0, row.kv_len - one.begin), row.start.request
        self.computed[request.tenant] += count
        if one.decodes:
            self.num_decoded += count
            row.is_ahead |= count > 1
        else:
            self.num_prefilled += count
        if row.num_tokens > row.start.base:
            self.committed[request.request_id] = row.num_tokens
        filled = range(one.begin // self.block_size, row.kv_len // self.block_size)
        if filled and (names := row.names(self.block_size)):
            for i in filled:
                self.contents[int(row.row.blocks[i])] = names[i]

    def note(self, result: StepResult) -> None:
        """Report what a step has brought."""
        for number, kv_len in result.prefilled:
            self.rows[number].told_as = kv_len, self.step
            self.report.prefilled.append((number, kv_len, self.step))
        for number, why, _ in result.ended:
            self.end(number, why)

    def release(self) -> None:
        """Release rows that have ended, some sooner and some later."""
        staying = []
        for number, row in self.leaving:
            if self.draw.random() < 0.5:
                staying.append((number, row))
                continue
            for block in row.row.blocks.tolist():
                self.owned[block].remove(number)
                if not self.owned[block]:
                    del self.owned[block]
            self.report.released.append((number, row.kv_len))
            if hashes := row.generated_hashes:
                self.report.hashes.append((number, hashes))
        self.leaving = staying

    def answer_takeover(self, epoch: int) -> Report:
        """Answer with the rows that it holds. Unread reports are lost, as those to an earlier batcher are."""
        self.take_lengths()
        self.clear()
        self.plan = 1
        held = [self.held(number, row, False) for number, row in self.rows.items()]
        held += [self.held(number, row, True) for number, row in self.leaving]
        return Report(self.sequence, epoch, 1, self.step, takeover=True, held=held, last_row=self.last_row)

    def held(self, number: int, row: SimulatedRow, ended: bool) -> HeldRow:
        start, (kv_len, step), blocks = row.start, row.told_as, row.row.blocks.tobytes()
        own = number, start.request.request_id, start.attempt, start.base
        return HeldRow(*own, row.num_tokens, blocks, kv_len, step, ended, start.num_cached)

    def take_lengths(self) -> list[tuple[int, int, int]]:
        """Take the lengths of rows that are ahead of one token a step."""
        ahead = [(number, row) for number, row in self.rows.items() if row.is_ahead]
        for _, row in ahead:
            row.told_as, row.is_ahead = (row.kv_len, self.step), False
        return [(number, *row.told_as) for number, row in ahead]

    def take_report(self) -> Report:
        report = replace(self.report, plan=self.plan, step=self.step, lengths=self.take_lengths())
        self.clear()
        return report
