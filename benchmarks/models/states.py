"""Prints the speed of models with states beside that of transformers: `python -m benchmarks.models.states`.

Both compute the same rows in this process, with one thread and random weights in float32: 64 tokens in, 64
out. Times are the processor's, so that a machine with other work gives the same ratios. `generate` has all
rows in one batch of equal lengths from the first token to the last, which is its best case, and transformers'
own scans and updates, some of which the engine replaces. Greedy answers are compared.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.states.hybrid_models import HYBRIDS

FAMILIES = ("LFM2", "Mamba2", "Granite4", "Qwen3-Next")
TOKENS = 64
TURNS = 3
LARGER = {"hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 512}
WIDER: dict[str, dict[str, Any]] = {
    "Mamba2": {"num_heads": 64, "state_size": 64, "chunk_size": 64},
    "Granite4": {"mamba_n_heads": 64, "mamba_d_state": 64, "mamba_chunk_size": 64},
    "Qwen3-Next": {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}


def prompts_of(num_rows: int) -> list[list[int]]:
    torch.manual_seed(1)
    ids: list[list[int]] = torch.randint(3, tiny_models.VOCAB, (num_rows, TOKENS)).tolist()
    return ids


@cache
def own_functions(modeling: Any) -> dict[str, Any]:
    """Those of a module of transformers, before an engine is made."""
    return {name: one for name, one in vars(modeling).items() if callable(one)}


@contextmanager
def functions(modeling: Any, used: dict[str, Any]) -> Iterator[None]:
    """Have a module of transformers use these functions."""
    others = {name: vars(modeling)[name] for name in used}
    vars(modeling).update(used)
    yield
    vars(modeling).update(others)


def by_generate(model: Any, prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], float]:
    """New ids, and seconds."""
    ids, began_s = torch.tensor(prompts), time.process_time()
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output = model.generate(ids, max_new_tokens=num_new, attention_mask=torch.ones_like(ids), **settings)
    new_ids: list[list[int]] = output[:, -num_new:].tolist()
    return new_ids, time.process_time() - began_s


def by_engine(engine: Engine, prompts: list[list[int]], num_new: int) -> tuple[list[list[int]], float]:
    """New ids, and seconds."""
    played = Player(engine, list(range(1, engine.ready.num_blocks + 1)), until=engine.rows.step)
    starts = [played.start(row, ids, num_new, ignore_eos=True) for row, ids in enumerate(prompts)]
    began_s = time.process_time()
    ids = played.run(starts, horizon=64, lead=64)
    return [ids[row] for row in range(len(prompts))], time.process_time() - began_s


def measure(family: str, num_rows: int) -> None:
    name, sizes = HYBRIDS[family]
    prompts = prompts_of(num_rows)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        larger = sizes | LARGER | WIDER.get(family, {}) | {"initializer_range": 0.1}
        model = tiny_models.save(Path(folder), name, larger)
        modeling = sys.modules[type(model).__module__]
        own = own_functions(modeling)
        settings: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 2**28, "max_batch_size": num_rows}
        settings["threads"] = 1
        engine = Engine(Settings(model_id=folder, **settings))
    turns = []
    for _ in range(TURNS):
        with functions(modeling, own):
            theirs = by_generate(model, prompts, TOKENS)
        turns.append((theirs, by_engine(engine, prompts, TOKENS)))
    same = sum(a == b for turn in turns for a, b in zip(turn[0][0], turn[1][0], strict=True))
    theirs_s, ours_s = (min(turn[side][1] for turn in turns) for side in (0, 1))
    tokens = num_rows * TOKENS
    speeds = f"generate {tokens / theirs_s:.0f} tokens/s, engine {tokens / ours_s:.0f}"
    equal = f"equal answers {same} of {TURNS * num_rows}"
    print(f"{family}, {num_rows} rows: {speeds}, {theirs_s / ours_s:.2f} times; {equal}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--families", default=",".join(FAMILIES))
    arguments = parser.parse_args()
    for family in arguments.families.split(","):
        for num_rows in map(int, arguments.rows.split(",")):
            measure(family, num_rows)


if __name__ == "__main__":
    main()
