"""The end of requests that no worker holds, and the end of every entry."""

import logging

from redis.asyncio import Redis

from batcher.sequence import Sequence
from common.broker.client import script
from common.broker.keys import Keys
from common.broker.sequences import ChannelSequences
from common.messages.codec import encode
from common.messages.events import Events
from common.messages.finish_reasons import error_result, terminal_for
from common.process.logs import for_request

log = logging.getLogger(__name__)


class Terminals:
    """Says terminals for the batcher, and settles."""

    def __init__(self, redis: Redis, keys: Keys, channels: ChannelSequences) -> None:
        self.keys, self.channels = keys, channels
        self.finish_script = script(redis, "finish")
        self.settle_script = script(redis, "dequeue")

    async def finish(self, sequence: Sequence, why: str) -> None:
        """The terminal of a request that no worker holds; nothing happens if it has one already."""
        await self.say(
            sequence.request_id, sequence.request.channel, sequence.request.result_ttl_ms, why, sequence.base
        )
        log.info(
            "request %s ended by the batcher: %s",
            sequence.request_id,
            why,
            extra=for_request(sequence.request_id),
        )

    async def say(self, request_id: str, channel: str, ttl_ms: int, why: str, num_tokens: int) -> None:
        end = terminal_for(request_id, why, num_tokens)
        events = Events(
            self.channels.source, self.channels.next_number(channel) if channel else 0, terminals=[end]
        )
        await self.finish_script(
            keys=[self.keys.request(request_id), self.keys.result(request_id), self.keys.tokens(request_id)],
            args=[end.reason, error_result(end), ttl_ms, channel, encode(events)],
        )

    async def settle(self, request_id: str, entry_id: str, entry_bytes: int) -> None:
        """Takes the entry of an ended request out of the queue."""
        keys = [self.keys.requests, self.keys.requests_bytes, self.keys.tokens(request_id)]
        await self.settle_script(keys=keys, args=[entry_id, entry_bytes])
