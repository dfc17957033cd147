"""Attack: strikes to the processes of a fleet, drawn from a seed: what is done to whom, and when."""

import asyncio
import contextlib
import json
import random
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import psutil
import redis

from common.broker.keys import Keys
from tests.support.chaos.broker import CUT_TO, FileHistory
from tests.support.fleet.fleet import Fleet, have_ended
from tests.support.waiting import wait_until

KINDS = ("gateway", "batcher", "agent", "engine", "broker")
PAIRS = 1 / 3
"""Share of strikes that hit two processes at once."""
STOPS = 1 / 5
"""Share of hits that are SIGSTOP … SIGCONT in place of SIGKILL."""
STOP_S = (0.3, 6.0)
"""How long a process is stopped: in part longer than leases and times to live."""
BROKER_WAYS = ("kill", "set-back", "cut")
"""SIGKILL; SIGKILL and a start with the file of a second before; all its connections are closed."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What happens to one process.

    Attributes:
        kind: one of KINDS.
        name: of the process, as `w0`; an engine has its worker's.
        way: `kill`, `stop`, or another of BROKER_WAYS.
        stop_s: how long it is stopped.
    """

    kind: str
    name: str
    way: str
    stop_s: float = 0.0

    def __str__(self) -> str:
        stop = f" for {self.stop_s:.1f} s" if self.way == "stop" else ""
        return f"{self.way} {self.kind} {self.name}{stop}"


@dataclass(frozen=True, slots=True)
class Strike:
    """One hit, or two at once; `pause_s` is the time since the strike before it."""

    pause_s: float
    hits: tuple[Hit, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.hits))


Targets = Mapping[str, list[str]]
"""Names of a fleet's processes by kind."""


def targets_of(counts: Mapping[str, int]) -> Targets:
    """Make the targets from `counts`: processes by kind. A worker is an agent and an engine."""
    letters = {"gateway": "g", "batcher": "b", "agent": "w", "engine": "w"}
    names = {kind: [f"{letters[kind]}{i}" for i in range(count)] for kind, count in counts.items() if count}
    return names | {"broker": ["broker"]}


def draw_strikes(seed: int, targets: Targets, every_s: float, spared: Sequence[str] = ()) -> Iterator[Strike]:
    """Yield strikes without end, without the kinds and ways that are `spared`. Kinds and pairs of kinds come
    from shuffled decks, so that each comes equally often.
    """
    draw = random.Random(seed)
    kinds = [kind for kind in KINDS if kind in targets and kind not in spared]
    singles = endless_deck(draw, [(kind,) for kind in kinds])
    both = combinations_with_replacement(kinds, 2)
    pairs = endless_deck(draw, [(a, b) for a, b in both if a != b or len(targets[a]) > 1])
    while True:
        deck = pairs if draw.random() < PAIRS and len(kinds) > 1 else singles
        pause_s = every_s * draw.uniform(0.5, 1.5)
        hits: list[Hit] = []
        for kind in next(deck):
            taken = [hit.name for hit in hits if hit.kind == kind]
            name = draw.choice([name for name in targets[kind] if name not in taken])
            hits.append(draw_hit(draw, kind, name, spared))
        yield Strike(pause_s, tuple(hits))


