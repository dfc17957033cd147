"""The scaler's arithmetic over a simulated day, with the numbers of overlays/keda/scaler.yaml.

A pool has requests from eight to midnight, with two peaks and a burst, and none at night. KEDA takes the
workers from none to one and back; the HorizontalPodAutoscaler does the rest by its published algorithm
(https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details).
"""

import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import yaml

from tests.support.kubernetes.manifests import FOLDER

SCALER, *_ = yaml.safe_load_all((FOLDER / "overlays/keda/scaler.yaml").read_text())
SPEC: dict[str, Any] = SCALER["spec"]
BEHAVIOR: dict[str, Any] = SPEC["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
REQUESTS, _, KV_USAGE = SPEC["triggers"]
TICK_S = SPEC["pollingInterval"]
SYNC_S = 15
"""Interval of the HorizontalPodAutoscaler."""
TOLERANCE = 0.1
HOUR_S = 3600
DAY_S = 24 * HOUR_S
START_S = 180
"""From the scaler's decision to a worker that is ready: the pod's start, and the model's load."""
REQUEST_S = 20
"""Time of a request on a worker."""
MAX_ROWS = 64
"""Rows of a worker that share its steps without being slow: twice what the scaler plans with."""
ROW_KV = 1 / 100
"""Share of a worker's KV cache that a request fills."""


def rate(now_s: int) -> float:
    """Return requests a second at a time of the day: peaks at eleven and at five, a burst at three."""
    hour = now_s / HOUR_S
    if not 8 <= hour < 24:
        return 0.0
    peaks = 6 * math.exp(-(((hour - 11) / 1.5) ** 2)) + 8 * math.exp(-(((hour - 17) / 2) ** 2))
    burst = 6.0 if 15 <= hour < 15.1 else 0.0
    return 0.05 + peaks + burst


@dataclass
class Autoscaler:
    """The HorizontalPodAutoscaler of two metrics, with the behaviour of the ScaledObject.

    Attributes:
        recommendations: of the stabilization window, with their times.
        changes: (time, replicas before) of changes within the longest period of a policy.
    """

    recommendations: deque[tuple[int, int]] = field(default_factory=deque)
    changes: deque[tuple[int, int]] = field(default_factory=deque)

    def desired(self, now_s: int, replicas: int, ready: int, live: int, usage: float) -> int:
        """Return the new number of replicas, at least 1: the larger of both metrics' numbers."""
        wanted = max(
            by_average(live, float(REQUESTS["metadata"]["targetValue"]), replicas),
            by_value(usage, float(KV_USAGE["metadata"]["targetValue"]), replicas, ready),
        )
        wanted = max(1, min(int(SPEC["maxReplicaCount"]), wanted))
        self.recommendations.append((now_s, wanted))
        while self.recommendations[0][0] <= now_s - BEHAVIOR["scaleDown"]["stabilizationWindowSeconds"]:
            self.recommendations.popleft()
        if wanted < replicas:
            wanted = min(replicas, max(one for _, one in self.recommendations))
        return self.limited(now_s, replicas, wanted)

    def limited(self, now_s: int, replicas: int, wanted: int) -> int:
        """Return the number that policies allow: the policy that allows the largest change decides."""
        up = wanted > replicas
        allowed: list[int] = [
            self.bound(now_s, replicas, policy, 1 if up else -1)
            for policy in BEHAVIOR["scaleUp" if up else "scaleDown"]["policies"]
        ]
        return min(wanted, max(allowed)) if up else max(wanted, min(allowed))

    def bound(self, now_s: int, replicas: int, policy: dict[str, Any], sign: int) -> int:
        since = [before for at_s, before in self.changes if at_s > now_s - policy["periodSeconds"]]
        start = since[0] if since else replicas
        change: int = policy["value"]
        if policy["type"] == "Pods":
            return start + sign * change
        return (math.ceil if sign > 0 else math.floor)(start * (1 + sign * change / 100))


def by_average(total: float, target: float, replicas: int) -> int:
    """Of a metric of type AverageValue: its total divided by the target."""
    if abs(total / (target * replicas) - 1) <= TOLERANCE:
        return replicas
    return math.ceil(total / target)


def by_value(value: float, target: float, replicas: int, ready: int) -> int:
    """Of a metric of type Value: the ready replicas, times its proportion to the target."""
    if abs(value / target - 1) <= TOLERANCE:
        return replicas
    return math.ceil(value / target * ready)


@dataclass
class Day:
    """What happened.

    Attributes:
        replicas: at each tick.
        waits_s: time in the queue → number of requests.
        wakes: times at which the first worker was started.
    """

    replicas: list[int] = field(default_factory=list)
    waits_s: Counter[int] = field(default_factory=Counter)
    wakes: list[int] = field(default_factory=list)

    def at(self, hour: float) -> int:
        return self.replicas[int(hour * HOUR_S / TICK_S)]

    def reversals(self) -> list[int]:
        """Return the seconds between each change and the next one in the other direction."""
        changes = [
            (i * TICK_S, after > before)
            for i, (before, after) in enumerate(pairwise(self.replicas))
            if after != before
        ]
        return [at_s - before_s for (before_s, up), (at_s, is_up) in pairwise(changes) if up != is_up]


@cache
def simulate(seed: int) -> Day:
    """Run a day and the night after it."""
    chance, day, scaler = random.Random(seed), Day(), Autoscaler()
    waiting: deque[int] = deque()
    running: deque[int] = deque()
    starting: list[int] = []
    replicas, active_s = 0, -SPEC["cooldownPeriod"]
    for now_s in range(0, DAY_S + 6 * HOUR_S, TICK_S):
        waiting.extend([now_s] * poisson(chance, rate(now_s) * TICK_S if now_s < DAY_S else 0.0))
        while running and running[0] <= now_s - REQUEST_S:
            running.popleft()
        starting = [at_s for at_s in starting if at_s > now_s]
        ready = replicas - len(starting)
        while waiting and len(running) < MAX_ROWS * ready:
            day.waits_s[now_s - waiting.popleft()] += 1
            running.append(now_s)
        live = len(waiting) + len(running)
        before = replicas
        if live:
            active_s = now_s
        if live and not replicas:
            replicas = 1
            day.wakes.append(now_s)
        elif not live and replicas and now_s - active_s > SPEC["cooldownPeriod"]:
            replicas = SPEC["minReplicaCount"]
        elif replicas and now_s % SYNC_S == 0:
            usage = min(1.0, len(running) * ROW_KV / ready) if ready else 0.0
            replicas = scaler.desired(now_s, replicas, ready, live, usage)
        if replicas != before:
            scaler.changes.append((now_s, before))
            starting = [*starting, *[now_s + START_S] * (replicas - before)][: max(0, replicas)]
        day.replicas.append(replicas)
    return day


def poisson(chance: random.Random, mean: float) -> int:
    """Knuth's method."""
    limit, count, product = math.exp(-mean), 0, chance.random()
    while product > limit:
        count, product = count + 1, product * chance.random()
    return count


def test_workers_follow_the_load_and_none_is_left_at_night() -> None:
    day = simulate(1)
    assert day.at(3) == 0 and day.at(27) == 0, "the night"
    assert day.at(11) >= 4 and day.at(17) >= 5, "the peaks"
    assert day.at(14) < day.at(11) and day.at(22) < day.at(17)
    assert max(day.replicas) <= SPEC["maxReplicaCount"]


def test_the_first_request_of_the_day_wakes_the_pool_and_waits_for_one_start() -> None:
    day = simulate(1)
    assert len(day.wakes) == 1 and 8 * HOUR_S <= day.wakes[0] <= 8 * HOUR_S + 60
    assert max(day.waits_s) <= START_S + TICK_S


def test_others_hardly_wait() -> None:
    waits_s = simulate(1).waits_s
    assert sum(waits_s.values()) > 100_000
    assert sum(count for wait_s, count in waits_s.items() if wait_s > TICK_S) < 0.001 * sum(waits_s.values())


def test_the_number_of_workers_does_not_flap() -> None:
    """A change of direction comes no sooner than the scaler's window, and seldom: two peaks and a burst."""
    for seed in (1, 2, 3):
        reversals = simulate(seed).reversals()
        assert min(reversals) >= BEHAVIOR["scaleDown"]["stabilizationWindowSeconds"]
        assert len(reversals) <= 8
