"""Prints how many tokens two brokers carry beside one: `python -m benchmarks.brokers.throughput [--runs 3]`.

Scripted workers flush a token of each of their rows as fast as their broker answers, as real ones do: it is
logged, reported, published to a gateway that only receives, and spilled every 64 steps. Four workers are on
one broker, or two on each of two. Both pools announce themselves, and four gateways read the directory.

Tokens a second of the brokers' own processor time are what brokers with a core each would carry; tokens by
the clock are less where workers, gateways and two brokers share two cores.
"""

import argparse
import contextlib
import multiprocessing
import multiprocessing.synchronize
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import hiredis
import psutil
import redis

from common.broker import batcher_scripts, worker_scripts
from common.broker.addresses import address_of
from common.broker.directory import SILENT_S, TTL_S
from common.broker.keys import POOL_ENTRIES, POOLS, Keys
from common.broker.lua import ScriptCall, load_script
from common.broker.worker_scripts import FlushedSpill
from common.messages.codec import encode
from common.messages.directory import PoolEntry
from common.messages.events import Events, Tokens, pack_tokens
from common.messages.records import pack_floats, pack_ids
from deploy.launcher.embedded_broker import Broker, embedded
from tests.support import brokers
from tests.support.token_columns import as_sent

NUM_WORKERS = 4
NUM_GATEWAYS = 4
SPILL_STEPS = 64
BATCH = 8
"""Flushes that a worker sends before it reads the replies, so that the broker never waits for it."""
REPORT = bytes(300)
WANTED = 1.9


class Load(NamedTuple):
    """What a broker carried: tokens, and seconds of its processor time and by the clock."""

    tokens: int
    cpu_s: float
    wall_s: float


