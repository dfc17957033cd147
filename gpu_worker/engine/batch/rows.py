"""The rows of an engine: which take part in the next step, and what becomes of them. No tensors.

A step has two ends: `launch` chooses the rows and advances lengths, `collect` takes the sampled ids. One more
step may be launched between the two, since `launch` does not need the ids.

With micro-batches a step is launched in several parts, each with a share of the rows: a row is in one part at
most, and in none before its last token is read. Each part is collected by itself.
"""

import logging
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from common.messages.plan import NewRow, Plan
from common.messages.request import LEAST_URGENT, Generate, class_index
from gpu_worker.engine.batch.beams import Beam, BeamGroup, BeamSearch, BeamTextFactory, Copy
from gpu_worker.engine.batch.prefill import (
    PrefillBudget,
    chunks,
    encoding_cost,
    line_up,
    micro_batch_size,
    num_computable,
    schedule_units,
    whole_prompts,
)
from gpu_worker.engine.batch.row import (
    LINE,
    NEVER,
    NUM_ENDS,
    TOKENS,
    Adapter,
    GrammarFactory,
    PicturesFactory,
    PooledValues,
    Row,
    RowSlice,
    StepSlices,
    logits_span,
    no_pictures,
    not_served,
)
from gpu_worker.engine.batch.sampling_state import SamplingState
from gpu_worker.engine.batch.state_slots import StateSlots
from gpu_worker.engine.batch.step_result import Int32, Int64, StepSamples
from gpu_worker.engine.drafting.proposers import ProposerFactory
from gpu_worker.protocol import SAMPLE_DTYPE, StepResult

log = logging.getLogger(__name__)
NO_BLOCKS: Int32 = np.zeros(0, np.int32)
NO_GRANT = Plan(epoch=0, number=0, until=0, prefill_tokens=0)
MAX_SCORED_TOKENS = 256
MOST_ROWS = 2**14
"""More than a worker may hold: MAX_BATCH_SIZE is 8192 at most, and half as many rows may stand by."""


