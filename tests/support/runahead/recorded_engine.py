"""Engine process that records its steps: `python -m tests.support.runahead.recorded_engine --fd N`.

It is the real engine; with TIMED_STEP_MS its rows over a device without a model, whose steps take so long by
the clock. RECORD_FILE gets a line for each row that starts (seconds, row, first id of its prompt) and for
each step (seconds when it was read, its milliseconds, the rows that sampled), in JSON.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

from common.process.parent_death import die_with_parent
from gpu_worker.engine import process
from gpu_worker.engine.agent_link import AgentLink
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.engine.in_flight import LaunchPace
from gpu_worker.protocol import Command, Frame, Grant, PeerClosed, Ready, StepResult
from tests.support.adapters.scripted import ScriptedAdapters
from tests.support.chaos.engine_loop import run

STEP_MS, RECORD = "TIMED_STEP_MS", "RECORD_FILE"
BLOCK_SIZE, NUM_BLOCKS, CONTEXT, MAX_PREFILL = 16, 8192, 4096, 512
FIRST_ID, NUM_IDS = 1_000, 40_000


class RecordedLink(AgentLink):
    """Writes down what passes."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(channel)
        self.file = os.open(os.environ[RECORD], os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def record(self, *what: object) -> None:
        os.write(self.file, json.dumps([time.monotonic(), *what]).encode() + b"\n")

    def send(self, frame: Frame) -> None:
        if isinstance(frame, StepResult) and frame.duration_ms:
            self.record("step", frame.duration_ms, [row for row, *_ in frame.sampled])
        super().send(frame)

    def commands(self, wait_s: float) -> Iterator[Command]:
        for command in super().commands(wait_s):
            for start in command.starts if isinstance(command, Grant) else ():
                self.record("start", start.row, int.from_bytes(start.ids[:4], "little"))
            yield command


class TimedStep(NamedTuple):
    number: int
    slices: list[RowSlice]
    begin_s: float
    end_s: float


class TimedEngine:
    """What the real engine is to its loop, as on a GPU: a step is launched before the one before is read.

    Attributes:
        free_s: when the device has done what was launched.
        pace: the real engine's.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.rows = Rows(BLOCK_SIZE, eos_ids=(), prefix_caching=True)
        self.adapters = ScriptedAdapters()
        self.in_flight: TimedStep | None = None
        self.free_s = 0.0
        self.pace = LaunchPace()

    def launch(self) -> TimedStep | None:
        slices = self.rows.launch()
        if not slices:
            return None
        begin_s = max(time.monotonic(), self.free_s)
        self.free_s = begin_s + self.step_s
        return TimedStep(self.rows.step, slices, begin_s, self.free_s)

    def apply(self, grant: Grant) -> None:
        self.rows.apply(grant)

    def slack_s(self) -> float:
        return self.pace.slack_s(time.monotonic()) if self.in_flight else 0.0

    def step(self) -> StepResult | None:
        read = self.in_flight or self.launch()
        if read:
            self.pace.on_launch(time.monotonic() >= self.free_s)
        self.in_flight = self.launch() if read else None
        if read:
            time.sleep(max(0.0, read.end_s - time.monotonic()))
            self.pace.on_read(read.begin_s, time.monotonic(), prefill_tokens=0)
            sampling = [one for one in read.slices if one.samples]
            ids = [FIRST_ID + one.kv_len * 31 % NUM_IDS for one in sampling]
            self.rows.collect(read.slices, ids, [-0.5] * len(ids))
        result = self.rows.take_result()
        if not read and not result:
            return None
        return result.build(read.number if read else self.rows.step, self.step_s * 1e3 if read else 0.0)


def main() -> None:
    if STEP_MS not in os.environ:
        vars(process)["AgentLink"] = RecordedLink
        process.main()
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    link = RecordedLink(socket.socket(fileno=parser.parse_args().fd))
    with contextlib.suppress(PeerClosed):
        sizes = (BLOCK_SIZE, NUM_BLOCKS, MAX_PREFILL, CONTEXT)
        model_id = os.environ["MODEL_ID"]
        ready = Ready(model_id, "float32", "cpu", *sizes, b"", token_ms=0.01, prefix_caching=True)
        link.send(ready)
        run(TimedEngine(float(os.environ[STEP_MS]) / 1e3), link, ready)


if __name__ == "__main__":
    main()
