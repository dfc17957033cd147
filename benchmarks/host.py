"""Prints the CPU time per token of each process of a fleet: `python -m benchmarks.host [--runs 3]`.

A whole fleet runs with its real engine and the client on the same machine, at 1, 8 and 32 streams. For each
process it prints the CPU time of a token while all streams run (all threads, to the ns, from /proc), and how
often the process lost its core: because it waited, or because another process preempted it. Load of others
changes CPU time less than wall time, but does change it: caches are shared.
"""

import argparse
import asyncio
import os
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import uvloop

from benchmarks.client import Stream, stream
from benchmarks.serve import prompt
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until

LOADS = ((1, 256), (8, 160), (32, 96))
"""(streams, new tokens of each)"""
NUM_MARGIN = 6
"""Tokens at the beginning and the end of each stream that are not counted."""


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU use of a process since its start, or per token."""

    cpu_us: float
    waits: float
    preemptions: float

    @classmethod
    def of(cls, pid: int) -> Self:
        sums = [0.0, 0.0, 0.0]
        for thread in Path(f"/proc/{pid}/task").iterdir():
            sums[0] += int((thread / "schedstat").read_text().split()[0]) / 1e3
            switches = re.findall(r"voluntary_ctxt_switches:\t(\d+)", (thread / "status").read_text())
            sums[1], sums[2] = sums[1] + int(switches[0]), sums[2] + int(switches[1])
        return cls(*sums)

    def per_token(self, earlier: "CpuUse", tokens: int) -> "CpuUse":
        names = self.__slots__
        return CpuUse(*((getattr(self, name) - getattr(earlier, name)) / tokens for name in names))


async def load(url: str, streams: int, out_tokens: int, seed: int, pids: dict[str, int]) -> dict[str, CpuUse]:
    """Runs all streams at once; counts from when all have begun until the first is about to end."""
    answers = [Stream() for _ in range(streams)]

    def measure() -> tuple[int, dict[str, CpuUse]]:
        return sum(len(answer.frames) for answer in answers), {
            name: CpuUse.of(pid) for name, pid in pids.items()
        }

    bodies = [
        {"inputs": prompt(seed * 100 + i), "parameters": {"max_new_tokens": out_tokens, "ignore_eos": True}}
        for i in range(streams)
    ]
    tasks = [
        asyncio.create_task(stream(url, body, answer)) for body, answer in zip(bodies, answers, strict=True)
    ]
    await wait_until(lambda: all(len(answer.frames) > NUM_MARGIN for answer in answers), 300)
    first, begun = measure()
    await wait_until(lambda: any(len(answer.frames) > out_tokens - NUM_MARGIN for answer in answers), 300)
    last, ended = measure()
    await asyncio.gather(*tasks)
    return {name: ended[name].per_token(begun[name], last - first) for name in pids}


def main(runs: int) -> None:
    with Fleet(num_workers=1, num_jobs=1) as fleet:
        pids = fleet.pids()
        [engine] = psutil.Process(pids["w0"]).children()
        pids |= {"engine": engine.pid, "client": os.getpid()}
        url = f"{fleet.base_url}/generate_stream"
        uvloop.run(load(url, 4, 16 * NUM_MARGIN, 0, pids))
        for streams, out_tokens in LOADS:
            costs = [uvloop.run(load(url, streams, out_tokens, run, pids)) for run in range(1, runs + 1)]
            print(f"{streams} streams; per token:")
            for name in pids:
                cpu, waits, preemptions = (
                    statistics.median(getattr(cost[name], field) for cost in costs)
                    for field in CpuUse.__slots__
                )
                print(
                    f"  {name:8} {cpu:8.1f} µs of CPU, {waits:6.2f} waits, {preemptions:6.2f} preemptions",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    main(parser.parse_args().runs)
