"""Prints the speed of models with states, and of encoder-decoder models, beside that of transformers:
`python -m benchmarks.models.families`.

Both compute the same rows in turns in this process, with one thread and random weights. Times are the
processor's, so that a machine with other work gives the same ratios. `generate` has all rows in one batch of
equal lengths from the first token to the last, which is its best case, and transformers' own scans and
updates, some of which the engine replaces. Tokens of greedy answers are compared up to the first difference.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from common.model_files import starting_ids
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.tiny_models import HYBRIDS

TOKENS_OUT, TURNS = 64, 3
LARGER: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 512}
LARGER |= {"initializer_range": 0.1}
WIDER: dict[str, dict[str, Any]] = {
    "LFM2": {},
    "Mamba2": {"num_heads": 64, "state_size": 64, "chunk_size": 64},
    "Granite4": {"mamba_n_heads": 64, "mamba_d_state": 64, "mamba_chunk_size": 64},
    "Qwen3-Next": {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (HYBRIDS[name][0], HYBRIDS[name][1] | LARGER | wider) for name, wider in WIDER.items()
}
FAMILIES |= {
    "t5-small": (
        "T5",
        {"vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
        | {"decoder_start_token_id": 0, "initializer_factor": 0.3},
    ),
    "bart-base": (
        "Bart",
        {"vocab_size": 50_265, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "init_std": 0.1}
        | {"encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072}
        | {"decoder_ffn_dim": 3072, "max_position_embeddings": 1024, "forced_eos_token_id": None}
        | {"decoder_start_token_id": 2, "forced_bos_token_id": None},
    ),
}


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


def num_equal(ids: list[int], others: list[int]) -> int:
    """How many ids are equal before the first difference."""
    return next((place for place, (a, b) in enumerate(zip(ids, others, strict=True)) if a != b), len(ids))


def measure(family: str, num_rows: int, dtype: str) -> None:
    name, sizes = FAMILIES[family]
    num_in = 64 if family in WIDER else 128
    torch.manual_seed(1)
    prompts = torch.randint(8, sizes["vocab_size"], (num_rows, num_in)).tolist()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.save(Path(folder), name, sizes).to(getattr(torch, dtype))
        settings: dict[str, Any] = {"dtype": dtype, "kv_cache_bytes": 2**28, "max_batch_size": num_rows}
        engine = Engine(Settings(model_id=folder, threads=1, **settings))
        started = [prompt + starting_ids(Path(folder)) for prompt in prompts]
    turns = [
        (by_generate(model, prompts, TOKENS_OUT), by_engine(engine, started, TOKENS_OUT))
        for _ in range(TURNS)
    ]
    same = sum(num_equal(a, b) for a, b in zip(turns[0][0][0], turns[0][1][0], strict=True))
    theirs_s, ours_s = (min(turn[side][1] for turn in turns) for side in (0, 1))
    tokens = num_rows * TOKENS_OUT
    speeds = f"generate {tokens / theirs_s:.0f} tokens/s, engine {tokens / ours_s:.0f}"
    equal = f"equal tokens {same} of {tokens}"
    print(f"{family}, {dtype}, {num_rows} rows: {speeds}, {theirs_s / ours_s:.2f} times; {equal}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--dtype", default="float32")
    chosen = parser.parse_args()
    for family in chosen.families.split(","):
        for num_rows in map(int, chosen.rows.split(",")):
            measure(family, num_rows, chosen.dtype)


if __name__ == "__main__":
    main()
