"""Batch run: one batch while this gateway is its writer.

Lines are answered as jobs with ids of their own, so a line that was admitted before goes on and is not
computed again. Answers are written in the order of the input, in parts. A part counts once Redis has its
name, together with the line and the offset after it: whoever goes on begins there.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from functools import partial

from api.errors import ApiError, internal_error, openai
from api.event_loop import Pace, attempt, offload, repeat_forever, retry_forever
from api.jobs.batch import (
    ENDED,
    FILES,
    Batch,
    BatchLine,
    choose_batches,
    job_id_of,
    line_fault,
    make_job,
    needed_files,
    read_batch,
    read_line,
    render_line,
)
from api.jobs.consumer import JobConsumer
from api.jobs.files import FileStore, lines_of
from api.jobs.job import Job
from api.jobs.records import cancel_job
from api.json import to_json
from api.requests.service_terms import ServiceTerms
from common.broker.client import ERRORS
from common.broker.keys import BATCH_TTL_MS, Keys, request_keys
from common.broker.lua import Args, Fields, ScriptCall, call_script, in_pairs
from common.metrics.catalogue import BATCH_LINES
from common.process.event_loop import run_until_one_ends, until_beat

log = logging.getLogger(__name__)

MAX_LINES = 50_000
"""Requests of one batch."""
WINDOW = 256
"""Requests of one batch that are queued or computed at once."""

LEASE_MS = 5_000
RENEW_S = 1.0
COMMIT_BYTES = 2**20
COMMIT_S, PARTS_A_SECOND = 2.0, 50
"""Least time between parts, and how many of them make it longer by a second."""
MAX_ERRORS = 100
"""Faults of the input that a failed batch lists."""
MAX_WINDOW_BYTES = 64 * 2**20
"""Input of the lines that are being answered; a single line may be longer."""
MAX_TRIES = 2
"""Of a line that cannot be served, and of a batch that cannot go on after a line."""
OF_THE_WRITER = ("epoch", "leased_until_ms")
"""Fields that are a writer's, not the batch's."""
PROGRESS = ("next_line", "offset", "total", "completed", "failed")
"""Fields that say how far a batch is: the line and the offset of the input after the lines that are answered,
and how many these are.
"""
INPUT_GONE = line_fault("input_file_missing", "The input file, or a part of it, is gone.", "input_file_id")
WHY_ENDED = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}


class WriterReplaced(Exception):
    """A batch that another gateway writes now."""


@dataclasses.dataclass(frozen=True, slots=True)
class PendingLine:
    """A line that is being answered.

    Attributes:
        after: offset of the input after it.
    """

    number: int
    line: BatchLine
    size: int
    after: int
    answer: asyncio.Task[tuple[int, bytes]]


class BatchRun:
    """One batch, from its validation to its files.

    Attributes:
        epoch: of this writer; Redis refuses what an earlier one writes.
        ending: `cancelled` or `expired`, once no further line is served.
        progress: PROGRESS with the answers that are not committed.
        buffers: answers that are not committed, for the output and the error file.
        answered: ids of jobs whose answers are not committed.
        written: what Redis has of it: written again when the broker has lost some of it.
        last_part: the field of its last part.
    """

    def __init__(self, store: FileStore, consumer: JobConsumer, batch: Batch, epoch: int) -> None:
        self.store = store
        self.consumer = consumer
        self.pool = consumer.pool
        self.settings = consumer.settings
        self.batch = batch
        self.epoch = epoch
        self.ending = ""
        self.progress = {name: batch.number(name) for name in PROGRESS}
        self.buffers = {kind: bytearray() for kind in FILES}
        self.answered: list[str] = []
        self.written = {name: value for name, value in batch.fields.items() if name not in OF_THE_WRITER}
        self.last_part = ""
        self.pending: deque[PendingLine] = deque()
        self.commit_due_s = time.monotonic() + COMMIT_S

    @property
    def so_far(self) -> Batch:
        """The batch as Redis has it."""
        return dataclasses.replace(self.batch, fields=self.written)

    async def run(self, fault: ApiError | None = None) -> None:
        """Returns when the batch has ended, at once with a `fault`. Raises WriterReplaced. The requests of a
        run that is cancelled go on.
        """
        try:
            await run_until_one_ends(self.renew_lease(), self.finish(fault) if fault else self.work())
        finally:
            answers = [one.answer for one in self.pending]
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

    async def work(self) -> None:
        await self.pool.keys.was_read.wait()
        if self.batch.fields["status"] == "validating" and not await self.validate():
            return
        await self.answer_lines()
        await self.finish()

    async def read_input(self, number: int = 0, offset: int = 0) -> AsyncIterator[tuple[int, int, bytes]]:
        """The lines of the input after one of them: the number of each, the offset after it, and its text.
        Raises ApiError: 404 if a part of it is gone, 503.
        """
        file = await self.store.find_kept(self.batch.owner, self.batch.input_file_id)
        async for text, size in lines_of(self.store.read(file, offset), self.pool.max_body_bytes):
            number, offset = number + 1, offset + size + 1
            if text.strip():
                yield number, offset, text

    async def read_line(self, text: bytes) -> BatchLine:
        """Raises ApiError: a `line_fault`."""
        limit = self.pool.max_body_bytes
        return await offload(len(text), partial(read_line, text, self.batch.endpoint, limit))

    async def wait_for_store(self, error: Exception) -> None:
        """Retry policy: wait for a store that does not answer. Raises ApiError (404) for what it says is
        gone.
        """
        if isinstance(error, ApiError) and error.status == 404:
            raise error
        log.warning("batch %s waits: %s", self.batch.id, error)
        await asyncio.sleep(RENEW_S)

    # --- the lease ------------------------------------------------------------------------------------------

    async def renew_lease(self) -> None:
        """Keep the lease, and see whether a client has cancelled the batch, or its time is over."""
        while True:
            state = await self.write({})
            deadline_s = self.batch.deadline_s
            if state == "cancelled":
                await self.end("cancelled")
            elif deadline_s is not None and self.pool.client.clock.now_s() > deadline_s:
                await self.end("expired")
            await asyncio.sleep(RENEW_S)

    async def write(self, fields: Mapping[str, str | int], ended: bool = False) -> str:
        """Write fields of the batch, and all of them if the broker has lost some, as in a failover. Returns
        `live` or `cancelled`. Raises WriterReplaced.
        """
        state = await self.run_write(fields, ended, self.last_part)
        if state == "hole":
            log.warning("the broker has lost parts of batch %s: they are written again", self.batch.id)
            state = await self.run_write({**self.written, **fields}, ended)
        if state == "lost":
            raise WriterReplaced(self.batch.id)
        self.written |= {name: str(value) for name, value in fields.items()}
        self.last_part = next((name for name in fields if ":" in name), self.last_part)
        return state

    async def run_write(self, fields: Mapping[str, str | int], ended: bool, last_part: str = "") -> str:
        keys, batch = self.pool.client.keys, self.batch
        call = write_batch(keys, batch.member, fields, self.epoch, ended=ended, last_part=last_part)
        return await attempt(lambda: self.pool.client.run(call), retry_forever)

    async def end(self, why: str) -> None:
        """Serve no further line, and cancel those that are being answered."""
        if self.ending:
            return
        self.ending = why
        for one in [*self.pending]:  # answers are taken meanwhile
            if not one.answer.done():
                job_id = job_id_of(self.batch.id, one.number)
                await attempt(partial(cancel_job, self.pool, job_id), retry_forever)

    # --- validation -----------------------------------------------------------------------------------------

    async def validate(self) -> bool:
        """Read the whole input once. Returns False for a batch that has failed."""
        try:
            total, errors = await attempt(self.check_input, self.wait_for_store)
        except ApiError:
            total, errors = 0, [described(INPUT_GONE)]
        now_s = int(self.pool.client.clock.now_s())
        if errors:
            await self.write({"status": "failed", "failed_at": now_s, "errors": listed(errors)}, ended=True)
            return False
        self.progress["total"] = total
        await self.write({"status": "in_progress", "in_progress_at": now_s, "total": total})
        return True

    async def check_input(self) -> tuple[int, list[dict[str, object]]]:
        """The number of requests, and what is wrong with them. Raises ApiError."""
        seen, errors, pace = set[bytes](), list[dict[str, object]](), Pace()
        async for number, _, text in self.read_input():
            await pace.step()
            try:
                line = await self.read_line(text)
                # a set of 50,000 takes some megabytes, however long the ids are
                digest = hashlib.blake2b(line.custom_id.encode(), digest_size=12).digest()
                if digest in seen:
                    why = "An earlier line has this `custom_id`."
                    raise line_fault("duplicate_custom_id", why, "custom_id")
                seen.add(digest)
                if len(seen) > MAX_LINES:
                    raise line_fault("too_many_tasks", f"A batch has at most {MAX_LINES} requests.")
            except ApiError as fault:
                errors.append(described(fault, number))
                if len(errors) >= MAX_ERRORS or fault.code == "too_many_tasks":
                    break
        if not seen and not errors:
            errors.append(described(line_fault("empty_file", "The input has no requests.")))
        return len(seen), errors

    # --- answers --------------------------------------------------------------------------------------------

    async def answer_lines(self) -> None:
        """Answer the lines after those that are committed, some at once, and write them in their order."""
        source = self.read_rest()
        size, is_read = 0, False
        while not is_read or self.pending:
            while not is_read and len(self.pending) < WINDOW and size < MAX_WINDOW_BYTES:
                if (one := await anext(source, None)) is None:
                    is_read = True
                    break
                self.pending.append(one)
                size += one.size
            if self.pending:
                await self.take_answer(self.pending[0])
                size -= self.pending.popleft().size
            await self.commit_if_due()
        await self.commit()

    async def read_rest(self) -> AsyncIterator[PendingLine]:
        """Begin to answer each line. It ends early if the rest of the input is gone."""
        place = self.progress["next_line"], self.progress["offset"]
        while True:
            try:
                async for number, after, text in self.read_input(*place):
                    place = number, after
                    yield await self.begin(number, after, text)
                return
            except ApiError as error:
                if error.status == 404:
                    log.error("batch %s: %s", self.batch.id, error)
                    return
                await self.wait_for_store(error)

    async def begin(self, number: int, after: int, text: bytes) -> PendingLine:
        """Begin to answer a line. One that cannot be read any more, as a limit was lowered, fails."""
        try:
            line = await self.read_line(text)
        except ApiError as fault:
            line = BatchLine("", {}, fault)
        return PendingLine(number, line, len(text), after, asyncio.create_task(self.answer(number, line)))

    async def answer(self, number: int, line: BatchLine) -> tuple[int, bytes]:
        """The answer to a line, as HTTP would give it; 503 and nothing if it is not served, because the batch
        has ended. A line that cannot be served, whatever it is, is tried twice.
        """
        for _ in range(MAX_TRIES):
            if self.ending:
                return 503, b""
            try:
                return await self.consumer.answer_own(self.job(number, line))
            except ApiError as error:  # its API key counts no more
                return error_answer(error)
            except Exception as error:
                log.exception("line %d of batch %s", number, self.batch.id)
                why = f"line {number} of the input cannot be served: {type(error).__name__}"
        return error_answer(internal_error(why))

    def job(self, number: int, line: BatchLine) -> Job:
        batch = self.batch
        key = self.pool.keys.named(batch.key_id) if batch.key_id else None
        terms = ServiceTerms("batch", batch.owner, None, key)
        return make_job(line, job_id_of(batch.id, number), batch.made_ms, number, terms, batch.endpoint)

    async def take_answer(self, one: PendingLine) -> None:
        """Wait for the answer to the next line, and add it to a buffer."""
        job_id = job_id_of(self.batch.id, one.number)
        status, answer = await one.answer
        is_cut = self.ending and status >= 500  # broken off: it is no fault of its own
        unserved = WHY_ENDED[self.ending] if is_cut else None
        outcome, file = ("completed", "output") if status == 200 else ("failed", "error")
        BATCH_LINES.add(1, outcome)
        self.buffers[file] += render_line(job_id, one.line.custom_id, status, answer, unserved)
        self.answered.append(job_id)
        self.progress[outcome] += 1
        self.progress |= {"next_line": one.number, "offset": one.after}

    async def commit_if_due(self) -> None:
        num_bytes = sum(map(len, self.buffers.values()))
        if num_bytes > COMMIT_BYTES or (num_bytes and time.monotonic() > self.commit_due_s):
            await self.commit()

    async def commit(self) -> None:
        """Write the buffers as parts, then their names with the place in the input, then forget the jobs."""
        fields: dict[str, str | int] = {**self.progress}
        place = f"{self.progress['next_line']:09d}"
        for kind, buffer in self.buffers.items():
            if buffer:
                part = f"{place}-{self.epoch}"
                put = partial(
                    self.store.put_part, self.batch.owner, self.batch.file_id(kind), part, bytes(buffer)
                )
                await attempt(put, self.wait_for_store)
                fields[f"{kind}:{place}"] = f"{part} {len(buffer)}"
        await self.write(fields)
        for buffer in self.buffers.values():
            buffer.clear()
        answered, self.answered = self.answered, []
        await self.forget(answered)
        self.commit_due_s = time.monotonic() + max(COMMIT_S, len(self.written) / PARTS_A_SECOND)

    async def forget(self, job_ids: list[str]) -> None:
        """Delete what Redis has of jobs whose answers are committed."""
        keys = self.pool.client.keys
        names = [name for job_id in job_ids for name in (keys.job(job_id), keys.result(job_id))]
        names += request_keys(keys, [f"{job_id}#0" for job_id in job_ids])
        if names:
            await attempt(lambda: self.pool.client.redis.delete(*names), retry_forever)

    async def finish(self, fault: ApiError | None = None) -> None:
        """Write the records of the files, and the last state. A batch with a fault, or with lines that were
        not answered, has failed: these lines count as failed, and its `errors` say why.
        """
        now_s = int(self.pool.client.clock.now_s())
        await self.write({"status": "finalizing", "finalizing_at": now_s})
        batch = self.so_far
        fields: dict[str, str | int] = {}
        for kind in FILES:
            if (file := batch.file(kind, now_s)) is not None:
                await attempt(partial(self.store.put_record, file), self.wait_for_store)
                fields[f"{kind}_file_id"] = file.id
        status = self.ending or "completed"
        num_missing = batch.number("total") - batch.number("completed") - batch.number("failed")
        if fault or num_missing:
            status = self.ending or "failed"
            fields["failed"] = batch.number("failed") + num_missing
            fields["errors"] = listed([described(fault or INPUT_GONE)])
        assert status in ENDED
        await self.write(fields | {"status": status, f"{status}_at": now_s}, ended=True)
        log.info("batch %s has ended: %s", batch.id, status)


def write_batch(
    keys: Keys,
    member: str,
    fields: Fields,
    epoch: int,
    lease_ms: int = LEASE_MS,
    *,
    ended: bool = False,
    last_part: str = "",
) -> ScriptCall[str]:
    """Write fields, and renew the lease. The reply is `lost`, `hole`, `cancelled` or `live`.

    Args:
        lease_ms: 0 gives the batch up to another writer.
        last_part: the field of the last part that was written; without it, holes are filled.
    """
    args: Args = {
        "member": member,
        "epoch": epoch,
        "lease_ms": lease_ms,
        "ttl_ms": BATCH_TTL_MS,
        "ended": int(ended),
        "last_part": last_part,
    }
    batch_id = member.rpartition(" ")[2]
    return call_script("write_batch", bytes.decode, keys, batch_id, args=args, more_args=in_pairs(fields))


def error_answer(error: ApiError) -> tuple[int, bytes]:
    status, body = openai(error)
    return status, to_json(body)


def described(fault: ApiError, number: int = 0) -> dict[str, object]:
    """A fault as an item of a batch's `errors`. `number`, of its line, counts from 1."""
    return {"code": fault.code, "line": number, "message": fault.text, "param": fault.param}


