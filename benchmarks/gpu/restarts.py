"""Prints how soon a killed worker's successor is ready: `python -m benchmarks.gpu.restarts [--kills 10]`.

One worker runs, without load. The time is from SIGKILL to the first heartbeat in which the successor says
that it is ready. First without PRELOAD, then with it.
"""

import argparse
import os
import signal
import statistics
import time

import redis

from common.broker.keys import Keys
from deploy.launcher.process import SHORT_LIFE_S
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until_sync

KEYS = Keys("default")


def main(kills: int) -> None:
    medians_s, longest_s = {}, {}
    for preload in (False, True):
        with Fleet(preload=preload, kv_cache_bytes="256MiB") as fleet:
            times_s = sorted(measure(fleet) for _ in range(kills))
        print(
            f"PRELOAD={preload}: {kills} kills, median {statistics.median(times_s):.2f} s, "
            f"{times_s[0]:.2f} to {times_s[-1]:.2f} s",
            flush=True,
        )
        medians_s[preload], longest_s[preload] = statistics.median(times_s), times_s[-1]
    print(
        f"{time.strftime('%F %X')}, {kills} kills each: a copy of a template is ready after "
        f"{medians_s[True]:.2f} s (longest {longest_s[True]:.2f}), one that starts anew after "
        f"{medians_s[False]:.2f} s (longest {longest_s[False]:.2f})"
    )


def measure(fleet: Fleet) -> float:
    """Kill the worker, and return the seconds until its successor is ready."""
    with redis.Redis.from_url(fleet.redis_url) as client:
        [old] = wait_until_sync(lambda: ready(client))
        time.sleep(1.1 * SHORT_LIFE_S)  # then the next one starts at once
        killed_s = time.monotonic()
        os.kill(fleet.pid("w0"), signal.SIGKILL)
        wait_until_sync(lambda: ready(client) - {old})
        return time.monotonic() - killed_s


def ready(client: redis.Redis) -> set[bytes]:
    """Incarnations of the workers that are ready."""
    names: list[bytes] = client.zrange(KEYS.workers, 0, -1)  # type: ignore[assignment]
    states = {name: client.hmget(KEYS.worker(name.decode()), ["state"]) for name in names}
    return {name for name, state in states.items() if state == [b"ready"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    main(parser.parse_args().kills)
