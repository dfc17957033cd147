"""Prints what micro-batches gain in a pipeline: `python -m benchmarks.step_times.pipeline [--stages 2]`.

Each stage is a process with its part of a tiny Llama, whose layers sleep 2 ms: so they stand for a device,
and stages do not share cores. Groups of 4 rows decode: one group in flight, then as many as there are stages,
in turns. It prints tokens/s and the ratio, medians of the runs.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.process.parent_death import die_with_parent
from common.rank import LOOPBACK, RankInfo, free_port
from common.settings.settings import Settings
from gpu_worker.engine.loop import run_follower
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.pipeline import PipelineEngine
from gpu_worker.protocol import Command, Grant, PeerClosed
from tests.support.engine import tiny_models
from tests.support.engine.start_rows import start_row

LAYER_S = 0.002
LAYERS_PER_STAGE = 16
ROWS = 4
NUM_TOKENS = 30
"""Tokens that a row generates in a run."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_bytes": 2**23,
    "max_batch_prefill_tokens": 64,
    "block_size": 16,
    "threads": 1,
}


class Ranks(Communicator):
    """Tells the engine of each rank, by a grant that cannot be, how many micro-batches a run has."""

    engine: PipelineEngine

    def receive_commands(self) -> Iterator[Command]:
        for command in super().receive_commands():
            if isinstance(command, Grant) and command.until < 0:
                self.engine.rows.num_micro_batches = -command.until
            else:
                yield command


def make_engine(folder: Path, rank: int, stages: int, port: int) -> PipelineEngine:
    """The engine of one stage, whose layers sleep."""
    communicator = Ranks(RankInfo(rank, stages, rank, stages, LOOPBACK, port), num_stages=stages)
    engine = PipelineEngine(Settings(model_id=str(folder), **SETTINGS), communicator=communicator)
    communicator.engine = engine
    stage, layers = engine.loaded.stage, engine.loaded.model.model.layers
    for layer in layers[stage.begin : stage.end]:
        layer.forward = sleep
    return engine


def sleep(hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
    """hidden_states [1, tokens, hidden] of any dtype → the same"""
    time.sleep(LAYER_S)
    return hidden_states


def tokens_per_s(engine: PipelineEngine, groups: int, first_row: int) -> float:
    """Of rows that all decode: from the first token after all have begun."""
    communicator = engine.communicator
    communicator.broadcast_commands([Grant(-groups, 0)])
    engine.rows.num_micro_batches = groups
    blocks = -(-(NUM_TOKENS + 1) // engine.block_size)
    rows = ROWS * groups
    starts = [
        start_row(
            first_row + place,
            [5],
            NUM_TOKENS,
            blocks=range(1 + place * blocks, 1 + (place + 1) * blocks),
            ignore_eos=True,
        )
        for place in range(rows)
    ]
    grants = [Grant(engine.rows.step + 2 * NUM_TOKENS, 64, starts)]
    sampled, began_s, counted = 0, 0.0, 0
    while engine.rows.rows or grants:
        for command in communicator.broadcast_commands(grants):
            engine.obey(command)
        grants = []
        step = engine.step()
        sampled += step.num_samples if step else 0
        if not began_s and sampled >= 4 * rows:
            began_s, counted = time.perf_counter(), sampled
    return (sampled - counted) / (time.perf_counter() - began_s)


def measure(folder: Path, stages: int, port: int, runs: int) -> None:
    engine = make_engine(folder, 0, stages, port)
    rates: dict[int, list[float]] = {1: [], stages: []}
    for run in range(runs):
        for groups, measured in rates.items():
            measured.append(tokens_per_s(engine, groups, 1 + 1000 * (2 * run + (groups > 1))))
    alone, together = (statistics.median(measured) for measured in rates.values())
    print(f"{stages} stages of {LAYERS_PER_STAGE} layers of {LAYER_S * 1e3:.0f} ms, groups of {ROWS} rows")
    print(f"  1 group in flight   {alone:8.1f} tokens/s")
    print(f"  {stages} groups in flight  {together:8.1f} tokens/s")
    ratios = [many / one for one, many in zip(*rates.values(), strict=True)]
    print(f"  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in {runs} runs)")


def follow(folder: Path, rank: int, stages: int, port: int) -> None:
    die_with_parent()
    engine = make_engine(folder, rank, stages, port)
    try:
        run_follower(engine, engine.communicator)
    except PeerClosed:
        sys.exit()


def main(stages: int, runs: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        tiny_models.save(
            folder, "Llama", tiny_models.LLAMA | {"num_hidden_layers": LAYERS_PER_STAGE * stages}
        )
        command = [
            sys.executable,
            "-m",
            "benchmarks.step_times.pipeline",
            "--folder",
            name,
            "--port",
            str(port),
        ]
        others = [
            subprocess.Popen([*command, "--stages", str(stages), "--rank", str(rank)])
            for rank in range(1, stages)
        ]
        try:
            measure(folder, stages, port, runs)
        finally:
            for other in others:
                other.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        follow(options.folder, options.rank, options.stages, options.port)
    else:
        main(options.stages, options.runs)
