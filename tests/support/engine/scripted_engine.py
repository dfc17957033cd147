"""Prints the milliseconds from frame to gateway of each step that it sends, for benchmarks/agent.py.

An engine without a model: its rows repeat their prompts, each from another place, a token a step. It
subscribes to the gateway's channel to see when tokens are published, and ends with the last one.
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
from common.messages.plan import NewRow, Plan
from common.messages.records import unpack_ids
from gpu_worker.protocol import SAMPLE, AgentLink, StepResult, encode

LOGPROB, DURATION_MS = -1.5, 10.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fd", type=int, required=True, help="inherited stream socket to the agent")
    parser.add_argument("--broker", required=True, help="URL of the broker")
    parser.add_argument("--channel", required=True, help="event channel of the gateway")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument(
        "--wait", action="store_true", help="each step waits until the one before was published"
    )
    args = parser.parse_args()
    channel = socket.socket(fileno=args.fd)
    counts = published_counts(args.broker, args.channel)
    next(counts)
    frames = [encode(step) for step in make_steps(read_starts(AgentLink(channel)), args.steps)]
    if args.wait:
        json.dump([send_and_wait(channel, frame, counts) for frame in frames], sys.stdout)
    else:
        threading.Thread(target=channel.sendall, args=[b"".join(frames)]).start()
        while next(counts) < args.steps:
            pass


def read_starts(link: AgentLink) -> list[NewRow]:
    """Reads the rows that are started by the time the first step is granted."""
    rows: list[NewRow] = []
    while True:
        for command in link.commands(60.0):
            rows += command.starts if isinstance(command, Plan) else ()
            if isinstance(command, Plan) and command.until:
                return rows


def make_steps(rows: list[NewRow], num_steps: int) -> Iterator[StepResult]:
    prompts = [(start.row, unpack_ids(start.ids)) for start in rows]
    for index in range(num_steps):
        samples = b"".join(
            SAMPLE.pack(row, index, ids[(index + row) % len(ids)], LOGPROB) for row, ids in prompts
        )
        yield StepResult(index + 1, samples, duration_ms=DURATION_MS)


def send_and_wait(channel: socket.socket, frame: bytes, counts: Iterator[int]) -> float:
    """Sends a step and waits until it is published → ms."""
    began_s = time.monotonic()
    channel.sendall(frame)
    next(counts)
    return (time.monotonic() - began_s) * 1e3


def published_counts(url: str, channel: str) -> Iterator[int]:
    """Yields how many tokens of each row are published, with each message that has some; first 0, once
    subscribed.
    """
    client = redis.Redis.from_url(url)
    with client.pubsub(ignore_subscribe_messages=False) as listener:  # type: ignore[no-untyped-call]
        listener.subscribe(channel)
        for message in listener.listen():
            if message["type"] == "subscribe":
                yield 0
            elif tokens := decode(Events, message["data"]).all_tokens:
                yield tokens[0].index + len(tokens[0].ids) // 4


if __name__ == "__main__":
    main()
