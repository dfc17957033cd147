"""Prints how soon a sleeping model answers: `python -m benchmarks.models.swaps [--swaps 6]`.

One worker serves SmolLM2 under two names in turns (MODELS), without other load. The time is from a request
for the model that sleeps to its answer of one token, without what the same request takes while the model is
awake. First with weights in memory (SLEEP_LEVEL=1), then from disk (2), then a worker that starts anew.
"""

import argparse
import os
import signal
import statistics
import time

import httpx

from tests.support.fleet.fleet import Fleet

NAMES = ("smollm2", "again")
LONG_LIFE_S = 5.5
"""A worker that has lived at least this long is started again at once."""


def main(swaps: int) -> None:
    medians_s: dict[str, float] = {}
    for kept_in, level in (("memory", 1), ("disk", 2)):
        settings = {"models": "smollm2,again=smollm2", "sleep_level": level, "kv_cache_bytes": "256MiB"}
        with Fleet(**settings) as fleet:
            for name in NAMES:
                ask(fleet, name)  # both are loaded once
            awake_s = statistics.median(ask(fleet, NAMES[1]) for _ in range(5))
            times_s = [ask(fleet, NAMES[i % 2]) - awake_s for i in range(swaps)]
            if level == 2:
                medians_s["cold start"] = statistics.median(restart(fleet) - awake_s for _ in range(2))
        medians_s[kept_in] = statistics.median(times_s)
        print(f"from {kept_in}: {', '.join(f'{one:.2f}' for one in times_s)} s", flush=True)
    cold_s = medians_s.pop("cold start")
    ratios = ", ".join(f"from {name} {one:.2f} s ({cold_s / one:.1f} ×)" for name, one in medians_s.items())
    print(f"{time.strftime('%F %X')}, medians of {swaps} swaps: {ratios}, a worker anew {cold_s:.2f} s")


def ask(fleet: Fleet, name: str) -> float:
    """Return the seconds until an answer of one token."""
    started_s = time.monotonic()
    body = {"model": name, "prompt": "The sky is", "max_tokens": 1}
    answer = httpx.post(f"{fleet.base_url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - started_s


def restart(fleet: Fleet) -> float:
    """Kill the worker → the seconds until its successor has answered."""
    time.sleep(LONG_LIFE_S)
    started_s = time.monotonic()
    os.kill(fleet.pid("w0"), signal.SIGKILL)
    ask(fleet, NAMES[0])
    return time.monotonic() - started_s


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--swaps", type=int, default=6)
    main(parser.parse_args().swaps)
