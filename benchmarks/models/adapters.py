"""Prints what LoRA adapters cost a step of the engine: `python -m benchmarks.models.adapters [--rows 32]`.

Three engines run in this process, and make their steps in turn, so that what else the machine does meets all
alike: one takes no adapters, one has loaded 16 and its rows have none, in one as many rows have each of 16.
Printed are medians over the steps: ms, and tokens/s as a share of what the first engine had in the same turn;
for adapters of attention's q and v (PEFT's default) and of all linear layers.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.engine import UNLIMITED_STEPS
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.protocol import AdapterAnswer, SetAdapter
from tests.support.engine.row_steps import plan, start_row

NUM_ADAPTERS = 16
IN_TOKENS, NUM_STEPS = 16, 112
SPREAD = 0.01
QUERY_VALUE = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = {
    "q and v, rank 8": (QUERY_VALUE, 8),
    "q and v, rank 16": (QUERY_VALUE, 16),
    "all linear layers, rank 8": (ALL, 8),
    "all linear layers, rank 16": (ALL, 16),
}


def write_adapter(engine: Engine, folder: Path, layers: Sequence[str], rank: int, seed: int) -> None:
    """Write an adapter with random matrices for all layers of these names."""
    assert engine.loaded.adapters
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, target in engine.loaded.adapters.targets.items():
        if name.rpartition(".")[2] in layers:
            for half, shape in (("A", (rank, target.inputs)), ("B", (target.outputs, rank))):
                tensor = torch.randn(shape, generator=random) * SPREAD
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = tensor
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def load_adapters(engine: Engine, layers: Sequence[str], rank: int) -> float:
    """Load the adapters → their bytes together."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_ADAPTERS):
            path = Path(folder, str(number))
            write_adapter(engine, path, layers, rank, number)
            assert engine.obey(SetAdapter(str(number), str(path))) == AdapterAnswer(str(number))
    return sum(pair.nbytes for packed in engine.adapters.host.values() for pair in packed.values())


def start(engine: Engine, num_rows: int, adapted: bool) -> None:
    """Start rows, and compute their prompts."""
    blocks = -(-(IN_TOKENS + NUM_STEPS) // engine.block_size)
    starts = [
        start_row(
            engine.rows.step * num_rows + index,
            [100 + (7 * index + i) % 1000 for i in range(IN_TOKENS)],
            NUM_STEPS,
            blocks=range(1 + index * blocks, 1 + (index + 1) * blocks),
            ignore_eos=True,
            adapter=str(index % NUM_ADAPTERS) if adapted else "",
        )
        for index in range(num_rows)
    ]
    engine.apply(plan(UNLIMITED_STEPS, num_rows * IN_TOKENS, starts))
    step = engine.step()
    assert step and step.num_samples == num_rows


def compare(engines: Sequence[Engine], num_rows: int, kind: str) -> None:
    """Print the figures of one kind of adapters."""
    num_bytes = max(load_adapters(engine, *KINDS[kind]) for engine in engines[1:])
    for engine in engines:
        start(engine, num_rows, adapted=engine is engines[-1])
    steps = [[engine.step() for engine in engines] for _ in range(NUM_STEPS - 1)]
    taken = [[step.duration_ms for step in turn if step] for turn in steps[1:]]  # the first warms up
    figures = (
        f"{name} {statistics.median(turn[place] for turn in taken):.2f} ms "
        f"({statistics.median(turn[0] / turn[place] for turn in taken):.3f})"
        for place, name in enumerate(("no adapters", "plain rows", "rows of 16"))
    )
    print(f"{kind} ({num_bytes / 2**20:.0f} MiB): {', '.join(figures)}", flush=True)
    for number in range(NUM_ADAPTERS):
        for engine in engines[1:]:
            engine.obey(SetAdapter(str(number)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--kinds", default=",".join(map(str, range(len(KINDS)))), help="numbers, with commas")
    flags, others = parser.parse_known_args(argv)
    settings = Settings.read(["--kv-cache-bytes", "128MiB", *others])
    with_adapters = settings.model_copy(update={"enable_lora": True, "max_loras": NUM_ADAPTERS})
    plain = Engine(settings.model_copy(update={"enable_lora": False}))
    engines = (plain, Engine(with_adapters), Engine(with_adapters))
    for number in map(int, flags.kinds.split(",")):
        compare(engines, flags.rows, list(KINDS)[number])


if __name__ == "__main__":
    main()
