"""Prints where the time of a decode step goes, kernel by kernel: `python -m benchmarks.gpu.profile_steps
FOLDER ROWS [settings]`, ROWS such as 1,32,256.

Rows of 512 tokens decode under torch's profiler. Printed for each number of rows are a step's time without
the profiler, the time in which the device computes, and the kernels by their share; traces for
https://ui.perfetto.dev go to FOLDER. On CPU operations take the place of kernels.
"""

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks import floors
from benchmarks.engine import Benchmark, numbers
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine

CONTEXT = 512
STEPS = 8
NUM_KERNELS = 25
NAME_WIDTH = 90


def steps_of(benchmark: Benchmark, num_rows: int) -> list[float]:
    """Decodes STEPS steps of rows that hold their context already → their ms, without the first two."""
    benchmark.start(num_rows, CONTEXT, STEPS + 3, num_rows)
    benchmark.fill_cache(CONTEXT - 1)
    durations = [step.duration_ms for step in iter(benchmark.engine.step, None) if step.samples]
    return durations[2:]


def device_us(event: Any, on_cuda: bool) -> float:
    return float(event.self_device_time_total if on_cuda else event.self_cpu_time_total)


def lines_of(events: Iterable[Any], on_cuda: bool, steps: int) -> list[str]:
    """The kernels, those that take longest first: µs and calls of a step, and their share of all."""
    # an operation's own device time is that of the kernels it launches, which are events of their own
    own = [event for event in events if not on_cuda or event.device_type.name != "CPU"]
    total_us = sum(device_us(event, on_cuda) for event in own)
    ranked = sorted(own, key=lambda event: device_us(event, on_cuda), reverse=True)
    lines = [f"  the device computes {total_us / steps / 1e3:.3f} ms of a step"]
    for event in ranked[:NUM_KERNELS]:
        taken_us = device_us(event, on_cuda)
        lines.append(
            f"  {taken_us / steps:10.1f} µs {taken_us / max(total_us, 1e-9):6.1%} "
            f"{event.count / steps:7.1f} calls  {event.key[:NAME_WIDTH]}"
        )
    return lines


def profile_rows(benchmark: Benchmark, num_rows: int, trace: Path) -> None:
    on_cuda = benchmark.engine.loaded.device.type == "cuda"
    steps_of(benchmark, num_rows)  # warms up
    step_ms = statistics.median(steps_of(benchmark, num_rows))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        taken = steps_of(benchmark, num_rows)
    read_bytes = num_rows * floors.kv_bytes(benchmark.geometry, CONTEXT + STEPS // 2)
    floor_ms = benchmark.floor_ms(num_rows, num_rows, read_bytes)
    print(f"{num_rows} rows at {CONTEXT}: step {step_ms:.3f} ms, floor {floor_ms:.3f} ms")
    print("\n".join(lines_of(profiler.key_averages(), on_cuda, len(taken) + 2)), flush=True)
    profiler.export_chrome_trace(str(trace))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=numbers)
    flags, others = parser.parse_known_args()
    settings = Settings.read(others)
    ceilings = floors.measure(settings)
    benchmark = Benchmark(Engine(settings), ceilings)
    shape = Path(settings.model_id).name
    for num_rows in flags.rows:
        if num_rows <= settings.max_batch_size and benchmark.fits(num_rows, CONTEXT):
            profile_rows(benchmark, num_rows, flags.folder / f"trace-{shape}-{num_rows}.json.gz")


if __name__ == "__main__":
    main()
