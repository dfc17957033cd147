"""Prints the speed of quantised weights: `python -m benchmarks.models.quantized [FOLDER …]`.

Each folder is an output of `tokenfleet quantize`; besides, plain weights are rounded at load in every way,
and the bundled model's own file (a GGUF of Q4_1) is one. All engines take turns in this process with the same
rows. Tokens/s are those of all steps after the prompts, by processor time of one core, so other work counts
little; medians of the turns, and ratios to plain weights are of the same turn. Plain weights are loaded first
and last, since what is loaded late may have fewer large pages. Blocks may have plain weights beside them.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.speculation import play, save_faded
from common.settings.settings import Settings
from gpu_worker.engine.cpu.packed_linear import NativeLinear
from gpu_worker.engine.engine import Engine

AT_LOAD = ("bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "eetq", "fp8")
PROMPT_TOKENS = 32
PLAIN, AGAIN = "plain", "plain, loaded last"


def weight_bytes(model: Any) -> int:
    """Bytes of all weights, as they lie in memory; one that two layers share counts once."""
    tensors = {one.data_ptr(): one for one in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        if isinstance(module, NativeLinear):
            parts = [*module.tensors, module.packed]
            tensors |= {one.data_ptr(): one for one in parts if one is not None}
    return sum(one.nbytes for one in tensors.values())


def load(name: str, settings: dict[str, Any]) -> Engine:
    """Load an engine, and print the memory that its weights take."""
    engine = Engine(Settings(kv_cache_bytes=2**26, threads=1, **settings))
    print(f"{name}: {weight_bytes(engine.loaded.model) / 2**20:.0f} MiB of weights", flush=True)
    return engine


def measure(engines: dict[str, Engine], num_rows: int, turns: int, num_tokens: int) -> None:
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(turns):
        torch.manual_seed(turn)
        prompts = torch.randint(1000, 40_000, (num_rows, PROMPT_TOKENS)).tolist()
        for name, engine in engines.items():
            found[name].append(play(engine, prompts, num_tokens)[0])
    for name, speeds in found.items():
        ratios = [one / plain for one, plain in zip(speeds, found[PLAIN], strict=True)]
        speed, ratio = statistics.median(speeds), statistics.median(ratios)
        print(f"{num_rows} rows, {name}: {speed:6.1f} tokens/s ({ratio:.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--at-load", default=",".join(AT_LOAD), help="with commas")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as plain:
        save_faded(Path(plain), chosen.model, num_layers=0, share=1.0)
        ways = {PLAIN: {"model_id": plain}, chosen.model: {"model_id": chosen.model}}
        ways |= {folder.name: {"model_id": str(folder)} for folder in chosen.folders}
        at_load = filter(None, chosen.at_load.split(","))
        ways |= {name: {"model_id": plain, "quantize": name} for name in at_load}
        ways[AGAIN] = {"model_id": plain}
        engines = {name: load(name, {"dtype": chosen.dtype} | settings) for name, settings in ways.items()}
    for rows in map(int, chosen.rows.split(",")):
        measure(engines, rows, chosen.turns, chosen.tokens)


if __name__ == "__main__":
    main()
