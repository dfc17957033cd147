"""Learning: a running fleet is watched under its own load, and its step costs follow from what it counts."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from batcher.planning.step_costs import StepCosts, StepCounts, fit
from common.metrics import catalogue
from common.settings.settings import SettingError

INTERVAL_S = 2.0
LEAST_STEPS = 200
TIMEOUT_S = 10.0
Totals = Mapping[str, float]


def learn(url: str, seconds: float, key: str | None) -> StepCosts:
    """Watch the fleet at `url` for so many seconds. Raises SettingError if it cannot be asked, or computes
    too little meanwhile.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        worker = find_worker(client)
        end_s, totals = time.monotonic() + seconds, [read_totals(client)]
        while time.monotonic() < end_s:
            time.sleep(min(INTERVAL_S, max(0.0, end_s - time.monotonic())))
            totals.append(read_totals(client))
    return costs_of(totals, worker, f"{url}, {time.strftime('%Y-%m-%d %H:%M')}")


def costs_of(totals: Sequence[Totals], worker: Mapping[str, Any], source: str) -> StepCosts:
    """Return the costs that the totals, read one after the other, tell. Raises SettingError."""
    intervals = [counts_between(sooner, later) for sooner, later in pairwise(totals)]
    num_steps = round(sum(one.steps for one in intervals))
    if num_steps < LEAST_STEPS:
        raise SettingError(
            "--from",
            f"only {num_steps} steps were computed meanwhile, and {LEAST_STEPS} are needed: learn under "
            "load, such as `tokenfleet bench`, or for longer (--learn-s)",
        )
    step_ms, row_ms, prompt_token_ms = fit(intervals)
    return StepCosts(
        step_ms,
        row_ms,
        prompt_token_ms,
        hop_ms_of(totals[0], totals[-1]),
        worker["block_size"],
        worker["num_blocks"],
        worker["max_batch_prefill_tokens"],
        worker["max_rows"],
        source,
        num_steps,
    )


def find_worker(client: httpx.Client) -> Mapping[str, Any]:
    """Return the first ready worker of `GET /fleet`. Raises SettingError."""
    fleet = orjson.loads(fetch(client, "/fleet"))
    workers = [it for it in fleet.get("processes", []) if it["kind"] == "worker" and it.get("num_blocks")]
    if not workers:
        raise SettingError("--from", f"the fleet at {client.base_url} has no ready worker")
    if "max_batch_prefill_tokens" not in workers[0]:
        raise SettingError("--from", f"the fleet at {client.base_url} is of an older version")
    found: Mapping[str, Any] = workers[0]
    return found


def read_totals(client: httpx.Client) -> Totals:
    """Return the samples of /metrics by name, summed over their labels."""
    totals: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(fetch(client, "/metrics").decode()):
        for sample in family.samples:
            totals[sample.name] += sample.value
    return totals


def fetch(client: httpx.Client, path: str) -> bytes:
    try:
        answer = client.get(path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SettingError("--from", f"no fleet answers at {client.base_url}: {error}") from error
    if answer.status_code != httpx.codes.OK:
        raise SettingError("--from", f"{client.base_url} answers {path} with status {answer.status_code}")
    return answer.content


def counts_between(sooner: Totals, later: Totals) -> StepCounts:
    def grown(name: str) -> float:
        return max(0.0, later.get(name, 0.0) - sooner.get(name, 0.0))

    forward = catalogue.BATCH_FORWARD.name
    return StepCounts(
        steps=grown(f"{forward}_count"),
        tokens=grown(f"{catalogue.TOKENS.name}_total"),
        prompt_tokens=grown(f"{catalogue.PREFILLED_TOKENS.name}_total"),
        ms=1e3 * grown(f"{forward}_sum"),
    )


def hop_ms_of(first: Totals, last: Totals) -> float:
    """Return the mean time of a first token that is neither the queue's nor the worker's."""

    def mean_ms(name: str) -> float:
        count = last.get(f"{name}_count", 0.0) - first.get(f"{name}_count", 0.0)
        seconds = last.get(f"{name}_sum", 0.0) - first.get(f"{name}_sum", 0.0)
        return 1e3 * seconds / count if count > 0 else 0.0

    waits = mean_ms(catalogue.QUEUE_DURATION.name) + mean_ms(catalogue.PREFILL_DURATION.name)
    return max(0.0, mean_ms(catalogue.FIRST_TOKEN.name) - waits)
