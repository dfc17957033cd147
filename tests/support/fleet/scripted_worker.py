"""Worker and batcher in one, without a model: takes requests from Redis and answers with ids that the test
has scripted, through the scripts that real workers use.
"""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from redis.asyncio import Redis
from tokenizers import Tokenizer

from batcher import batcher_scripts
from batcher.batcher_scripts import QueuedRequest
from common.adapters import HeldAdapters
from common.broker.client import ERRORS, connect
from common.broker.keys import Keys
from common.broker.lua import ScriptCall, run_script
from common.detokenize import Detokenizer
from common.messages.codec import decode, encode
from common.messages.events import ChannelSequences, Events, Terminal, Tokens, pack_tokens
from common.messages.plan import WorkerCapacity
from common.messages.records import (
    RECORD,
    BeamSequence,
    pack_floats,
    pack_ids,
    pack_records,
    pack_sequences,
    unpack_floats,
    unpack_ids,
)
from common.messages.request import Cancel, Generate
from gpu_worker import worker_scripts
from gpu_worker.worker_scripts import FlushedPrompt, FlushedSpill, FlushedTerminal, FlushReply
from tests.support.token_columns import as_sent

SPILL_STEPS = 5
IDLE_MS = 20
TTL_MS = 3_600_000  # longer than any test takes on a busy machine
EOS = 2
VOCAB_SIZE = 5
"""Of the logits that it returns."""


@dataclass
class Answer:
    """What a request is to be answered: ids, one a step, within the request's limits; then end-of-sequence,
    the error, or nothing. `num_cached`: tokens of its prompt that are reported as found in the prefix cache.
    `beams`: what a beam search finds, which comes at once, unless it does not end or fails.
    """

    ids: list[int]
    ends: bool = True
    error: str = ""
    num_cached: int = 0
    beams: Sequence[BeamSequence] = ()


class Live:
    """A request as the worker holds it."""

    def __init__(self, entry_id: bytes, request: Generate, answer: Answer, tokenizer: Tokenizer) -> None:
        self.entry_id, self.request, self.error = entry_id, request, answer.error
        self.ids = [] if request.beams else answer.ids + [EOS] * (answer.ends and not answer.error)
        self.logprobs = unpack_floats(pack_floats([-0.1 - i / 7 for i in range(len(self.ids))]))
        detokenizer = Detokenizer(tokenizer, unpack_ids(request.prompt_ids))
        self.texts = [detokenizer.step(token_id) for token_id in self.ids]
        self.done = 0
        self.cancelled = False
        self.num_cached = answer.num_cached
        self.beams = answer.beams[: request.beams.width] if request.beams and answer.ends else ()

    @property
    def reason(self) -> str | None:
        if self.cancelled:
            return "cancelled"
        if self.beams:
            return self.beams[0].reason
        if self.error and self.done == len(self.ids):
            return "error"
        if self.done == self.request.stopping.max_new_tokens:
            return "length"
        if self.done and self.ids[self.done - 1] == EOS and not self.request.stopping.ignore_eos:
            return "eos_token"
        if self.done and self.ids[self.done - 1] in self.request.stopping.stop_ids:
            return "stop_sequence"
        text = "".join(self.texts[self.request.stopping.min_new_tokens : self.done])
        return "stop_sequence" if any(stop in text for stop in self.request.stopping.stop) else None

    @property
    def logits(self) -> bytes:
        """Return float32 logits: at position p, all are p."""
        logits, num_prompt = self.request.logits, self.request.num_prompt
        if logits is None:
            return b""
        positions = range(logits.first_position(num_prompt), logits.end_position(num_prompt, self.done))
        return b"".join(pack_floats([float(position)] * logits.vocab_size) for position in positions)

    def tokens(self, begin: int, until: int) -> Tokens:
        ids, logprobs = self.ids[begin:until], self.logprobs[begin:until]
        likeliest = neighbours(ids, logprobs, self.request.top_n_tokens)
        own = (pack_ids(ids), pack_floats(logprobs), self.texts[begin:until])
        num_cached = 0 if begin else self.num_cached
        return Tokens(self.request.request_id, 1, begin, *own, *likeliest, num_cached=num_cached)

    @property
    def prompt(self) -> bytes:
        """Return log-probabilities of the prompt: each token is half a nat less likely than the one before
        it.
        """
        ids = unpack_ids(self.request.prompt_ids)[1:]
        logprobs = [-0.5 * i for i in range(1, 1 + len(ids))]
        likeliest = neighbours(ids, logprobs, self.request.prompt_logprobs or 0)
        return pack_records(pack_ids(ids), pack_floats(logprobs), *likeliest)


