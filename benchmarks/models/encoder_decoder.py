"""Prints the speed of encoder-decoder models: `python -m benchmarks.models.encoder_decoder`.

transformers' `generate` (sdpa) and the engine compute the same rows in turns in this process, on one core,
with the same random weights: models of the shapes of T5 small and BART base, 128 tokens in, 64 out. All rows
of `generate` are one batch of equal lengths from the first token to the last: its best case. Tokens/s are by
processor time, so other work on the machine counts little. Tokens are equal up to the first difference.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.states import by_engine, by_generate
from common.model_files import starting_ids
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.engine import tiny_models

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
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
TOKENS_IN, TOKENS_OUT, TURNS = 128, 64, 3


def num_equal(ids: list[int], others: list[int]) -> int:
    """How many ids are equal before the first difference."""
    return next((place for place, (a, b) in enumerate(zip(ids, others, strict=True)) if a != b), len(ids))


def measure(shape: str, num_rows: int, dtype: str) -> None:
    family, sizes = SHAPES[shape]
    torch.manual_seed(1)
    prompts = torch.randint(8, sizes["vocab_size"], (num_rows, TOKENS_IN)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.save(Path(folder), family, sizes).to(getattr(torch, dtype))
        model.set_attn_implementation("sdpa")
        settings: dict[str, Any] = {"dtype": dtype, "kv_cache_bytes": 2**28, "max_batch_size": num_rows}
        settings["threads"] = 1
        engine = Engine(Settings(model_id=folder, **settings))
        started = [prompt + starting_ids(Path(folder)) for prompt in prompts]
    torch.set_num_threads(1)
    turns = [
        (by_generate(model, prompts, TOKENS_OUT), by_engine(engine, started, TOKENS_OUT))
        for _ in range(TURNS)
    ]
    same = [num_equal(a, b) for a, b in zip(turns[0][0][0], turns[0][1][0], strict=True)]
    theirs_s, ours_s = (min(turn[side][1] for turn in turns) for side in (0, 1))
    tokens = num_rows * TOKENS_OUT
    speeds = f"generate {tokens / theirs_s:.0f} tokens/s, engine {tokens / ours_s:.0f}"
    equal = f"equal tokens {sum(same)} of {tokens}"
    print(f"{shape}, {dtype}, {num_rows} rows: {speeds}, {theirs_s / ours_s:.2f} times; {equal}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    chosen = parser.parse_args()
    for shape in chosen.shapes.split(","):
        for dtype in chosen.dtypes.split(","):
            for num_rows in map(int, chosen.rows.split(",")):
                measure(shape, num_rows, dtype)


if __name__ == "__main__":
    main()