def listed(errors: list[dict[str, object]]) -> str:
    """The field `errors` of a batch."""
    return to_json({"object": "list", "data": errors}).decode()


# --- runner -------------------------------------------------------------------------------------------------


MAX_RUNNING = 4
"""Batches of the pool that are served at once."""
POLL_S = 1.0
SWEEP_S = 600.0
CANNOT_GO_ON = line_fault("server_error", f"The batch could not go on, {MAX_TRIES} times.")


class BatchRunner:
    """The batches that this gateway writes.

    Attributes:
        runs: by owner and id.
    """

    def __init__(self, store: FileStore, consumer: JobConsumer) -> None:
        self.store = store
        self.consumer = consumer
        self.client = consumer.pool.client
        self.runs: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as self.tasks:
            self.tasks.create_task(repeat_forever(self.delete_expired, "deleting expired files"))
            self.tasks.create_task(repeat_forever(self.look, "looking for batches"))

    async def look(self) -> None:
        """Take the batches that are to be served and have no writer; give up those that are not."""
        await asyncio.sleep(until_beat(POLL_S))
        redis, keys = self.client.redis, self.client.keys
        members = [member.decode() for member in await redis.zrange(keys.live_batches, 0, -1)]
        chosen = choose_batches(members, MAX_RUNNING)
        for member in self.runs.keys() - {*chosen}:
            self.runs[member].cancel()
        for member in chosen:
            if member not in self.runs:
                await self.claim(member)

    async def claim(self, member: str) -> None:
        """Write a batch, if nobody else does. One that cannot be read has failed."""
        batch_id = member.rpartition(" ")[2]
        args: Args = {"member": member, "lease_ms": LEASE_MS}
        call = call_script("claim_batch", int, self.client.keys, batch_id, args=args)
        epoch = await self.client.run(call)
        if not epoch:
            return
        if (batch := await read_batch(self.client, batch_id)) is None:
            log.error("batch %s cannot be read: it has failed", batch_id)
            failed = {"status": "failed"}
            await self.client.run(write_batch(self.client.keys, member, failed, epoch, 0, ended=True))
        else:
            task = self.runs[member] = self.tasks.create_task(self.serve(batch, epoch))
            task.add_done_callback(lambda _: self.runs.pop(member, None))

    async def serve(self, batch: Batch, epoch: int) -> None:
        """Serve a batch until it has ended, or it is another gateway's. After a fault it begins again after
        its last part; where it could not go on MAX_TRIES times, it ends. One that is not to be served now is
        left to the next who looks; if the broker does not answer, its lease expires.
        """
        for fault in (*[None] * MAX_TRIES, CANNOT_GO_ON):
            run = BatchRun(self.store, self.consumer, batch, epoch)
            try:
                await run.run(fault)
                return
            except WriterReplaced:
                log.warning("batch %s: another gateway writes it", batch.id)
                return
            except asyncio.CancelledError:
                with contextlib.suppress(*ERRORS):
                    await self.client.run(write_batch(self.client.keys, batch.member, {}, epoch, 0))
                raise
            except Exception:
                log.exception("batch %s could not go on", batch.id)
                batch = run.so_far

    async def delete_expired(self) -> None:
        """Delete the files whose time is over, by the broker's clock."""
        await asyncio.sleep(until_beat(SWEEP_S))
        now_s = await self.client.read_time()
        with contextlib.suppress(ApiError):  # the store has logged why; it is asked again
            await self.store.delete_expired(now_s, await needed_files(self.client))
