"""Offers: a gateway tells a broker that may have lost requests what its streams have.

A restored broker lacks what was written last: requests, placements, tokens that clients have seen. The
gateway has these in its streams. Tokens that a client has seen are committed again, and the request goes on
after them.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import replace

from api.event_loop import RETRY_PAUSE_S, attempt, repeat_forever, retry_forever
from api.requests import request_scripts
from api.requests.request_scripts import OfferReply, cancel_request
from api.streams.stream import Stream
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, FailureLog
from common.broker.pool_client import PoolClient
from common.messages import events
from common.messages.events import Terminal
from common.messages.records import pack_columns
from common.process.logs import for_request, plural

log = logging.getLogger(__name__)

FORGOTTEN = "the broker does not know the request any more: its data was deleted, or lost"
STREAMS_AT_ONCE = 16


def time_out(stream: Stream) -> None:
    """End a stream with the error of a missed deadline, which the fleet has not sent."""
    error_type, why = events.ERRORS["timeout"]
    stream.fail(why, error_type)


def supersede(stream: Stream) -> None:
    """End a stream whose request has a newer reader."""
    why = "another connection goes on with this answer"
    stream.end(Terminal(stream.request.request_id, "error", 0, why, "superseded"))


class Offers:
    """Offers streams on request; and all of them when the broker is another server than before, as after a
    restart or a failover.

    Attributes:
        streams: the relay's, by request id.
        pending: id of a stream to offer → whether its request has ended in Redis with other tokens.
        connected: set when a connection to the broker was made.
        server_id: the last known id of the broker's server. Another one, as after a restart or a failover,
            may lack what was written last.
    """

    def __init__(self, client: PoolClient, streams: dict[str, Stream]) -> None:
        self.client = client
        self.streams = streams
        self.pending: dict[str, bool] = {}
        self.requested = asyncio.Event()
        self.connected = asyncio.Event()
        self.server_id = ""
        self.num_offers = 0
        self.failures = FailureLog(log, "offering streams")

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.offer_pending())
            tasks.create_task(repeat_forever(self.watch_server, "asking which server the broker is"))

    def request_offer(self, streams: Iterable[Stream], reopen: bool = False) -> None:
        """Offer these streams soon. `reopen`: their requests have ended in Redis with other tokens."""
        for stream in streams:
            name = stream.request.request_id
            self.pending[name] = reopen or self.pending.get(name, False)
            self.requested.set()

    def offer_unknown(self, stream: Stream) -> None:
        """Offer a stream whose keys are gone; end it after its deadline, because then they have expired."""
        if time.monotonic() > stream.deadline_s:
            time_out(stream)
        elif stream.released:
            stream.fail(FORGOTTEN)
        else:
            self.request_offer([stream])

    async def watch_server(self) -> None:
        """Once connected, offer all streams if the broker is not the server of before."""
        await self.connected.wait()
        self.connected.clear()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                server_id = str((await self.client.redis.info("server"))["run_id"])
        except ERRORS:
            self.connected.set()
            raise
        if self.server_id and server_id != self.server_id:
            num_streams = plural(len(self.streams), "stream")
            log.warning("the broker was restarted or replaced: offering it %s", num_streams)
            self.request_offer(self.streams.values())
        self.server_id = server_id

    async def offer_pending(self) -> None:
        while True:
            await self.requested.wait()
            self.requested.clear()
            names, self.pending = list(self.pending.items()), {}
            for i in range(0, len(names), STREAMS_AT_ONCE):
                part = [
                    (self.streams[name], reopen)
                    for name, reopen in names[i : i + STREAMS_AT_ONCE]
                    if name in self.streams
                ]
                await asyncio.gather(*(self.offer(stream, reopen) for stream, reopen in part))

    async def offer(self, stream: Stream, reopen: bool) -> None:
        """Offer one stream; if the broker fails, request it again."""
        if not stream.admitted or stream.terminal or stream.released:
            return
        ttl_ms = stream.request.ttl_ms - round((time.monotonic() - stream.times.started_s) * 1000)
        if ttl_ms <= 0:
            time_out(stream)
            return
        with self.failures.caught():
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reply = await self.send(stream, ttl_ms, reopen)
            self.num_offers += 1
            self.apply(stream, reply)
            if reply.outcome == "queued" and (stream.terminal or stream.released):
                await self.cancel(stream)
            return
        await asyncio.sleep(RETRY_PAUSE_S)
        self.request_offer([stream], reopen)

    async def cancel(self, stream: Stream) -> None:
        """Cancel a request whose stream ended here while it was offered. Its keys expire."""

        async def cancel_in_time() -> bool:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await cancel_request(self.client, stream.request.request_id)

        await attempt(cancel_in_time, retry_forever)

    def apply(self, stream: Stream, reply: OfferReply) -> None:
        """Apply the reply to an offer."""
        request_id = stream.request.request_id
        extra = for_request(request_id, stream.request.traceparent)
        shown = plural(stream.num_tokens, "token")
        match reply.outcome:
            case "queued":
                log.warning("request %s is queued again, after %s", request_id, shown, extra=extra)
            case "void":
                log.warning("request %s goes on after %s", request_id, shown, extra=extra)
            case "superseded":
                supersede(stream)
            case "foreign":
                stream.fail(FORGOTTEN)
        stream.note_offered(reply.attempt)

    async def send(self, stream: Stream, ttl_ms: int, reopen: bool) -> OfferReply:
        """Run the script `offer`."""
        call = request_scripts.offer(
            self.client.keys,
            replace(stream.request, ttl_ms=ttl_ms, num_shown=stream.num_tokens),
            made_by=stream.lineage.worker,
            made_in=stream.lineage.attempt,
            records=pack_columns(stream.ids, stream.logprobs, stream.tops),
            prompt_records=stream.prompt.records or b"",
            num_cached=stream.prompt.num_cached if stream.ids else None,
            reopen=reopen,
            answer=stream.answer,
            reader=stream.reader,
            connection=stream.connection,
        )
        return await self.client.run(call)
