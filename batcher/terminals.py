"""Terminals: ends requests that no worker holds, and removes the queue entries of all that have ended."""

import logging

from batcher import batcher_scripts, inbox
from batcher.batcher_scripts import QueuedRequest
from batcher.inbox import StreamEntry
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from batcher.timeline import TimelineWriter
from common.broker.lua import ScriptCall
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import ChannelSequences, Events, terminal_for
from common.process.logs import for_request

log = logging.getLogger(__name__)
UNDECODABLE_RESULT_TTL_MS = 60_000


class Terminals:
    """Publishes the batcher's terminals. Each method may be repeated: a request gets one terminal only."""

    def __init__(
        self,
        pool: PoolClient,
        channels: ChannelSequences,
        scheduler: Scheduler,
        timeline: TimelineWriter,
    ) -> None:
        self.pool = pool
        self.channels = channels
        self.scheduler = scheduler
        self.timeline = timeline

    async def finish(self, sequence: Sequence, why: str) -> None:
        """End a request that no worker holds. A terminal that it has already stays."""
        request = sequence.request
        await self.publish(request.request_id, request.channel, request.result_ttl_ms, why, sequence.base)
        log.info(
            "request %s ended by the batcher: %s",
            request.request_id,
            why,
            extra=for_request(request.request_id, request.traceparent),
        )
        await self.dequeue(sequence)
        self.timeline.record(sequence, "ended", num_tokens=sequence.base, why=why)

    async def dequeue(self, sequence: Sequence) -> bool:
        """Remove a request from the queue and from the scheduler, if it has its terminal. Return whether it
        has.
        """
        if has_ended := await self.delete_entry(sequence.request_id, sequence.entry_id):
            self.on_dequeued(sequence)
        return has_ended

    def on_dequeued(self, sequence: Sequence) -> None:
        self.scheduler.forget(sequence)
        self.timeline.record_dequeued(sequence)

    async def replace_entry(self, sequence: Sequence, entry: StreamEntry) -> None:
        """Remove the entry of a live request that a gateway has queued again, after the broker lost it."""
        if sequence.entry_id != entry.id:
            await self.delete_entry("", sequence.entry_id)
        sequence.entry_id = entry.id

    async def finish_undecodable(self, entry: StreamEntry) -> None:
        """Remove an entry that is no valid request; publish a terminal if its request id can be read."""
        if (request_id := inbox.parse_request_id(entry.data)) is not None:
            channel: bytes | None = await self.pool.redis.hget(self.pool.keys.request(request_id), "channel")  # type: ignore[misc]
            await self.publish(
                request_id, (channel or b"").decode(), UNDECODABLE_RESULT_TTL_MS, "malformed", 0
            )
        await self.delete_entry(request_id or "", entry.id)

    async def publish(self, request_id: str, channel: str, ttl_ms: int, why: str, num_tokens: int) -> None:
        terminal = terminal_for(request_id, why, num_tokens)
        number = self.channels.next_number(channel) if channel else 0
        events = Events(self.channels.source, number, terminals=[terminal])
        await self.pool.run(
            batcher_scripts.finish(
                self.pool.keys, terminal, records=b"", ttl_ms=ttl_ms, channel=channel, payload=encode(events)
            )
        )

    async def delete_entry(self, request_id: str, entry_id: str) -> bool:
        call = batcher_scripts.dequeue(self.pool.keys, QueuedRequest(request_id, entry_id))
        return (await self.pool.run(call))[0]

    def dequeue_call(self, sequences: list[Sequence]) -> ScriptCall[list[bool]]:
        requests = [QueuedRequest(one.request_id, one.entry_id) for one in sequences]
        return batcher_scripts.dequeue(self.pool.keys, *requests)
