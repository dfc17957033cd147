"""An engine that says what it was told beforehand, for benchmarks/agent.py: `python -m
benchmarks.scripted_engine --fd N --broker URL …`.

Its rows say their prompts over and over, each from another place, a token a step. It hears on the gateway's
channel when they were published, ends when the last one was, and prints the milliseconds from frame to
gateway, of each step that waited for the one before.
"""

import argparse
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator

import redis

from common.messages.codec import decode
from common.messages.events import Events
from common.messages.packing import unpack_ids
from gpu_worker.engine.agent_link import AgentLink
from gpu_worker.protocol import SAMPLE, StartRow, StepResult, encode

LOGPROB, DURATION_MS = -1.5, 10.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fd", type=int, required=True, help="inherited stream socket to the agent")
    parser.add_argument("--broker", required=True, help="its URL")
    parser.add_argument("--channel", required=True, help="the gateway's")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument(
        "--wait", action="store_true", help="each step waits until the one before was published"
    )
    told = parser.parse_args()
    channel = socket.socket(fileno=told.fd)
    lengths = published(told.broker, told.channel)
    next(lengths)
    frames = [encode(step) for step in script(starts(AgentLink(channel)), told.steps)]
    if told.wait:
        json.dump([turn(channel, frame, lengths) for frame in frames], sys.stdout)
    else:
        threading.Thread(target=channel.sendall, args=[b"".join(frames)]).start()
        while next(lengths) < told.steps:
            pass


def starts(link: AgentLink) -> list[StartRow]:
    """Rows that were started by the time the first step is granted."""
    rows: list[StartRow] = []
    while True:
        for grant in link.grants(60.0):
            rows += grant.starts
            if grant.until:
                return rows


def script(rows: list[StartRow], num_steps: int) -> Iterator[StepResult]:
    prompts = [(start.row, unpack_ids(start.ids)) for start in rows]
    for index in range(num_steps):
        samples = b"".join(
            SAMPLE.pack(row, index, ids[(index + row) % len(ids)], LOGPROB) for row, ids in prompts
        )
        yield StepResult(index + 1, samples, duration_ms=DURATION_MS)


def turn(channel: socket.socket, frame: bytes, lengths: Iterator[int]) -> float:
    """Says a step and waits until it was published → ms."""
    began_s = time.monotonic()
    channel.sendall(frame)
    next(lengths)
    return (time.monotonic() - began_s) * 1e3


def published(url: str, channel: str) -> Iterator[int]:
    """How many tokens of each row the gateway has heard, with each message that brings some; first 0, when it
    listens.
    """
    client = redis.Redis.from_url(url)
    with client.pubsub(ignore_subscribe_messages=False) as listener:  # type: ignore[no-untyped-call]
        listener.subscribe(channel)
        for message in listener.listen():
            if message["type"] == "subscribe":
                yield 0
            elif tokens := decode(Events, message["data"]).tokens:
                yield tokens[0].index + len(tokens[0].ids) // 4


if __name__ == "__main__":
    main()