def neighbours(ids: list[int], logprobs: list[float], count: int) -> tuple[bytes, bytes]:
    """The likeliest tokens beside others: these themselves, then their neighbours, each a nat less likely."""
    others = [
        (token_id + i, logprob - i)
        for token_id, logprob in zip(ids, logprobs, strict=True)
        for i in range(count)
    ]
    return pack_ids([token_id for token_id, _ in others]), pack_floats([logprob for _, logprob in others])


class FakeWorker:
    """A worker that answers with `answer`. `pause` makes it keep all it holds until `going` is set.

    Attributes:
        spill_steps: its log is trimmed after so many steps.
        most_tokens: no row gets more than so many.
        max_total_tokens: of a prompt and its answer together, as it announces.
        keeps_logits: whether it writes the logits that requests return.
        held: the adapters that it has; None if it serves none.
        sees: whether it says that it computes pictures.
        pooling: what its model makes, if that is no tokens.
    """

    spill_steps = SPILL_STEPS
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
        self.redis: Redis = connect(url)
        self.keys, self.tokenizer, self.answer, self.step_s = Keys(pool), tokenizer, answer, step_s
        self.incarnation = f"w0-{secrets.token_hex(4)}"
        self.channels = ChannelSequences(self.incarnation)
        self.live: dict[str, Live] = {}
        self.seen: list[Generate] = []
        self.going, self.resting = asyncio.Event(), asyncio.Event()
        self.going.set()
        self.sequence = self.steps = 0
        self.last_entry, self.last_control = b"0", b"0"

    async def announce(self, state: str = "ready", num_blocks: int = 64) -> None:
        capacity = WorkerCapacity(
            *(self.incarnation, "w0", "fake", "float32", 16, num_blocks, 256, self.max_total_tokens),
            model_id="smollm2",
            vocab_size=VOCAB_SIZE,
            max_loras=0 if self.held is None else 4,
            max_lora_rank=0 if self.held is None else 64,
            pictures=self.sees,
            pooling=self.pooling,
        )
        call = worker_scripts.worker_heartbeat(
            self.keys,
            self.incarnation,
            capacity=encode(capacity),
            ttl_ms=TTL_MS,
            state=state,
            step=0,
            fields={} if self.held is None else {"adapters": encode(self.held)},
        )
        reply = await run_script(self.redis, call)
        assert reply == "OK", reply

    async def open(self) -> None:
        call = worker_scripts.create_logs(self.keys, self.incarnation, owner=self.incarnation)
        await run_script(self.redis, call)
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
        self.live[request.request_id] = live = self.row(entry_id, request)
        placed = {"worker": self.incarnation, "attempt": 1, "base": 0, "cached": live.num_cached}
        await self.redis.hset(self.keys.request(request.request_id), mapping=placed)  # type: ignore[misc]

    def row(self, entry_id: bytes, request: Generate) -> Live:
        return Live(entry_id, request, self.answer(request), self.tokenizer)

    def heed(self, fields: dict[bytes, bytes]) -> None:
        if b"cancel" in fields and (live := self.live.get(decode(Cancel, fields[b"cancel"]).request_id)):
            live.cancelled = True

    async def flush(self) -> None:
        """Run one step of every row: the next token of each, and the ends."""
        rows = [
            (
                live,
                live.tokens(live.done, live.done if live.cancelled else min(live.done + 1, self.most_tokens)),
            )
            for live in self.live.values()
        ]
        if not any(tokens.ids or live.reason for live, tokens in rows):
            return
        self.sequence, self.steps = self.sequence + 1, self.steps + 1
        messages: list[tuple[str, bytes]] = []
        for channel in {live.request.channel for live, _ in rows}:
            published = [tokens for live, tokens in rows if live.request.channel == channel and tokens.ids]
            if published:
                number = self.channels.next_number(channel, self.sequence)
                events = Events(self.incarnation, number, **as_sent(published), flush=self.sequence)
                messages.append((channel, encode(events)))
        with_prompt_logprobs = [
            live
            for live, tokens in rows
            if tokens.ids and not live.done and live.request.prompt_logprobs is not None
        ]
        for live, tokens in rows:
            live.done += len(tokens.ids) // 4
        ended = [live for live, _ in rows if live.reason]
        spilled = [live for live, _ in rows if not live.reason] if self.steps % self.spill_steps == 0 else []
        call = worker_scripts.flush(
            self.keys,
            self.incarnation,
            sequence=self.sequence,
            report=b"",
            acknowledged=0,
            mode="trim" if spilled else "",
            messages=messages,
            prompts=[FlushedPrompt(live.request.request_id, live.prompt) for live in with_prompt_logprobs],
            terminals=[self.terminal(live) for live in ended],
            spills=[
                FlushedSpill(live.request.request_id, 1, 0, 0, pack_tokens(live.tokens(0, live.done)))
                for live in spilled
            ],
        )
        for live in ended if self.keeps_logits else ():
            await self.write_logits(live)
        await self.write(call)
        for live in ended:
            await self.dequeue(live)

    async def write_logits(self, live: Live) -> None:
        """Write the logits of an answer in pieces of one row."""
        row_bytes = live.request.logits.row_bytes if live.request.logits else 1
        for place in range(len(live.logits) // row_bytes):
            call = worker_scripts.write_logits(
                self.keys,
                self.incarnation,
                live.request.request_id,
                attempt=1,
                base=0,
                place=place,
                num_rows=1,
                values=live.logits[place * row_bytes :][:row_bytes],
                ttl_ms=TTL_MS,
            )
            assert await run_script(self.redis, call) == 1

    async def write(self, call: ScriptCall[FlushReply]) -> None:
        """Write one flush, and retry while the broker is away: without it the next one is refused."""
        while True:
            try:
                reply = await run_script(self.redis, call)
            except ERRORS:
                await asyncio.sleep(0.05)
            else:
                assert reply.status == "OK", reply
                return

    def terminal(self, live: Live) -> FlushedTerminal:
        request, reason = live.request, live.reason or ""
        records = pack_sequences(live.beams) if live.beams else pack_tokens(live.tokens(0, live.done))
        num_tokens = len(records) // (RECORD.size * request.width)
        end = Terminal(request.request_id, reason, num_tokens, live.error, "generation" if live.error else "")
        number = self.channels.next_number(request.channel, self.sequence)
        payload = encode(Events(self.incarnation, number, terminals=[end], flush=self.sequence))
        ttl_ms = request.result_ttl_ms
        return FlushedTerminal(request.request_id, 1, 0, end, records, ttl_ms, request.channel, payload)

    async def dequeue(self, live: Live) -> None:
        request_id = live.request.request_id
        queued = QueuedRequest(request_id, live.entry_id.decode())
        await run_script(self.redis, batcher_scripts.dequeue(self.keys, queued))
        del self.live[request_id]

    async def repeat(self) -> None:
        for channel, payload in self.channels.repeated_messages():
            await self.redis.publish(channel, payload)


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
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.wait([task])
        await worker.redis.aclose()
        if not task.cancelled() and (error := task.exception()):
            raise error
