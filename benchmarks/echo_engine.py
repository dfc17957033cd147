"""The engine of benchmarks/agent.py. Its words: handle of the socket, broker, channel, steps, 1 to wait.

It subscribes to the gateway's channel to see when tokens are published, and ends with the last one.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from redis import Redis

from common.messages.codec import decode
from common.messages.events import Events
from common.messages.plan import Plan
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.protocol import AgentLink, encode
from tests.support.chaos.engine import ScriptedEngine

DURATION_S = 0.01
"""What a step says that it took: so a flush does not wait for the next one."""


class EchoEngine(ScriptedEngine):
    """Its rows repeat their prompts, each from another place."""

    def compute(self, duration_s: float) -> None:
        """Its steps take no time, but say that they did."""

    def fill_blocks(self, slices: Sequence[RowSlice]) -> None:
        """No row starts with the blocks of another."""

    def sample(self, one: RowSlice) -> list[int]:
        ids = one.row.ids
        return [int(ids[(one.first_index + one.row.number) % len(ids)])]


def run(link: AgentLink, published: Iterator[int], num_steps: int, waits: bool) -> None:
    """Compute all steps of the rows that are started by the time the first one is granted, then send them;
    with `waits`, send each once the one before is published, and print the ms that each took. Return once
    the last one is published.
    """
    next(published)
    engine = EchoEngine(DURATION_S, prefix_caching=False)
    while not engine.rows.grant.until:
        for command in link.commands(60.0):
            assert isinstance(command, Plan)
            engine.apply(command)
    frames = [encode(step) for _ in range(num_steps) if (step := engine.step())]
    if waits:
        json.dump([send_and_wait(link.channel, frame, published) for frame in frames], sys.stdout)
        return
    threading.Thread(target=link.channel.sendall, args=[b"".join(frames)]).start()
    while next(published) < num_steps:
        pass


def send_and_wait(channel: socket.socket, frame: bytes, published: Iterator[int]) -> float:
    """Send a step and wait until it is published → ms."""
    began_s = time.monotonic()
    channel.sendall(frame)
    next(published)
    return (time.monotonic() - began_s) * 1e3


def published_counts(url: str, channel: str) -> Iterator[int]:
    """Yield how many tokens of each row are published, with each message that has some; first 0, once
    subscribed.
    """
    with Redis.from_url(url).pubsub(ignore_subscribe_messages=False) as listener:  # type: ignore[no-untyped-call]
        listener.subscribe(channel)
        for message in listener.listen():
            if message["type"] == "subscribe":
                yield 0
            elif tokens := decode(Events, message["data"]).all_tokens:
                yield tokens[0].index + len(tokens[0].ids) // 4


if __name__ == "__main__":
    handle, broker_url, events_channel, steps, wait = sys.argv[1:]
    tokens_published = published_counts(broker_url, events_channel)
    run(AgentLink(socket.socket(fileno=int(handle))), tokens_published, int(steps), wait == "1")
