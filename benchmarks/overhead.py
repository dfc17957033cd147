"""Prints the throughput of a fleet as a share of its engine's:
`python -m benchmarks.overhead [--runs 3] [--step-ms 25] [--traces]`.

The same load at 1, 8 and 32 streams runs once through the engine process alone, with all cores (grants in,
steps out, through its socket), and once end to end over HTTP through a whole fleet with the client on the
same cores. The two take turns; printed are the medians of the runs, and their ratio. With `--step-ms` the
engine has no model: each of its steps takes that time, and the ratio is what the fleet alone costs.

With `--traces` two fleets take turns at 32 streams; one sends every trace to a receiver on the same cores.
Ratios are of neighbouring runs; printed, too, is the processor time of gateway and batcher for a request.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import psutil
import uvloop
from tokenizers import Tokenizer

from benchmarks.serve import OUT_TOKENS, STREAMS, Figures, load, median, prompt
from common import model_files
from common.messages.plan import NewRow, WorkerCapacity
from gpu_worker.protocol import Frame, FrameDecoder, StepResult, encode
from tests.support.chaos.engine import STEP_MS
from tests.support.chaos.launcher import ChaosFleet
from tests.support.engine.row_steps import plan, start_row
from tests.support.fleet.fleet import Fleet


class EngineProcess:
    """The engine process alone, driven through its socket as an agent does; new rows replace ended ones."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.frames = FrameDecoder()
        while not isinstance(frame := self.receive(), WorkerCapacity):
            pass
        self.ready = frame
        self.tokenizer = Tokenizer.from_file(str(model_files.resolve("smollm2") / "tokenizer.json"))
        self.until = 0
        self.num_started = 0

    def receive(self) -> Frame:
        while (frame := next(self.frames, None)) is None:
            self.frames.feed(self.channel.recv(2**16) or sys.exit("the engine has ended"))
        return frame

    def run(self, streams: int, requests: int, seed: int) -> Figures:
        """Runs the load of `benchmarks.serve.load` in the engine."""
        prompts = [self.tokenizer.encode(prompt(seed * 1000 + i)).ids for i in range(requests)]
        blocks_each = -(-(max(map(len, prompts)) + OUT_TOKENS) // self.ready.block_size)
        free = [list(range(1 + i * blocks_each, 1 + (i + 1) * blocks_each)) for i in range(streams)]
        blocks_of: dict[int, list[int]] = {}
        times_of: dict[int, list[float]] = {}
        began = time.monotonic()
        ended = 0
        while ended < requests:
            starts = []
            while free and prompts:
                blocks_of[self.num_started], times_of[self.num_started] = free.pop(), [time.monotonic()]
                starts.append(self.row(prompts.pop(), blocks_of[self.num_started]))
            if starts:
                self.until += 10_000
                self.channel.sendall(encode(plan(self.until, self.ready.max_batch_prefill_tokens, starts)))
            step = self.receive()
            assert isinstance(step, StepResult), step
            for row, *_ in step.sampled:
                times_of[row].append(time.monotonic())
            ended += len(step.ended)
            free += [blocks_of.pop(row) for row, _ in step.released]
        return self.figures(list(times_of.values()), time.monotonic() - began)

    def row(self, ids: list[int], blocks: list[int]) -> NewRow:
        self.num_started += 1
        return start_row(self.num_started - 1, ids, OUT_TOKENS, blocks=blocks, ignore_eos=True)

    def figures(self, token_times: list[list[float]], seconds: float) -> Figures:
        gaps = [(later - sooner) * 1e3 for times in token_times for sooner, later in pairwise(times[1:])]
        firsts = [(times[1] - times[0]) * 1e3 for times in token_times]
        return Figures.of(sum(len(times) - 1 for times in token_times) / seconds, firsts, gaps)


@contextmanager
def engine_process(step_ms: float | None) -> Iterator[EngineProcess]:
    """The real engine, or one without a model whose steps take `step_ms`."""
    ours, engines = socket.socketpair()
    environ = {**os.environ, "MODEL_ID": str(model_files.resolve("smollm2")), "PARENT_PID": str(os.getpid())}
    module = "gpu_worker.engine" if step_ms is None else "tests.support.chaos.engine"
    command = [sys.executable, "-m", module, str(engines.fileno())]
    process = subprocess.Popen(command, pass_fds=[engines.fileno()], env=environ | scripted(step_ms))
    engines.close()
    try:
        yield EngineProcess(ours)
    finally:
        process.kill()
        process.wait()


def scripted(step_ms: float | None) -> dict[str, str]:
    return {} if step_ms is None else {STEP_MS: str(step_ms)}


def fleet_of(step_ms: float | None) -> Fleet:
    return Fleet() if step_ms is None else ChaosFleet(step_ms)


def main(runs: int, step_ms: float | None) -> None:
    engine_runs: dict[int, list[Figures]] = {streams: [] for streams, _ in STREAMS}
    fleet_runs: dict[int, list[Figures]] = {streams: [] for streams, _ in STREAMS}
    for run in range(1, runs + 1):
        with engine_process(step_ms) as engine:
            engine.run(4, 8, 0)
            for streams, requests in STREAMS:
                engine_runs[streams].append(engine.run(streams, requests, run))
        with fleet_of(step_ms) as fleet:
            url = f"{fleet.base_url}/generate_stream"
            uvloop.run(load(url, 4, 8, "", 0))
            for streams, requests in STREAMS:
                fleet_runs[streams].append(uvloop.run(load(url, streams, requests, "", run)))
    for streams, _ in STREAMS:
        engine_figures, fleet_figures = median(engine_runs[streams]), median(fleet_runs[streams])
        print(
            f"{streams:3d} streams: "
            f"engine {engine_figures.tokens_per_s:6.1f} tokens/s, gap p50 {engine_figures.gap_ms:6.2f} ms; "
            f"fleet {fleet_figures.tokens_per_s:6.1f} tokens/s, gap p50 {fleet_figures.gap_ms:6.2f} ms; "
            f"ratio {fleet_figures.tokens_per_s / engine_figures.tokens_per_s:.3f}",
            flush=True,
        )


# --- traces -------------------------------------------------------------------------------------------------


def processor_s(fleet: Fleet) -> float:
    """Processor time of gateway and batcher so far."""
    pids = fleet.pids()
    return sum(sum(psutil.Process(pids[name]).cpu_times()[:2]) for name in ("g0", "b0"))


def measure(fleet: Fleet, seed: int) -> tuple[float, float]:
    """Tokens/s, and processor ms of a request."""
    streams, requests = STREAMS[-1]
    before_s = processor_s(fleet)
    found = uvloop.run(load(f"{fleet.base_url}/generate_stream", streams, requests, "", seed))
    return found.tokens_per_s, 1e3 * (processor_s(fleet) - before_s) / requests


def compare_traces(runs: int, step_ms: float | None) -> None:
    with ExitStack() as stack:
        command = [sys.executable, "-m", "tests.support.traces"]
        receiver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(receiver.kill)
        assert receiver.stdout is not None
        fleets = [fleet_of(step_ms), fleet_of(step_ms)]
        fleets[1].settings["otlp_endpoint"] = receiver.stdout.readline().strip()
        for fleet in fleets:
            stack.enter_context(fleet)
            measure(fleet, 0)
        found: list[list[tuple[float, float]]] = [[], []]
        for run in range(1, runs + 1):
            for i in (0, 1) if run % 2 else (1, 0):
                found[i].append(measure(fleets[i], run))
    off, on = ([statistics.median(one[i] for one in runs) for i in (0, 1)] for runs in found)
    ratios = sorted(one[0] / other[0] for other, one in zip(*found, strict=True))
    print(
        f"tokens/s without traces {off[0]:.1f}, with {on[0]:.1f}; ratio {statistics.median(ratios):.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}); processor ms of a request {off[1]:.2f}, {on[1]:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--traces", action="store_true")
    args = parser.parse_args()
    (compare_traces if args.traces else main)(args.runs, args.step_ms)
