"""FleetHistory: the last five minutes of a pool, in samples. Each gateway keeps its own, in memory, so that
the page's charts are full when it is opened.
"""

import asyncio
import contextlib
import dataclasses
from collections import deque
from typing import Any

from api.admin.processes import ProcessList, list_processes
from api.requests.pool import Pool
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS
from common.metrics import aggregate, catalogue
from common.metrics.primitives import SUM
from common.process.event_loop import until_beat

SAMPLE_S = 2.0
KEPT_S = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class FleetSample:
    """The pool at one time.

    Attributes:
        time_s: the broker's clock.
        tokens_per_s: of all workers.
        token_gap_ms: mean time between two tokens of a stream since the last sample, pauses included; None
            if no stream had a token.
        running, waiting, live: numbers of requests.
        blocks, num_blocks: KV blocks that requests hold, and all.
    """

    time_s: float
    tokens_per_s: float
    token_gap_ms: float | None
    running: int
    waiting: int
    live: int
    blocks: int
    num_blocks: int


class WorkerRates:
    """Tokens per second of each worker, between its last two heartbeats.

    Attributes:
        last: worker → (broker's time of its heartbeat, its tokens so far, its rate).
    """

    def __init__(self) -> None:
        self.last: dict[str, tuple[float, int, float]] = {}

    def total(self, time_s: float, workers: list[dict[str, Any]]) -> float:
        """The rate of all workers, which these are now. Those that came just now have none yet."""
        self.last = {worker["id"]: self.measure(worker, time_s - worker["age_s"]) for worker in workers}
        return sum(rate for _, _, rate in self.last.values())

    def measure(self, worker: dict[str, Any], time_s: float) -> tuple[float, int, float]:
        before_s, tokens, rate = self.last.get(worker["id"], (time_s, worker["tokens"], 0.0))
        if time_s - before_s > SAMPLE_S / 4:
            return time_s, worker["tokens"], max(0.0, (worker["tokens"] - tokens) / (time_s - before_s))
        return before_s, tokens, rate if worker["age_s"] < SAMPLE_S else 0.0


class FleetHistory:
    """Samples of a pool, oldest first."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.samples: deque[FleetSample] = deque(maxlen=round(KEPT_S / SAMPLE_S))
        self.rates = WorkerRates()
        self.gaps: tuple[float, float] | None = None

    async def run(self) -> None:
        """Never returns. While the broker does not answer there are no samples."""
        while True:
            with contextlib.suppress(*ERRORS):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    listed = await list_processes(self.pool.client, self.pool.batcher)
                    totals = await aggregate.read_totals(self.pool.client)
                    self.samples.append(self.sample(listed, sum_gaps(totals)))
            await asyncio.sleep(until_beat(SAMPLE_S))

    def sample(self, listed: ProcessList, gaps: tuple[float, float]) -> FleetSample:
        """One sample. `gaps` are (number of all times between tokens so far, their sum in seconds)."""
        num_before, seconds_before = self.gaps or gaps
        self.gaps = num, seconds = gaps
        workers = [worker for worker in listed.of_kind("worker") if worker["state"] != "starting"]
        gap_ms = 1000 * (seconds - seconds_before) / (num - num_before) if num > num_before else None
        return FleetSample(
            time_s=listed.time_s,
            tokens_per_s=round(self.rates.total(listed.time_s, workers), 1),
            token_gap_ms=None if gap_ms is None else round(gap_ms, 1),
            **listed.requests,
            blocks=sum(worker["blocks"] for worker in workers),
            num_blocks=sum(worker["num_blocks"] for worker in workers),
        )

    @property
    def latest(self) -> FleetSample | None:
        return self.samples[-1] if self.samples else None


def sum_gaps(totals: dict[str, float]) -> tuple[float, float]:
    """How many times between tokens were counted in the pool, and their sum in seconds."""
    prefix = f"{catalogue.TOKEN_LATENCY.name}|"
    parts = {name: value for name, value in totals.items() if name.startswith(prefix)}
    seconds = sum(value for name, value in parts.items() if name.endswith(f"|{SUM}"))
    return sum(parts.values()) - seconds, seconds
