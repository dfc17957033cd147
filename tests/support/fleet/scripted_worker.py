"""Worker and batcher in one, without a model: takes requests from Redis and answers with ids that the test
has scripted. Its rows are the engine's, and its text and flushes the agent's; only the forward is a fake.
"""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tokenizers import Tokenizer

from batcher import batcher_scripts
from common.adapters import HeldAdapters
from common.broker.client import ERRORS, connect
from common.broker.keys import Keys
from common.broker.lua import run_script
from common.broker.pool_client import PoolClient
from common.messages.codec import decode, encode
from common.messages.plan import NewRow, Plan, WorkerCapacity
from common.messages.records import BeamSequence, pack_floats, pack_ids, pack_sequences, unpack_ids
from common.messages.request import Cancel, Generate
from common.settings.settings import Settings
from gpu_worker import worker_scripts
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.row_text import RowText
from gpu_worker.agent.state import AgentState
from gpu_worker.engine.batch.beams import BeamGroup
from gpu_worker.engine.batch.row import PooledValues, Row, RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.batch.step_result import Int64, PromptLogprobs, StepSamples, TopLogprobs
from gpu_worker.protocol import StepResult
from tests.support.chaos.engine import BLOCK_SIZE
from tests.support.fleet.modeless_worker import ModelessEngine
from tests.support.waiting import in_background

SPILL_STEPS = 5
"""After so many its log is trimmed."""
IDLE_MS = 20
TTL_MS = 3_600_000  # longer than any test takes on a busy machine
EOS = 2
VOCAB_SIZE = 5
"""Of the logits that it returns."""
GRANT = Plan(epoch=1, number=1, until=2**30, prefill_tokens=2**20)
"""Everything that it may ever compute."""


@dataclass
class Answer:
    """What a request is to be answered: ids, one a step, within the request's limits; then end-of-sequence,
    the error (a reason of `ERRORS`), or nothing. `num_cached`: tokens of its prompt that are reported as
    found in the prefix cache. `beams`: what a beam search finds, which comes at once, unless it does not end
    or fails.
    """

    ids: list[int]
    ends: bool = True
    error: str = ""
    num_cached: int = 0
    beams: Sequence[BeamSequence] = ()

    @property
    def tokens(self) -> list[int]:
        return self.ids + [EOS] * (self.ends and not self.error)


class HeldRows(Rows):
    """Rows of which those that may not run take part in no step."""

    may_run: Callable[[Row], bool]

    def is_plain(self, row: Row) -> bool:
        return False

    @property
    def runnable(self) -> tuple[Int64, list[Row]]:
        lines, rows = super().runnable
        return lines, [row for row in rows if self.may_run(row)]


class AnsweringEngine(ModelessEngine):
    """The engine of a FakeWorker. `answers`: by the number of a row."""

    def __init__(self, worker: "FakeWorker") -> None:
        super().__init__(0.0)
        self.worker = worker
        self.answers: dict[int, Answer] = {}
        self.rows: HeldRows = HeldRows(BLOCK_SIZE, [EOS], adapters=self.adapters)
        self.rows.may_run = self.may_run

    def send(self, plan: Plan) -> None:
        """Apply a plan. Ids are scripted, so no row needs what the vocabulary, an adapter, pictures or other
        rows' blocks have to do with them.
        """
        own: dict[str, Any] = {"num_cached": 0, "contents": []}
        starts = [replace(one, request=plain(one.request), **own) for one in plan.starts]
        super().send(replace(plan, starts=starts))

    def may_run(self, row: Row) -> bool:
        """Whether a row has a next token, or makes a vector."""
        most = min(len(self.answers[row.number].tokens), self.worker.most_tokens)
        return isinstance(row.output, PooledValues) or (not row.output.has_branches and row.index < most)

    def step(self) -> StepResult | None:
        for row in [*self.rows.rows.values()]:
            answer = self.answers[row.number]
            if isinstance(row.output, BeamGroup) and answer.ends and not answer.error:
                beams = answer.beams[: row.output.search.params.width]
                self.rows.result.sequences.append((row.number, pack_sequences(beams)))
                self.rows.finish(row, beams[0].reason)
            elif answer.error and row.index >= len(answer.tokens):
                self.rows.finish(row, answer.error)
        return super().step()

    def forward(self, slices: Sequence[RowSlice]) -> StepSamples:
        samples = StepSamples([], [])
        for one in slices:
            request = self.worker.agent.state.rows[one.row.number].request
            if one.row.prompt_logprobs is not None and one.num_scored:
                samples.prompt_logprobs.append(score_prompt(one, one.row.prompt_logprobs))
            if self.worker.keeps_logits:
                samples.logits.extend(self.worker.logits(request, one))
            if one.samples:
                index = one.first_index
                token, logprob = self.answers[one.row.number].tokens[index], -0.1 - index / 7
                if request.top_n_tokens:
                    likeliest = TopLogprobs(*neighbours(token, logprob, request.top_n_tokens))
                    samples.top_logprobs[len(samples.ids)] = likeliest
                samples.ids.append(token)
                samples.logprobs.append(logprob)
        return samples