def endless_deck(draw: random.Random, cards: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    while cards:
        yield from draw.sample(cards, len(cards))


def draw_hit(draw: random.Random, kind: str, name: str, spared: Sequence[str]) -> Hit:
    is_stop, stop_s = draw.random() < STOPS, draw.uniform(*STOP_S)
    ways = [way for way in BROKER_WAYS if way not in spared] if kind == "broker" else ["kill"]
    way = draw.choice(ways)
    return Hit(kind, name, "stop", stop_s) if is_stop and "stop" not in spared else Hit(kind, name, way)


KEYS = Keys("default")
BACK_S = 90.0
SET_BACK_S = 1.0
NOTE_EVERY_S = 0.1
KILLS = ("kill", "set-back")
ENGINE = "tokenfleet engine"
"""Title of an engine's process."""


class Attack:
    """Strikes one fleet.

    Attributes:
        hits: counts by kind and way.
        lost: names of processes that never came back.
    """

    def __init__(self, fleet: Fleet, directory: Path, broker_files: Path) -> None:
        self.fleet, self.directory, self.redis_url = fleet, directory, fleet.redis_url
        self.files = FileHistory(broker_files)
        self.hits: Counter[str] = Counter()
        self.lost: list[str] = []
        self.stopped: set[asyncio.Task[None]] = set()

    async def note_files(self) -> None:
        """Record the sizes of the broker's files, until cancelled."""
        while True:
            with contextlib.suppress(OSError):  # just being written anew
                self.files.note()
            await asyncio.sleep(NOTE_EVERY_S)

    async def strike(self, strike: Strike) -> list[psutil.Process]:
        """Strike, and return the processes that were killed. Stopped ones go on by themselves later."""
        victims = [(hit, await self.find(hit)) for hit in strike.hits]
        for hit, process in victims:
            if process is not None:
                self.hits[f"{hit.kind} {hit.way}"] += 1
                with contextlib.suppress(psutil.Error, OSError):
                    self.do(hit, process)
        return [process for hit, process in victims if process is not None and hit.way in KILLS]

    async def gone(self, processes: Sequence[psutil.Process]) -> None:
        """Wait until these processes, and with them their sockets, have ended."""
        await wait_until(lambda: have_ended(processes), BACK_S)

    async def find(self, hit: Hit) -> psutil.Process | None:
        """Wait until the process is back, and return it."""
        try:
            found: psutil.Process = await wait_until(lambda: process_of(self.fleet, hit), BACK_S)
        except TimeoutError:
            self.lost.append(hit.name)
            return None
        return found

    def do(self, hit: Hit, process: psutil.Process) -> None:
        match hit.way:
            case "stop":
                process.suspend()
                self.stopped.add(asyncio.create_task(resume_later(process, hit.stop_s)))
            case "cut":
                cut_connections(self.redis_url)
            case "set-back":
                sizes = self.files.sizes_before(SET_BACK_S)
                paths = {str(self.files.directory / name): size for name, size in sizes.items()}
                (self.directory / CUT_TO).write_text(json.dumps(paths))
                process.send_signal(signal.SIGKILL)
            case _:
                process.send_signal(signal.SIGKILL)

    async def settled(self, num_processes: int, num_workers: int) -> None:
        """Wait until all processes are back."""
        await asyncio.gather(*self.stopped)
        with contextlib.suppress(TimeoutError):
            await wait_until(lambda: len(self.fleet.pids()) == num_processes, BACK_S)
            await wait_until(lambda: ready_workers(self.redis_url) == num_workers, BACK_S)
            return
        self.lost.append(f"{len(self.fleet.pids())} of {num_processes} processes are back, and")
        self.lost.append(f"{ready_workers(self.redis_url)} of {num_workers} workers are ready")


def process_of(fleet: Fleet, hit: Hit) -> psutil.Process | None:
    try:
        process = psutil.Process(fleet.pids()[hit.name])
        if hit.kind == "engine":
            [process] = [child for child in process.children() if ENGINE in " ".join(child.cmdline())]
    except (KeyError, ValueError, psutil.Error):
        return None
    return process


async def resume_later(process: psutil.Process, seconds: float) -> None:
    await asyncio.sleep(seconds)
    with contextlib.suppress(psutil.Error):
        process.resume()


def cut_connections(url: str) -> None:
    with contextlib.suppress(redis.RedisError), redis.Redis.from_url(url, socket_timeout=2) as client:
        for kind in ("normal", "pubsub"):
            client.client_kill_filter(_type=kind, skipme=True)


def ready_workers(url: str) -> int:
    """Workers that the batcher gives rows to; -1 if the broker does not answer."""
    with contextlib.suppress(redis.RedisError), redis.Redis.from_url(url, socket_timeout=2) as client:
        return int(client.hget(KEYS.state, "workers") or 0)
    return -1
