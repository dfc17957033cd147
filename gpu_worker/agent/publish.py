"""Publisher: writes one flush (token log, report, events, terminals, spills) in one call of flush.lua."""

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from common.broker.fast_client import SerialClient
from common.broker.keys import TOKENS_TTL_MS, Keys
from common.broker.sequences import ChannelSequences
from common.messages.codec import encode
from common.messages.events import Events, LogEntry, Terminal, Tokens
from common.messages.finish_reasons import FINISHED, error_result, final_result, terminal_for
from common.messages.plan import Report
from common.metrics import catalogue
from gpu_worker.agent.outbox import Outbox
from gpu_worker.agent.row_text import RowText

SPILL_EVERY = 64
"""After so many flushes every live row's tokens are copied to the request's own string, and the log is
trimmed: this bounds the log.
"""


class Sealed(Exception):
    """This incarnation has been declared dead, or its streams are gone: it may publish nothing more."""


@dataclass(slots=True)
class Flush:
    """Keys and arguments of one call of flush.lua; a repeated call changes nothing.

    Attributes:
        spilled: (row, number of its tokens) of rows whose tokens stand in their own strings after the flush.
        method: `prefill` where a prompt was computed, else `decode`.
    """

    keys: list[str]
    args: list[Any]
    spilled: list[tuple[RowText, int]]
    method: str


class Publisher:
    """Builds and writes the flushes of one incarnation, one after the other."""

    def __init__(self, redis: Redis, keys: Keys, incarnation: str) -> None:
        self.keys = keys
        self.incarnation = incarnation
        self.channels = ChannelSequences(incarnation)
        self.client = SerialClient(redis)
        self.script = self.client.script("flush")
        self.sequence = 0

    def build(self, outbox: Outbox, report: Report | None, acknowledged: int, live: list[RowText]) -> Flush:
        """Builds the flush of an outbox. `report` carries the flush's number; `live` rows are spilled every
        64 flushes.
        """
        self.sequence += 1
        trim = self.sequence % SPILL_EVERY == 0
        by_channel: defaultdict[str, list[Tokens]] = defaultdict(list)
        new = [row.new_tokens() for row in outbox.rows]
        for row, tokens in zip(outbox.rows, new, strict=True):
            if channel := row.request.channel:
                by_channel[channel].append(tokens)
        messages = [self.events(channel, tokens) for channel, tokens in by_channel.items()]
        for (
            tokens
        ) in new:  # the log needs no text; to copy the message would cost a tenth of what a token costs
            tokens.texts = []
        spills = [*outbox.interrupted, *(live if trim else ())]
        keys, args = [self.keys.log(self.incarnation), self.keys.reports(self.incarnation)], []
        for row in outbox.prompts:
            keys.append(self.keys.request(row.request.request_id))
            args.append(bytes(row.prompt or b""))
        for row, why in outbox.terminals:
            keys += self.terminal_keys(row.request.request_id)
            args += self.terminal(row, why)
        for row in spills:
            keys.append(self.keys.tokens(row.request.request_id))
            args += [row.spilled_bytes, row.unspilled()]
        head = [
            self.sequence,
            encode(LogEntry(new)),
            encode(report) if report else "",
            f"{acknowledged}-0",
            TOKENS_TTL_MS,
        ]
        counts = [len(messages), len(outbox.prompts), len(outbox.terminals), len(spills), "1" if trim else ""]
        flat = [part for message in messages for part in message]
        method = "prefill" if outbox.prefilled else "decode"
        return Flush(keys, [*head, *counts, *flat, *args], [(row, row.num_tokens) for row in spills], method)

    def events(self, channel: str, tokens: list[Tokens]) -> tuple[str, bytes]:
        number = self.channels.next_number(channel, self.sequence)
        return channel, encode(Events(self.incarnation, number, tokens, flush=self.sequence))

    def terminal_keys(self, request_id: str) -> list[str]:
        return [self.keys.request(request_id), self.keys.result(request_id), self.keys.tokens(request_id)]

    def terminal(self, row: RowText, why: str) -> list[Any]:
        """Returns reason, result, its time to live, channel and event of a request that ends."""
        request = row.request
        end = terminal_for(request.request_id, why, row.num_tokens)
        result = (
            final_result(request, end, row.text(why), bytes(row.records))
            if why in FINISHED
            else error_result(end)
        )
        channel = request.channel
        event = self.end_event(channel, end) if channel else b""
        return [end.reason, result, request.result_ttl_ms, channel, event]

    def end_event(self, channel: str, end: Terminal) -> bytes:
        number = self.channels.next_number(channel, self.sequence)
        return encode(Events(self.incarnation, number, terminals=[end], flush=self.sequence))

    async def write(self, flush: Flush) -> None:
        """Writes a flush. Raises Sealed, or what the broker raises: then the same flush
        may be written again.
        """
        started_s = time.perf_counter()
        reply: bytes = await self.script(keys=flush.keys, args=flush.args)
        catalogue.BATCH_FILTER.observe(time.perf_counter() - started_s, flush.method)
        if reply != b"OK":
            raise Sealed(reply.decode())
        for row, num_tokens in flush.spilled:
            row.num_spilled = num_tokens
