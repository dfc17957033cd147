"""Prints what traces cost: `python -m benchmarks.traces [--runs 7] [--step-ms 25]`.

Two fleets run side by side, one of which sends every trace to a receiver of OTLP in a process of its own. The
load of 32 streams takes turns between them. Printed are the medians of tokens/s of each and the median of
their ratios, a run with its neighbour; and the processor time of gateways and batchers for each request. With
`--step-ms` the engine has no model: each of its steps takes that time.
"""

import argparse
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

import psutil
import uvloop

from benchmarks.overhead import fleet_of
from benchmarks.serve import STREAMS, load
from tests.support.fleet.fleet import Fleet
from tests.support.traces import Receiver

COUNTED = ("g", "b")
"""First letters of the processes that make spans."""


def receive() -> None:
    with Receiver().listening() as receiver:
        print(receiver.grpc_url, flush=True)
        while True:
            time.sleep(1)
            receiver.spans.clear()


def processor_s(fleet: Fleet) -> float:
    """Processor time of gateways and batchers so far."""
    pids = [pid for name, pid in fleet.pids().items() if name[0] in COUNTED and name != "broker"]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def measure(fleet: Fleet, seed: int) -> tuple[float, float]:
    """Tokens/s, and processor ms of each request."""
    streams, requests = STREAMS[-1]
    before_s = processor_s(fleet)
    figures = uvloop.run(load(f"{fleet.base_url}/generate_stream", streams, requests, "", seed))
    return figures.tokens_per_s, 1e3 * (processor_s(fleet) - before_s) / requests


def main(runs: int, step_ms: float | None) -> None:
    with ExitStack() as stack:
        command = [sys.executable, "-m", "benchmarks.traces", "--receive"]
        sink = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(sink.kill)
        assert sink.stdout is not None
        fleets = [fleet_of(step_ms), fleet_of(step_ms)]
        fleets[1].settings["otlp_endpoint"] = sink.stdout.readline().strip()
        for fleet in fleets:
            stack.enter_context(fleet)
            measure(fleet, 0)
        found: list[list[tuple[float, float]]] = [[], []]
        for run in range(1, runs + 1):
            for i in (0, 1) if run % 2 else (1, 0):
                found[i].append(measure(fleets[i], run))
    off, on = found
    ratios = [one[0] / other[0] for one, other in zip(on, off, strict=True)]
    print(
        f"tokens/s off {statistics.median(one[0] for one in off):.1f}, on "
        f"{statistics.median(one[0] for one in on):.1f}; ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}); processor ms of a request: off "
        f"{statistics.median(one[1] for one in off):.2f}, on {statistics.median(one[1] for one in on):.2f}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        receive()
    else:
        main(args.runs, args.step_ms)
