"""A worker without model, text or Redis: it obeys plans and makes reports, and complains when a plan breaks
the rules of blocks.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from zlib import crc32

from common.messages.events import INTERRUPTED
from common.messages.plan import HeldRow, NewRow, Plan, Report
from common.messages.records import pack_ids, unpack_ids
from common.messages.request import HASHED_TOKENS, block_names, class_index, extend_hashes
from gpu_worker.engine.batch.prefill import PATIENCE
from gpu_worker.engine.batch.prefill_budget import PrefillBudget, StepBudget

NO_PLAN = Plan(epoch=0, number=0, until=0, prefill_tokens=0)


def generated_id(index: int) -> int:
    """The token that every request generates at this index."""
    return 1_000_000 + index


def ends_at(request_id: str, num_tokens: int, chance: float) -> bool:
    """Whether a request's token at this index ends it, on every worker and in every attempt."""
    return crc32(f"{request_id} {num_tokens}".encode()) < chance * 2**32


@dataclass(eq=False)
class SimulatedRow:
    start: NewRow
    blocks: list[int]
    kv_len: int = 0
    num_tokens: int = 0
    told_as: tuple[int, int] = (0, 0)
    is_ahead: bool = False
    num_passed: int = 0
    ids: bytes = b""
    hashes: bytes = b""

    def __post_init__(self) -> None:
        self.ids = self.start.request.prompt_ids + pack_ids([*map(generated_id, range(self.num_tokens))])
        self.hashes = self.start.request.block_hashes

    def names(self, block_size: int) -> list[bytes]:
        """Names of its full blocks; none if it shares no blocks."""
        if self.start.request.block_hashes:
            self.hashes = extend_hashes(self.hashes, self.ids[: 4 * self.kv_len])
        return block_names(self.hashes, block_size)[: self.kv_len // block_size]

    @property
    def target(self) -> int:
        return len(self.start.request.prompt_ids) // 4 + self.start.base

    @property
    def is_prefilled(self) -> bool:
        return self.kv_len >= self.target

    @property
    def place_in_line(self) -> tuple[int, int]:
        """Return the row's place in line, as the engine's prefill has it."""
        if self.num_passed >= PATIENCE:
            return -1, 0
        return self.urgency, self.target - self.kv_len

    @property
    def urgency(self) -> int:
        return class_index(self.start.request.class_name)

    @property
    def generated_hashes(self) -> bytes:
        self.names(HASHED_TOKENS)
        return self.hashes[len(self.start.request.block_hashes) :]


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
    num_prefilled: int = 0
    computed: Counter[str] = field(default_factory=Counter)
    committed: dict[str, int] = field(default_factory=dict)
    until: int = 0
    step: int = 0
    plan: int = 0
    sequence: int = 0
    grant: Plan = NO_PLAN
    prefill_budget: PrefillBudget = field(default_factory=PrefillBudget)
    max_rows: int = 0
    report_at: int = 0
    num_decoded: int = 0
    most_rows: int = 0
    last_row: int = 0
    ended_requests: set[str] = field(default_factory=set)
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.sequence += 1
        self.report = Report(self.sequence, 1, self.plan, self.step)

    def apply_plan(self, plan: Plan) -> None:
        assert plan.number > self.plan, "plans come in order"
        self.plan, self.until = plan.number, max(self.until, plan.until)
        self.grant = plan
        self.max_rows, self.report_at = plan.max_rows, plan.report_at
        for number, why in plan.stops:
            if number in self.rows:
                self.end(number, why)
        for number, blocks in plan.blocks:
            if number in self.rows:
                self.own(number, unpack_ids(blocks))
        for start in plan.starts:
            assert start.row > self.last_row, "row numbers go on"
            self.last_row = start.row
            self.rows[start.row] = row = SimulatedRow(start, [], num_tokens=start.base)
            num_shared, held = start.num_cached // self.block_size, unpack_ids(start.blocks)
            self.share(row, held[:num_shared])
            self.own(start.row, held[num_shared:])

    def share(self, row: SimulatedRow, blocks: list[int]) -> None:
        row.kv_len = len(blocks) * self.block_size
        assert row.kv_len == row.start.num_cached < row.target
        for name, block in zip(row.names(self.block_size), blocks, strict=True):
            held = self.contents.get(block)
            assert held == name, f"block {block} holds {held!r}"
            self.owned.setdefault(block, set()).add(row.start.row)
            row.blocks.append(block)

    def own(self, number: int, blocks: list[int]) -> None:
        for block in blocks:
            assert block > 0, "block 0 is scratch"
            assert block not in self.owned, (
                f"block {block} was handed out before row {self.owned.get(block)} was released"
            )
            self.owned[block] = {number}
            self.contents.pop(block, None)
        self.rows[number].blocks += blocks

    def end(self, number: int, why: str) -> None:
        row = self.rows.pop(number)
        self.report.ended.append((number, why, row.num_tokens))
        self.leaving.append((number, row))
        if why not in INTERRUPTED:
            self.ended_requests.add(row.start.request.request_id)

    def run(self) -> bool:
        """Run one step, if one is granted and a row can take part."""
        in_step = list(islice(self.rows.items(), self.max_rows))
        self.most_rows = max(self.most_rows, len(in_step))
        decoding = [item for item in in_step if item[1].is_prefilled]
        prompts = [item for item in in_step if not item[1].is_prefilled]
        prompts.sort(key=lambda item: item[1].place_in_line)
        took_part = False
        if self.step >= self.until:
            return False
        budget = self.prefill_budget_of([row for _, row in decoding], [row for _, row in prompts])
        for number, row in decoding:
            if (room := self.room(row)) and budget.decodes(row.urgency):
                took_part = True
                self.decode(number, row, min(room, 1 + self.draw.randint(0, self.num_speculated)))
        for number, row in prompts:
            chunk = min(row.target - row.kv_len, budget.left(row.urgency), self.room(row))
            budget.spend(row.urgency, chunk)
            row.num_passed += self.room(row) > 0 and not chunk
            row.kv_len += chunk
            self.num_prefilled += chunk
            self.fill(row, chunk)
            took_part = took_part or chunk > 0
            if row.is_prefilled:
                row.told_as = row.kv_len, self.step + 1
                self.report.prefilled.append((number, *row.told_as))
                self.sample(number, row)
        self.step += took_part
        return took_part

    def prefill_budget_of(self, decoding: list[SimulatedRow], prompts: list[SimulatedRow]) -> StepBudget:
        """What the step may have, as the engine's rows have it."""
        classes = [row.urgency for row in decoding if self.room(row)]
        left = [(row.urgency, min(row.target - row.kv_len, self.room(row))) for row in prompts]
        return self.prefill_budget.plan(self.grant, classes, left)

    def room(self, row: SimulatedRow) -> int:
        """Number of free slots in a row's blocks."""
        return len(row.blocks) * self.block_size - row.kv_len

    def decode(self, number: int, row: SimulatedRow, most: int) -> None:
        """Decode a token, and further ones if its proposals were right."""
        for num_right in range(most):
            if number in self.rows:
                row.kv_len += 1
                row.is_ahead |= num_right > 0
                self.num_decoded += 1
                self.fill(row, 1)
                self.sample(number, row)

    def fill(self, row: SimulatedRow, count: int) -> None:
        """Note that the row has computed `count` tokens: blocks that are full now hold its ids."""
        self.computed[row.start.request.tenant] += count
        filled = range((row.kv_len - count) // self.block_size, row.kv_len // self.block_size)
        if filled and (names := row.names(self.block_size)):
            for i in filled:
                self.contents[row.blocks[i]] = names[i]

    def sample(self, number: int, row: SimulatedRow) -> None:
        row.ids += pack_ids([generated_id(row.num_tokens)])
        row.num_tokens += 1
        request = row.start.request
        self.committed[request.request_id] = row.num_tokens
        if row.num_tokens == request.stopping.max_new_tokens:
            self.end(number, "length")
        elif ends_at(request.request_id, row.num_tokens, self.eos_chance):
            self.end(number, "eos_token")

    def release(self) -> None:
        """Release rows that have ended, some sooner and some later."""
        staying = []
        for number, row in self.leaving:
            if self.draw.random() < 0.5:
                staying.append((number, row))
                continue
            for block in row.blocks:
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
        request, (kv_len, step) = row.start.request.request_id, row.told_as
        start = row.start
        return HeldRow(
            number,
            request,
            start.attempt,
            start.base,
            row.num_tokens,
            pack_ids(row.blocks),
            kv_len,
            step,
            ended,
            start.num_cached,
        )

    def take_lengths(self) -> list[tuple[int, int, int]]:
        """Take the lengths of rows that are ahead of one token a step."""
        ahead = [(number, row) for number, row in self.rows.items() if row.is_ahead]
        for _, row in ahead:
            row.told_as, row.is_ahead = (row.kv_len, self.step), False
        return [(number, *row.told_as) for number, row in ahead]

    def take_report(self) -> Report:
        report = Report(
            self.sequence,
            1,
            self.plan,
            self.step,
            self.report.prefilled,
            self.report.ended,
            self.report.released,
            self.report.takeover,
            hashes=self.report.hashes,
            step_times=self.report.step_times,
            lengths=self.take_lengths(),
            round_trips=self.report.round_trips,
        )
        self.clear()
        return report