def plain(request: Generate) -> Generate:
    """A request without what its ids depend on."""
    stopping = replace(request.stopping, stop=[])
    return replace(request, sampling=None, adapter="", pictures=[], stopping=stopping)


def score_prompt(one: RowSlice, num_top: int) -> PromptLogprobs:
    """Log-probabilities of a prompt: each token is half a nat less likely than the one before it."""
    first = one.begin + 1
    ids = one.row.ids[first : first + one.num_scored].tolist()
    logprobs = [-0.5 * position for position in range(first, first + len(ids))]
    likeliest = [neighbours(token, logprob, num_top) for token, logprob in zip(ids, logprobs, strict=True)]
    top_ids = [token for ids, _ in likeliest for token in ids]
    top_logprobs = [logprob for _, logprobs in likeliest for logprob in logprobs]
    return PromptLogprobs(pack_floats(logprobs), pack_ids(top_ids), pack_floats(top_logprobs))


def neighbours(token: int, logprob: float, count: int) -> tuple[list[int], list[float]]:
    """The likeliest tokens beside one: it itself, then its neighbours, each a nat less likely."""
    return [token + i for i in range(count)], [logprob - i for i in range(count)]


class FakeWorker:
    """A worker that answers with `answer`. `pause` makes it keep all it holds until `going` is set.

    Attributes:
        most_tokens: no row gets more than so many.
        max_total_tokens: of a prompt and its answer together, as it announces.
        keeps_logits: whether it writes the logits that requests return.
        held: the adapters that it has; None if it serves none.
        sees: whether it says that it computes pictures.
        pooling: what its model makes, if that is no tokens.
        live: the requests that it holds, by id.
    """

    most_tokens = sys.maxsize
    max_total_tokens = 8192
    keeps_logits = True
    held: HeldAdapters | None = None
    sees = False
    pooling = ""

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer,
        answer: Callable[[Generate], Answer],
        step_s: float = 0.0,
        pool: str = "default",
    ) -> None:
        self.url, self.redis = url, connect(url)
        self.keys, self.tokenizer, self.answer, self.step_s = Keys(pool), tokenizer, answer, step_s
        self.incarnation = f"w0-{secrets.token_hex(4)}"
        self.engine = AnsweringEngine(self)
        self.agent = Agent(
            Settings(pool=pool),
            PoolClient(self.redis, self.keys),
            self.engine,
            AgentState(tokenizer),
            self.capacity(),
        )
        self.live: dict[str, RowText] = {}
        self.entry_ids: dict[str, str] = {}
        self.seen: list[Generate] = []
        self.going, self.resting = asyncio.Event(), asyncio.Event()
        self.going.set()
        self.steps = self.num_blocks = 0
        self.last_entry, self.last_control = b"0", b"0"

    @property
    def prompts(self) -> list[str]:
        """Of all requests so far, with special tokens."""
        return [
            self.tokenizer.decode(unpack_ids(one.prompt_ids), skip_special_tokens=False) for one in self.seen
        ]

    def capacity(self) -> WorkerCapacity:
        return WorkerCapacity(
            *(self.incarnation, "w0", "fake", "float32", 16, 64, 256, self.max_total_tokens),
            model_id="smollm2",
            vocab_size=VOCAB_SIZE,
            max_loras=0 if self.held is None else 4,
            max_lora_rank=0 if self.held is None else 64,
            pictures=self.sees,
            pooling=self.pooling,
        )

    async def announce(self, state: str = "ready") -> None:
        call = worker_scripts.worker_heartbeat(
            self.keys,
            self.incarnation,
            capacity=encode(self.capacity()),
            ttl_ms=TTL_MS,
            state=state,
            step=0,
            fields={} if self.held is None else {"adapters": encode(self.held)},
        )
        reply = await run_script(self.redis, call)
        assert reply == "OK", reply

    async def open(self) -> None:
        await self.agent.create_streams()
        await self.announce()

    async def run(self) -> None:
        while True:
            with contextlib.suppress(*ERRORS):
                await self.rest()
                await self.take()
                await self.flush()
                await self.repeat()
            await asyncio.sleep(self.step_s or (0 if self.live else 0.005))

    async def rest(self) -> None:
        if not self.going.is_set():
            self.resting.set()
            await self.going.wait()
            self.resting.clear()

    async def pause(self) -> None:
        """Stop, and wait until the worker takes nothing more."""
        self.going.clear()
        await self.resting.wait()

    async def take(self) -> None:
        """Take new requests, then cancels. If there is nothing to do, wait for one of them."""
        streams = {self.keys.requests: self.last_entry, self.keys.control: self.last_control}
        block = None if self.live else IDLE_MS
        for stream, entries in await self.redis.xread(streams, block=block):  # type: ignore[arg-type]
            for entry_id, fields in entries:
                if stream.decode() == self.keys.requests:
                    self.last_entry = entry_id
                    await self.begin(entry_id, decode(Generate, fields[b"generate"]))
                else:
                    self.last_control = entry_id
                    self.heed(fields)

    async def begin(self, entry_id: bytes, request: Generate) -> None:
        self.seen.append(request)
        answer, state = self.answer(request), self.agent.state
        placed = {"worker": self.incarnation, "attempt": 1, "base": 0, "cached": answer.num_cached}
        await self.redis.hset(self.keys.request(request.request_id), mapping=placed)  # type: ignore[misc]
        first = self.num_blocks + 1
        self.num_blocks += -(-request.max_kv // BLOCK_SIZE)
        blocks = pack_ids(range(first, self.num_blocks + 1))
        start = NewRow(state.last_row + 1, 1, 0, b"", blocks, request, num_cached=answer.num_cached)
        self.engine.answers[start.row] = answer
        self.entry_ids[request.request_id] = entry_id.decode()
        self.agent.plans.apply(await self.agent.plans.with_pictures(replace(GRANT, starts=[start])))
        if (row := state.rows.get(start.row)) is not None:  # else it has failed
            self.live[request.request_id] = row

    def logits(self, request: Generate, one: RowSlice) -> list[tuple[int, int, bytes]]:
        """Return float32 logits: at position p, all are p."""
        size = request.logits.vocab_size if request.logits else 0
        return [(one.row.number, at, pack_floats([float(at)] * size)) for at in one.returned_logits]

    def heed(self, fields: dict[bytes, bytes]) -> None:
        if b"cancel" in fields:
            cancel = decode(Cancel, fields[b"cancel"])
            if row := self.live.get(cancel.request_id):
                self.agent.plans.apply(replace(GRANT, stops=[(row.row, cancel.why)]))

    async def flush(self) -> None:
        """Run one step of every row: the next token of each, and the ends."""
        if (step := self.engine.step()) is not None:
            self.agent.steps.apply(step)
        outbox = self.agent.state.outbox
        if outbox.is_empty:
            return
        self.steps += 1
        self.agent.flusher.spill_due |= self.steps % SPILL_STEPS == 0
        await self.agent.flusher.flush()
        for row, _ in outbox.terminals:
            await self.dequeue(row.request.request_id)

    async def dequeue(self, request_id: str) -> None:
        entry = request_id, self.entry_ids.pop(request_id)
        await run_script(self.redis, batcher_scripts.dequeue(self.keys, [entry]))
        self.live.pop(request_id, None)

    async def repeat(self) -> None:
        for channel, payload in self.agent.flusher.channels.repeated_messages():
            await self.redis.publish(channel, payload)

    async def close(self) -> None:
        self.agent.flusher.client.close()
        await self.redis.aclose()


@contextlib.asynccontextmanager
async def working(
    url: str,
    tokenizer: Tokenizer,
    answer: Callable[[Generate], Answer],
    step_s: float = 0.0,
    pool: str = "default",
    sees: bool = False,
) -> AsyncIterator[FakeWorker]:
    """A fake worker that is ready and works while the context is open."""
    worker = FakeWorker(url, tokenizer, answer, step_s, pool)
    worker.sees = sees
    async with at_work(worker):
        yield worker


Worker = TypeVar("Worker", bound=FakeWorker)


@contextlib.asynccontextmanager
async def at_work(worker: Worker) -> AsyncIterator[Worker]:
    """A fake worker of any kind, ready and at work while the context is open."""
    await worker.open()
    try:
        async with in_background(worker.run()) as [task]:
            yield worker
    finally:
        await worker.close()
        if not task.cancelled() and (error := task.exception()):
            raise error
