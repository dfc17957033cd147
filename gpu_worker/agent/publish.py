"""One flush: token log, report, events, terminals and spills, in one script."""

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from common.broker.fast_client import SerialClient
from common.broker.keys import TOKENS_TTL_MS, Keys
from common.broker.sequences import ChannelSequences
from common.messages.codec import encode
from common.messages.events import Events, LogEntry, Tokens
from common.messages.finish_reasons import FINISHED, error_result, final_result, terminal_for
from common.messages.plan import Report
from common.metrics import catalogue
from gpu_worker.agent.outbox import Outbox
from gpu_worker.agent.row_text import RowText

SPILL_EVERY = 64
"""Flushes after which every live row's tokens are copied to its own string, and the log is trimmed: the bound
of the log.
"""


class Sealed(Exception):
    """This incarnation has been declared dead, or its streams are gone: nothing of it may be seen any more."""


@dataclass(slots=True)
class Flush:
    """Keys and arguments of one call of flush.lua; calling it again does nothing new.

    Attributes:
        spilled: (row, number of its tokens) that stand in their own strings once the flush is done.
        method: `prefill` where it tells of a prompt that was computed, else `decode`.
    """

    keys: list[str]
    args: list[Any]
    spilled: list[tuple[RowText, int]]
    method: str


class Publisher:
    """Writes flushes, one after the other."""

    def __init__(self, redis: Redis, keys: Keys, incarnation: str) -> None:
        self.keys, self.incarnation = keys, incarnation
        self.channels = ChannelSequences(incarnation)
        self.line = SerialClient(redis)
        self.script = self.line.script("flush")
        self.sequence = 0

    def build(self, outbox: Outbox, report: Report | None, acknowledged: int, live: list[RowText]) -> Flush:
        """The flush of an outbox. `live` rows are spilled every so many flushes; `report` gets this flush's
        number.
        """
        self.sequence += 1
        trim = self.sequence % SPILL_EVERY == 0
        by_channel: defaultdict[str, list[Tokens]] = defaultdict(list)
        new = [row.new_tokens() for row in outbox.rows]
        for row, tokens in zip(outbox.rows, new, strict=True):
            if channel := row.request.channel:
                by_channel[channel].append(tokens)
        messages = [self.message(channel, tokens) for channel, tokens in by_channel.items()]
        for tokens in new:  # the log is without; a copy of each would be a tenth of what its token costs
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

    def message(self, channel: str, tokens: list[Tokens]) -> tuple[str, bytes]:
        return channel, encode(Events(self.incarnation, self.channels.next_number(channel), tokens))

    def terminal_keys(self, request_id: str) -> list[str]:
        return [self.keys.request(request_id), self.keys.result(request_id), self.keys.tokens(request_id)]

    def terminal(self, row: RowText, why: str) -> list[Any]:
        """Reason, result, its time to live, channel and message of a request that ends."""
        request = row.request
        end = terminal_for(request.request_id, why, row.num_tokens)
        result = (
            final_result(request, end, row.text(why), bytes(row.records))
            if why in FINISHED
            else error_result(end)
        )
        channel = request.channel
        event = (
            encode(Events(self.incarnation, self.channels.next_number(channel), terminals=[end]))
            if channel
            else b""
        )
        return [end.reason, result, request.result_ttl_ms, channel, event]

    async def write(self, flush: Flush) -> None:
        """Raises Sealed, or whatever the broker raises; after that the same flush may be written again."""
        began_s = time.perf_counter()
        said: bytes = await self.script(keys=flush.keys, args=flush.args)
        catalogue.BATCH_FILTER.observe(time.perf_counter() - began_s, flush.method)
        if said != b"OK":
            raise Sealed(said.decode())
        for row, num_tokens in flush.spilled:
            row.num_spilled = num_tokens
