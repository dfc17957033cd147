"""Prints the curve of INTER_TOKEN_LATENCY_TARGET_MS: `python -m benchmarks.batcher.inter_token_latency`.

The curve shows what a lower target gives (a shorter gap between tokens while prompts arrive) and what it
costs (time to first token, tokens/s). The scheduler runs alone, with a simulated worker whose steps take 20
ms, 1.35 ms for each row that decodes and 0.3 ms for each token of a prompt, about what a small model takes on
two cores: 16 streams, each followed by the next. `--real` drives a fleet of the default model over HTTP
instead, a fresh one for each target. Without it, exit status 1 if the default target gives less than 97% of
the tokens/s without a target, or if the 99th percentile of gaps is more than 1.1 times the target.
"""

import argparse
import asyncio
import random
import statistics
import sys
from dataclasses import dataclass, field
from itertools import pairwise

from batcher.scheduling.replica import WorkerLimits
from benchmarks.serve import Figures, load
from common.messages.plan import WorkerCapacity
from common.settings.settings import Settings
from tests.support.broker_state import make_capacity
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.simulated_pool import Pool, request

STREAMS, REQUESTS = 16, 256
LOADS = ((128, 64), (128, 32), (512, 64))
"""(tokens of a prompt, tokens of its answer)"""
STEP_MS, ROW_MS, TOKEN_MS, REPORT_MS = 20.0, 1.35, 0.3, 100.0
MAX_PREFILL = 512
TARGETS_MS = (0.0, 150.0, 100.0, 75.0, 60.0, 50.0)
DEFAULT_MS = Settings.model_fields["inter_token_latency_target_ms"].default
LEAST_SHARE, MOST_OVER = 0.97, 1.1


@dataclass
class TimedPool(Pool):
    """One worker whose steps take time.

    Attributes:
        sent_ms, token_ms: when each request was sent, and when each of its tokens came.
    """

    target_ms: float
    in_tokens: int
    out_tokens: int
    clock_ms: float = 0.0
    sent_ms: dict[str, float] = field(default_factory=dict)
    token_ms: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = WorkerLimits(inter_token_target_ms=self.target_ms)
        super().__init__(1, 10_000, seed=1, limits=limits, eos_chance=0, shares=False)
        self.worker = self.workers["w0"]

    def capacity(self, name: str) -> WorkerCapacity:
        return make_capacity(
            name, self.num_blocks, name=name, max_batch_prefill_tokens=MAX_PREFILL, context=4096
        )

    def send(self, number: int) -> None:
        name = f"r{number}"
        self.sent_ms[name] = self.clock_ms
        self.token_ms[name] = []
        # answers of other lengths, so that streams do not go in step
        new_tokens = self.out_tokens + random.Random(number).randint(-16, 16)
        self.add(request(name, self.in_tokens, new_tokens, number))

    def run_step(self) -> None:
        """Run one step in simulated time."""
        worker = self.worker
        decoded, prefilled = worker.num_decoded, worker.num_prefilled
        assert worker.run()
        decoded, prefilled = worker.num_decoded - decoded, worker.num_prefilled - prefilled
        ms = STEP_MS + ROW_MS * decoded + TOKEN_MS * prefilled
        self.clock_ms += ms
        worker.report.step_times.append((1, int(decoded > 0), prefilled, ms))
        for name, count in worker.committed.items():
            if count > len(self.token_ms[name]):
                self.token_ms[name].append(self.clock_ms)

    def play(self) -> Figures:
        """Runs all requests, a number of streams at a time."""
        for number in range(STREAMS):
            self.send(number)
        sent = STREAMS
        while len(self.finished) < REQUESTS:
            self.decide()
            report_ms = self.clock_ms + REPORT_MS
            while self.clock_ms < report_ms and self.worker.rows:
                self.run_step()
                if self.worker.report.ended or self.worker.report.prefilled:
                    break
            self.worker.release()
            self.scheduler.apply_report("w0", self.worker.take_report())
            self.decide()
            while sent < REQUESTS and sent - len(self.finished) < STREAMS:
                self.send(sent)
                sent += 1
        return self.figures()

    def figures(self) -> Figures:
        gaps = sorted(later - sooner for times in self.token_ms.values() for sooner, later in pairwise(times))
        return Figures(
            sum(map(len, self.token_ms.values())) / self.clock_ms * 1e3,
            statistics.median(times[0] - self.sent_ms[name] for name, times in self.token_ms.items()),
            statistics.median(gaps),
            gaps[int(len(gaps) * 0.99)],
        )


def measure(target_ms: float, out_tokens: int) -> Figures:
    """Measure a fleet of one warm worker, with prompts of 128 tokens."""
    with Fleet(inter_token_latency_target_ms=target_ms) as fleet:
        url = f"{fleet.base_url}/generate_stream"
        asyncio.run(load(url, 4, 8, "m", seed=0))
        return asyncio.run(load(url, STREAMS, 4 * STREAMS, "m", seed=1, out_tokens=out_tokens))


def play(in_tokens: int, out_tokens: int, real: bool) -> bool:
    """Prints the curve of one load. Returns whether the default is good there."""
    found = {}
    for target_ms in TARGETS_MS:
        pool = None if real else TimedPool(target_ms, in_tokens, out_tokens)
        found[target_ms] = figures = pool.play() if pool else measure(target_ms, out_tokens)
        print(
            f"{in_tokens} in, {out_tokens} out, target {target_ms:3.0f} ms: "
            f"{figures.tokens_per_s:6.1f} tokens/s, first token {figures.first_token_ms:5.0f} ms, "
            f"gap p50 {figures.gap_ms:5.1f} ms, p99 {figures.gap_p99_ms:5.1f} ms",
            flush=True,
        )
    is_fast = found[DEFAULT_MS].tokens_per_s >= LEAST_SHARE * found[0.0].tokens_per_s
    return is_fast and found[DEFAULT_MS].gap_p99_ms <= MOST_OVER * DEFAULT_MS


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true")
    real = parser.parse_args().real
    good = [play(*numbers, real) for numbers in (LOADS[:2] if real else LOADS)]
    return int(not real and not all(good))


if __name__ == "__main__":
    sys.exit(main())
