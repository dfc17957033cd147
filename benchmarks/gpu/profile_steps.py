"""Prints where the time of a decode step goes, kernel by kernel: `python -m benchmarks.gpu.profile_steps
FOLDER ROWS [settings]`, ROWS such as 1,32,256.

Rows of 512 tokens decode under torch's profiler. Printed for each number of rows are a step's time without
the profiler, and torch's table of the kernels by their share; traces for https://ui.perfetto.dev go to
FOLDER. On CPU operations take the place of kernels.
"""

import argparse
import statistics
from pathlib import Path

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


def profile_rows(benchmark: Benchmark, num_rows: int, trace: Path) -> None:
    on_cuda = benchmark.engine.loaded.device.type == "cuda"
    steps_of(benchmark, num_rows)  # warms up
    step_ms = statistics.median(steps_of(benchmark, num_rows))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        steps_of(benchmark, num_rows)
    read_bytes = num_rows * floors.kv_bytes(benchmark.geometry, CONTEXT + STEPS // 2)
    floor_ms = benchmark.floor_ms(num_rows, num_rows, read_bytes)
    print(f"{num_rows} rows at {CONTEXT}: step {step_ms:.3f} ms, floor {floor_ms:.3f} ms")
    by = f"self_{'device' if on_cuda else 'cpu'}_time_total"
    print(profiler.key_averages().table(by, NUM_KERNELS, max_name_column_width=NAME_WIDTH), flush=True)
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
