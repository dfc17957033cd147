"""Forecast: what a fleet of each size would do under a trace, and the smallest that holds the targets."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batcher.planning.load_trace import TracedRequest
from batcher.planning.simulated_fleet import SimulatedFleet
from batcher.planning.step_costs import StepCosts
from batcher.scheduling.replica import WorkerLimits

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class FleetTargets:
    """What a fleet has to hold. None: no bound."""

    first_token_p99_ms: float | None = None
    gap_p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a fleet of `workers` does. Times are in ms.

    Attributes:
        utilisation: share of the time in which a worker computes.
        seconds: from the first request to the last token.
        refused: requests that are too long for a worker's cache.
        cost_per_hour, cost_per_million: of the fleet, and of a million output tokens; None without a price.
    """

    workers: int
    first_token_p50_ms: float
    first_token_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    tokens_per_s: float
    utilisation: float
    seconds: float
    refused: int
    cost_per_hour: float | None
    cost_per_million: float | None

    def holds(self, targets: FleetTargets) -> bool:
        """Whether no request is refused, and no bound is exceeded."""
        bounds = (
            (self.first_token_p99_ms, targets.first_token_p99_ms),
            (self.gap_p99_ms, targets.gap_p99_ms),
        )
        return not self.refused and all(bound is None or found <= bound for found, bound in bounds)


def forecast(
    costs: StepCosts, trace: Sequence[TracedRequest], workers: int, cost_per_worker_hour: float | None
) -> Forecast:
    """Play the trace on a fleet of so many workers."""
    fleet = SimulatedFleet(costs, workers, WorkerLimits(max_batch_size=costs.max_batch_size))
    fleet.play(trace)
    firsts, gaps = sorted(fleet.firsts_ms), sorted(fleet.gaps_ms)
    seconds = fleet.now_ms / 1e3
    tokens_per_s = sum(map(len, fleet.token_ms.values())) / seconds if seconds else 0.0
    per_hour = None if cost_per_worker_hour is None else workers * cost_per_worker_hour
    per_million = per_hour / (tokens_per_s * SECONDS_PER_HOUR) * 1e6 if per_hour and tokens_per_s else None
    return Forecast(
        workers=workers,
        first_token_p50_ms=percentile(firsts, 0.5),
        first_token_p99_ms=percentile(firsts, 0.99),
        gap_p50_ms=percentile(gaps, 0.5),
        gap_p99_ms=percentile(gaps, 0.99),
        tokens_per_s=tokens_per_s,
        utilisation=fleet.utilisation,
        seconds=seconds,
        refused=len(fleet.refused),
        cost_per_hour=per_hour,
        cost_per_million=per_million,
    )


def forecasts(
    costs: StepCosts,
    trace: Sequence[TracedRequest],
    max_workers: int,
    cost_per_worker_hour: float | None = None,
) -> Iterator[Forecast]:
    """Yield what fleets of 1 to `max_workers` workers do."""
    for workers in range(1, max_workers + 1):
        yield forecast(costs, trace, workers, cost_per_worker_hour)


def percentile(ordered: Sequence[float], q: float) -> float:
    """Return the nearest-rank percentile of values in order; 0 of none."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0