class FlushingWorker:
    """A worker that flushes as fast as its broker answers."""

    def __init__(self, url: str, name: str, rows: int) -> None:
        self.client = redis.Redis.from_url(url)
        self.connection = self.client.connection_pool.get_connection()
        self.keys = Keys("default")
        self.name = name
        self.rows = [f"{name}-{row}" for row in range(rows)]
        self.sequence = 0
        tokens = [
            Tokens(row, 1, 64, pack_ids([5]), pack_floats([-0.5]), [" word"], pack_ids([]), pack_floats([]))
            for row in self.rows
        ]
        events = encode(Events(name, 1, **as_sent(tokens), flush=1))
        self.messages = [(self.keys.events("g0"), events)]
        first = Tokens("", 1, 0, pack_ids([5] * 64), pack_floats([-0.5] * 64), [" word"] * 64, b"", b"")
        self.spills = [FlushedSpill(row, 1, 0, 0, pack_tokens(first)) for row in self.rows]

    def open(self) -> None:
        call = worker_scripts.create_logs(self.keys, self.name, owner=self.name)
        self.client.eval(load_script(call.name), len(call.keys), *call.keys, *map(str, call.args))
        self.client.script_load(load_script("flush"))
        for row in self.rows:
            held = {"digest": "d", "worker": self.name, "attempt": 1, "base": 0, "width": 1}
            self.client.hset(self.keys.request(row), mapping=held)

    def flush(self) -> ScriptCall[worker_scripts.FlushReply]:
        self.sequence += 1
        spills = self.sequence % SPILL_STEPS == 0
        return worker_scripts.flush(
            self.keys,
            self.name,
            sequence=self.sequence,
            report=REPORT,
            acknowledged=max(0, self.sequence - 4),
            mode="trim" if spills else "",
            messages=self.messages,
            prompts=[],
            terminals=[],
            spills=self.spills if spills else [],
        )

    def run(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            commands: list[Any] = [self.flush().command for _ in range(BATCH)]
            self.connection.send_packed_command([hiredis.pack_command(command) for command in commands])
            for _ in range(BATCH):
                status, *_ = self.connection.read_response()
                assert status == b"OK", status


def run_workers(
    url: str,
    names: Sequence[str],
    rows: int,
    seconds: float,
    start: multiprocessing.synchronize.Barrier,
    results: "multiprocessing.Queue[tuple[str, int]]",
) -> None:
    """A process with the workers of one broker, a thread each, and the gateway that receives their tokens."""
    workers = [FlushingWorker(url, name, rows) for name in names]
    for worker in workers:
        worker.open()
    threading.Thread(target=receive, args=(url,), daemon=True).start()
    start.wait()
    until_s = time.monotonic() + seconds
    threads = [threading.Thread(target=worker.run, args=(until_s,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((url, rows * sum(worker.sequence for worker in workers)))


def receive(url: str) -> None:
    """Receive what is published, without looking at it."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(unquote(urlsplit(url).path))
    subscribe: Any = ("SUBSCRIBE", Keys("default").events("g0"))
    connection.sendall(hiredis.pack_command(subscribe))
    while connection.recv(2**20):
        pass


def keep_directory(urls: Sequence[str], done: threading.Event) -> None:
    """What batchers and gateways do with the directory, which is at the first broker."""
    client = redis.Redis.from_url(urls[0])
    client.script_load(load_script("publish_pool"))
    while not done.wait(0.5):
        for number, url in enumerate(urls):
            entry = PoolEntry(address_of(url), ["model"], num_ready=2, capacity=512)
            call = batcher_scripts.publish_pool(Keys(f"p{number}"), entry, silent_s=SILENT_S, ttl_s=TTL_S)
            client.execute_command(*call.command)  # type: ignore[no-untyped-call]
        for _ in range(NUM_GATEWAYS):
            client.zrange(POOLS, 0, -1, withscores=True)
            client.hgetall(POOL_ENTRIES)


def measure(num_brokers: int, rows: int, seconds: float) -> list[Load]:
    """What each of so many brokers carries, with NUM_WORKERS workers in all."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(broker_process()) for _ in range(num_brokers)]
        urls = [broker.url for broker, _ in running]
        context = multiprocessing.get_context("fork")
        start, results = context.Barrier(num_brokers + 1), context.Queue()
        each = NUM_WORKERS // num_brokers
        groups = []
        for number, url in enumerate(urls):
            names = [f"w{number}{i}" for i in range(each)]
            args = (url, names, rows, seconds, start, results)
            groups.append(context.Process(target=run_workers, args=args))
            groups[-1].start()
        done = threading.Event()
        directory = threading.Thread(target=keep_directory, args=(urls, done))
        directory.start()
        before = [used_s(process) for _, process in running]
        start.wait()
        began_s = time.monotonic()
        tokens = dict(results.get() for _ in groups)
        wall_s = time.monotonic() - began_s
        used = [used_s(process) - before_s for (_, process), before_s in zip(running, before, strict=True)]
        done.set()
        directory.join()
        for group in groups:
            group.join()
        return [Load(tokens[url], cpu_s, wall_s) for url, cpu_s in zip(urls, used, strict=True)]


@contextlib.contextmanager
def broker_process() -> Iterator[tuple[Broker, psutil.Process]]:
    with embedded() as broker:
        process = brokers.start(broker)
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
            yield broker, next(one for one in family if "valkey" in one.name() or "redis" in one.name())
        finally:
            process.kill()
            process.wait()


def used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def describe(load: Load) -> str:
    return f"{1e6 * load.cpu_s / load.tokens:.2f} µs of its CPU a token, busy {load.cpu_s / load.wall_s:.0%}"


def total(loads: Sequence[Load], by_cpu: bool) -> float:
    """Tokens a second of all brokers: of their own processor time, or by the clock."""
    return sum(load.tokens / (load.cpu_s if by_cpu else load.wall_s) for load in loads)


def main(runs: int, rows: int, seconds: float) -> None:
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for run in range(runs):
        order = (1, 2) if run % 2 else (2, 1)
        turns = {number: measure(number, rows, seconds) for number in order}
        for by_cpu, found in ratios.items():
            found.append(total(turns[2], by_cpu) / total(turns[1], by_cpu))
        for number, loads in sorted(turns.items()):
            each = "; ".join(map(describe, loads))
            print(f"{rows} rows, brokers {number}: {each}; {total(loads, False):,.0f} tokens/s by the clock")
    by_cpu_median, by_clock_median = (statistics.median(ratios[by_cpu]) for by_cpu in (True, False))
    print(
        f"two brokers carry {by_cpu_median:.2f} × the tokens of one by their CPU (at least {WANTED} ×: "
        f"{by_cpu_median >= WANTED}), {by_clock_median:.2f} × by the clock of this machine"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    main(options.runs, options.rows, options.seconds)