@dataclass(slots=True, eq=False)
class Rows:
    """The rows that the engine holds, in the order of their starts.

    Attributes:
        make_grammar: (grammar, tokens of the row before its base) → its mask.
        max_scored_tokens: prompt tokens of one step whose log-probabilities or logits are reported: each
            needs a row of logits.
        recompute_length: as in Row.
        prefix_caching: other rows may start with the blocks that a row has filled.
        max_decoded: most tokens of one launch that are of rows that decode, or proposals.
        num_micro_batches: into how many launches the rows that decode are divided.
        make_text: makes the texts of beams with stop strings.
        adapters: LoRA adapters that rows may have, by name; of at most `max_adapters` are the rows of a step.
        make_pictures: finds the pictures of a row.
        encoding_debt: prompt tokens that encodings of pictures took beyond the budgets of earlier steps.
        state_slots: slots of rows in a model that has states; None in one without.
        computes_whole: a step computes whole prompts, and no chunks: an encoder's tokens all see each other.
        numbers: LINE [lines]; the numbers of rows, a column each: no loop over rows that only go on.
        held: [lines]; the rows.
        order: int64 [rows]; the lines of the rows, in the order of their starts; `free`: the others.
        copies: blocks that must be copied before the step just launched is computed.
        step: the last step launched.
        grant: the newest plan.
        prefill_budget: how many prompt tokens a step may have.
        result: what happened since the last `take_result`.
        on_freed: takes blocks of released rows whose KV is not kept, and slots of their states.
    """

    block_size: int
    eos_ids: Sequence[int]
    make_grammar: GrammarFactory = not_served
    max_scored_tokens: int = MAX_SCORED_TOKENS
    recompute_length: int | None = None
    prefix_caching: bool = False
    make_proposer: ProposerFactory | None = None
    max_decoded: int = sys.maxsize
    num_micro_batches: int = 1
    make_text: BeamTextFactory = not_served
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    max_adapters: int = sys.maxsize
    make_pictures: PicturesFactory = no_pictures
    encoding_debt: int = 0
    state_slots: StateSlots | None = None
    computes_whole: bool = False
    copies: list[Copy] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    numbers: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(MOST_ROWS, LINE))
    held: npt.NDArray[np.object_] = field(default_factory=lambda: np.empty(MOST_ROWS, object))
    order: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    free: list[int] = field(default_factory=lambda: [*range(MOST_ROWS)])
    step: int = 0
    grant: Plan = NO_GRANT
    prefill_budget: PrefillBudget = field(default_factory=PrefillBudget)
    result: StepResult = field(default_factory=lambda: StepResult(0))
    on_freed: Callable[[Int32, Sequence[int]], None] | None = None

    def apply(self, grant: Plan) -> list[Int32]:
        """Apply a plan → the blocks newly granted, without those that hold cached tokens."""
        self.grant = grant
        for number, why in grant.stops:
            if number in self.rows:
                self.finish(self.rows[number], why)
        granted = [self.extend(number, np.frombuffer(blocks, "<i4")) for number, blocks in grant.blocks]
        for start in grant.starts:
            self.rows[start.row] = row = self.make_row(start)
            granted.append(row.blocks[start.num_cached // self.block_size :])
            if end := self.end_at_start(row, start.request):
                self.finish(row, end)
        return granted

    def end_at_start(self, row: Row, request: Generate) -> str | None:
        """Why a row ends before its first step; None if it starts. The broker may have lost the end of an
        answer. Beams whose K must all be computed anew have no blocks for that.
        """
        limit, num_prompt = self.recompute_length, len(row.ids)
        if request.beams and limit and num_prompt <= limit < num_prompt + row.max_new_tokens - 1:
            return "beam_length"
        return row.finish_reason or ("adapter" if request.adapter and row.adapter is None else None)

    def make_row(self, start: NewRow) -> Row:
        """Make a row. `eos_ids` end it, too, unless it ignores them. A row with a grammar cannot ignore them:
        the grammar ends with one of them.
        """
        request, stopping = start.request, start.request.stopping
        ids, blocks = np.frombuffer(start.ids, "<i4"), np.frombuffer(start.blocks, "<i4")
        source = request.sampling.grammar if request.sampling else ""
        grammar = self.make_grammar(source, ids[len(ids) - start.base :].tolist()) if source else None
        ends = dict.fromkeys(stopping.stop_ids, "stop_sequence")
        if grammar or not stopping.ignore_eos:
            ends |= dict.fromkeys(self.eos_ids, "eos_token")
        pictures, adapter = self.make_pictures(start), self.adapters.get(request.adapter)
        row = Row(
            number=start.row,
            ids=ids,
            max_new_tokens=stopping.max_new_tokens,
            blocks=blocks,
            ends=ends,
            sampling_state=SamplingState.of(start, list(ends), grammar),
            base=start.base,
            recompute_length=self.recompute_length,
            prompt_logprobs=start.prompt_logprobs,
            logits=logits_span(request),
            proposer=self.make_proposer(ids, grammar)
            if self.make_proposer and not (request.logits or request.beams)
            else None,
            output=PooledValues(request.pooling.pair_start, self.computes_whole)
            if request.pooling
            else TOKENS,
            awaited=[part for part in (grammar, pictures) if part],
            adapter=adapter,
            pictures=pictures,
            is_suspect=start.is_suspect,
        )
        if request.beams:
            text = self.make_text(ids.tolist(), stopping) if stopping.stop else None
            first = Beam(state=row.sampling_state, text=text)
            search = BeamSearch(request.beams, row.max_new_tokens, row.ends, [first])
            copies = self.copies, self.state_slots.copies if self.state_slots else []
            row.output = BeamGroup(row, search, self.block_size, *copies, num_places=request.beams.width)
        row.place = place = self.free.pop()
        row.line = self.numbers[place : place + 1].view(np.int64).data
        self.held[place], self.order = row, np.append(self.order, place)
        row.kv_len, row.collected_index = start.num_cached, start.base
        row.last_id = int(ids[-1]) if start.base else 0
        row.room, row.num_places = len(blocks) * self.block_size, row.output.num_places
        row.class_index = class_index(request.class_name)
        row.end = len(ids) if request.pooling else row.num_prompt + row.max_new_tokens - 1
        if self.recompute_length and len(ids) <= self.recompute_length:
            row.end = min(row.end, self.recompute_length)
        row.goes_on_from = len(ids) if self.is_plain(row) else NEVER
        self.numbers["number"][place] = row.number
        self.numbers["end_ids"][place] = ([*ends] + [-1] * NUM_ENDS)[:NUM_ENDS]
        return row

    def is_plain(self, row: Row) -> bool:
        """Whether its tokens, those of its prompt aside, need nothing but the model and the sampler."""
        state = row.sampling_state
        counts = state and (state.remembers or state.top_n_tokens)
        parts = (row.proposer, row.logits, row.adapter, row.awaited, self.state_slots, counts)
        needs_more = any(parts) or row.output is not TOKENS or len(row.ends) > NUM_ENDS
        return not needs_more and self.num_micro_batches == 1

    def extend(self, number: int, blocks: Int32) -> Int32:
        """Append blocks to a row → these blocks; none if the row is gone."""
        row = self.rows.get(number)
        if row is None:
            return NO_BLOCKS
        row.blocks = np.concatenate((row.blocks, blocks))
        row.room = len(row.blocks) * self.block_size
        row.output.extend(blocks)
        return blocks

    def launch(self) -> StepSlices:
        """Launch the next step, or the next micro-batch of one → its slices, arranged; empty if none may or
        can run. Without micro-batches it must not be called while an unread step `is_unsure`.
        """
        slices = self.schedule_slices(self.step) if self.num_micro_batches > 1 else StepSlices(())
        if not slices and self.step < self.grant.until:
            slices = self.schedule_slices(self.step + 1)
            self.step += bool(slices)
        self.numbers["kv_len"][slices.lines] += 1
        self.numbers["in_flight"][slices.lines] += 1
        self.numbers["sample_place"][slices.lines] = np.arange(len(slices.lines))
        for row_slice in slices.others:
            row = row_slice.row
            row.launched_step = self.step
            row.kv_len = row_slice.kv_len
            row.in_flight += 1
        place_samples(slices)
        return slices

    def fail(self, slices: StepSlices, computed: Sequence[RowSlice], why: str = "forward") -> StepSlices:
        """End the rows of a launched step that are not among `computed`, with `why` → the step without them.
        If none are, the step does not count.
        """
        self.step -= not computed
        known = set(map(id, computed))
        failed = [row_slice for row_slice in slices if id(row_slice) not in known]
        for row_slice in failed:
            row_slice.row.kv_len = row_slice.begin
            row_slice.row.in_flight -= 1
        for number in {row_slice.row.number: None for row_slice in failed}:  # of a beam search as a whole
            self.finish(self.rows[number], why)
        place_samples(able := StepSlices(computed))
        return able

    def schedule_slices(self, step: int) -> StepSlices:
        """Choose what is launched next, as a part of this step: a token of each row that decodes and its
        proposals, the longest row first, then chunks of prompts up to the budgets. Rows after the first
        `max_rows` stand by.
        """
        lines, others = self.runnable
        classes = self.numbers["class_index"][lines]
        decoding, prompts = self.split_launchable(others, step)
        line = line_up(prompts, step)
        left = [(row.class_index, num_computable(row, self.block_size) + encoding_cost(row)) for row in line]
        budget = self.prefill_budget.plan(
            self.grant, [*classes.tolist(), *(row.class_index for row in decoding)], left
        )
        if not budget.bulk_decodes:
            lines = lines[classes < LEAST_URGENT]
            decoding = [row for row in decoding if row.class_index < LEAST_URGENT]
        slices = self.decode(decoding)
        line = [row for row in line if budget.left(row.class_index) > 0]
        if self.computes_whole:
            return StepSlices(sorted(whole_prompts(line, self.block_size, budget), key=attrgetter("count")))
        if any(row.pictures for row in line):
            debt = self.encoding_debt if slices or len(lines) else 0
            budget.tokens, self.encoding_debt = schedule_units(line, self.block_size, budget.tokens, debt)
        has_snapshots = self.state_slots is not None and self.state_slots.has_snapshots
        slices += chunks(line, self.block_size, budget, self.max_scored_tokens, has_snapshots)
        if self.prefill_budget.has_waited and not slices and not len(lines):  # pictures are not there yet
            return self.schedule_slices(step)
        lines = lines[np.argsort(-self.numbers["kv_len"][lines], kind="stable")]
        numbers, in_flight = self.numbers, self.numbers["in_flight"][lines]
        ids = np.where(in_flight > 0, -1 - numbers["sample_place"][lines], numbers["last_id"][lines])
        indices = numbers["collected_index"][lines] + in_flight
        return StepSlices(slices, lines, self.held[lines].tolist(), numbers["kv_len"][lines], ids, indices)

    def split_launchable(self, rows: Sequence[Row], step: int) -> tuple[list[Row], list[Row]]:
        """Return the rows that the next launch may have among these: those that decode, and those with
        prompts.
        """
        decoding, prompts = [], []
        with_adapters = sorted((row for row in rows if row.adapter), key=attrgetter("class_index"))
        adapters = [*dict.fromkeys(row.adapter for row in with_adapters)][: self.max_adapters]
        for row in rows:
            if self.num_micro_batches > 1 and not row.output.may_join(row, step):
                continue
            if row.adapter and row.adapter not in adapters:
                continue
            if self.state_slots and not self.state_slots.take(row):
                continue
            if row.kv_len >= len(row.ids):
                decoding.append(row)
            elif self.check_pictures(row):
                prompts.append(row)
        return decoding[: micro_batch_size(self.rows.values(), self.num_micro_batches)], prompts

    def decode(self, rows: Sequence[Row]) -> list[RowSlice]:
        slices, spare = list[RowSlice](), self.num_spare
        for row in rows:
            slices += (own := row.output.decode(row, spare, self.block_size))
            spare -= len(own[0].proposed) if own else 0
        return sorted(slices, key=attrgetter("begin"), reverse=True)

    def check_pictures(self, row: Row) -> bool:
        """End a row if one of its pictures cannot be shown to the model → whether it goes on."""
        if cause := row.pictures.failure if row.pictures else "":
            log.warning("row %d ends: a picture of its prompt cannot be shown: %s", row.number, cause)
            self.finish(row, "picture")
        return not cause

    @property
    def runnable(self) -> tuple[Int64, list[Row]]:
        """What the next step may compute: the lines int64 [rows] of rows that go on with their next token, to
        which nothing else applies; and other rows with a place, room, and what they wait for.
        """
        order, numbers, places = self.order, self.numbers, self.grant.max_rows or sys.maxsize
        kv_len = numbers["kv_len"][order]
        is_held = kv_len < numbers["end"][order]
        may_run = is_held & (numbers["room"][order] > kv_len)
        may_run &= (numbers["num_places"][order] * is_held).cumsum() <= places
        goes_on = may_run & (numbers["goes_on_from"][order] <= kv_len)
        others = self.held[order[may_run ^ goes_on]].tolist()
        return order[goes_on], [row for row in others if not row.awaited or row.is_ready]

    def decoding(self) -> list[Row]:
        """The rows whose next token the next step may compute, and that may need more for it than that."""
        may_run = self.step < self.grant.until
        return [row for row in self.runnable[1] if row.kv_len >= len(row.ids)] if may_run else []

    @property
    def num_spare(self) -> int:
        """How many proposals the next step has places for."""
        num_places = int(self.numbers["num_places"][self.order].sum())
        return max(0, self.max_decoded - min(num_places, self.grant.max_rows or sys.maxsize))

    def collect(self, slices: StepSlices, samples: StepSamples) -> None:
        """Take what a launched step sampled: all samples of all slices, in order; for beam searches there are
        `candidates` in their place.
        """
        result, scored = self.result, iter(samples.prompt_logprobs)
        self.collect_next(slices, samples)
        place = len(slices.rows)
        result.logits += samples.logits
        for row_slice in slices.others:
            row = row_slice.row
            row.in_flight -= 1
            if not row_slice.decodes:
                result.prefill_tokens += row_slice.count if row_slice.count > 1 else 0
                if row_slice.num_scored and row.prompt_logprobs is not None:
                    prompt = row.number, row_slice.begin + 1, *next(scored)
                    result.prompt_logprobs += [] if row.ended else [prompt]
            why = row.output.take(row_slice, samples, place, result)
            place += row_slice.num_samples
            held = self.rows[row.number]
            if why:
                self.finish(held, why)
            elif held.ended:
                self.release(held)

    def collect_next(self, step: StepSlices, samples: StepSamples) -> None:
        """Take the first samples of a step: the next tokens of rows to which nothing else applies."""
        numbers, lines, num_rows = self.numbers, step.lines, len(step.rows)
        ids, ends = np.array(samples.ids[:num_rows], np.int64), numbers["end"][lines]
        has_ended = ends == 0
        taken = np.zeros(num_rows, SAMPLE_DTYPE)
        taken["row"], taken["index"] = numbers["number"][lines], step.indices
        taken["id"], taken["logprob"] = ids, samples.logprobs[:num_rows]
        self.result.samples += (taken[~has_ended] if has_ended.any() else taken).tobytes()
        numbers["in_flight"][lines] -= 1
        numbers["collected_index"][lines] += ~has_ended
        numbers["last_id"][lines] = ids
        at_end = step.begins + 1 >= ends
        for column in numbers["end_ids"].T:
            at_end |= column[lines] == ids
        for row in self.held[lines[at_end]]:
            if row.ended:
                self.release(row)
            else:
                self.finish(row, row.finish_reason or "preempted")

    def finish(self, row: Row, why: str) -> None:
        """End a row, unless it has ended."""
        if not row.ended:
            row.ended, row.end = True, 0
            self.result.ended.append((row.number, why, row.collected_index))
            self.release(row)

    def release(self, row: Row) -> None:
        """Release the blocks of an ended row, unless a launched step still holds it."""
        if not row.output.num_in_flight(row):
            del self.rows[row.number]
            self.result.released.append((row.number, row.kv_len + row.output.num_decoded))
            num_kept = row.kv_len // self.block_size if self.prefix_caching else 0
            if self.on_freed:
                self.on_freed(row.blocks[num_kept:], row.slots)
            if self.state_slots:
                self.state_slots.give_back(row)
            self.order = self.order[self.order != row.place]
            self.free.append(row.place)
            row.line = array("q", row.line)

    def take_result(self) -> StepResult:
        """Return what happened since the last call."""
        result, self.result = self.result, StepResult(0)
        if self.state_slots:
            result.snapshots = self.state_slots.snapshots.take_changes()
        return result


def place_samples(slices: StepSlices) -> None:
    """Set each row's `sample_place` for a launched step, but for rows that go on with their next token."""
    place = len(slices.rows) - 1
    for row_slice in slices.others:
        place += row_slice.num_samples
        row_slice.row.sample_place = place
