"""Prints what pictures cost, and what rows that decode notice: `python -m benchmarks.models.pictures`.

An engine of SmolVLM-256M's shape with random weights, in this process. First the times of one picture of
1024 x 768 pixels, of which the processor makes 13 tiles. Then rows decode, and every 20 steps a prompt comes:
a short one, a text of as many tokens as the picture has, or a new picture. Gaps are those between the tokens
of a row.
"""

import argparse
import hashlib
import io
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from common import model_files
from common.messages.plan import NewRow
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.engine.pictures.models import SettledEngine
from tests.support.engine.row_steps import plan, start_row

TEXT = {
    "model_type": "llama",
    "vocab_size": 49_280,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
PLACEHOLDER = 49_190
CONFIG = {
    "model_type": "smolvlm",
    "architectures": ["SmolVLMForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": VISION,
    "image_token_id": PLACEHOLDER,
    "scale_factor": 4,
    "tie_word_embeddings": False,
}
PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": 2048},
    "max_image_size": {"longest_edge": 512},
}
SIZE = (1024, 768)
EVERY = 20
"""Steps from one prompt to the next."""
ROWS = 4
GAP_MS = 50.0
"""The time of prompts beside rows that decode."""


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_files.resolve("smollm2") / name, folder)


def new_picture(seed: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize(SIZE).save(file, "JPEG")
    return file.getvalue()


class Bench:
    """An engine, with as many blocks as its rows want: each row gets new ones."""

    def __init__(self, folder: Path) -> None:
        settings: dict[str, Any] = {"load_format": "dummy", "kv_cache_bytes": 2**30}
        self.engine = Engine(Settings(model_id=str(folder), **settings))
        self.settled = SettledEngine(self.engine)  # it waits, where an engine's loop would wait for grants
        self.next_block = 1
        self.next_row = 0
        tower: Any = self.engine.pictures.tower  # type: ignore[union-attr]
        made = tower.process(new_picture(0), 0)
        self.num_tokens = tower.family.shape(made).num_units * len(tower.encode(made, 0))

    def row(self, ids: list[int], end: int, data: bytes = b"") -> NewRow:
        count = -(-(len(ids) + end) // self.engine.block_size)
        num_blocks = self.engine.ready.num_blocks
        blocks = [1 + (self.next_block + number) % num_blocks for number in range(count)]
        self.next_block += count
        self.next_row += 1
        pictures = [(1, len(ids) - 2, hashlib.sha256(data).hexdigest(), data)] if data else []
        return start_row(self.next_row, ids, end, 0, blocks, ignore_eos=True, pictures=pictures)

    def text(self, count: int, end: int = 1) -> NewRow:
        return self.row([7] * count, end)

    def picture(self, seed: int) -> NewRow:
        return self.row([7, *[PLACEHOLDER] * self.num_tokens, 7], 1, new_picture(seed))

    def alone_ms(self, start: NewRow) -> float:
        """From the start of a row to its token, with nothing else."""
        began_s = time.perf_counter()
        self.apply([start])
        while not any(row == start.row for row, *_ in self.step()):
            pass
        return (time.perf_counter() - began_s) * 1e3

    def step(self) -> list[tuple[int, int, int, float]]:
        """What a step samples."""
        result = self.settled.step()
        return list(result.sampled) if result else []

    def apply(self, starts: list[NewRow]) -> None:
        ready = self.engine.ready
        mixed = max(16, int(GAP_MS / ready.token_ms))
        self.engine.apply(plan(2**30, ready.max_batch_prefill_tokens, starts, mixed_prefill_tokens=mixed))

    def gaps_ms(self, make: Callable[[int], NewRow], num_prompts: int) -> list[float]:
        """Gaps of one of the rows that decode, while prompts come."""
        rows = [self.text(16, EVERY * (num_prompts + 1)) for _ in range(ROWS)]
        self.apply(rows)
        gaps: list[float] = []
        last_s, seed = 0.0, 1000
        while self.engine.rows.rows:
            if any(row == rows[0].row for row, *_ in self.step()):
                now_s = time.perf_counter()
                gaps += [(now_s - last_s) * 1e3] if last_s else []
                last_s = now_s
                if len(gaps) % EVERY == 1 and seed < 1000 + num_prompts:
                    seed += 1
                    self.apply([make(seed)])
        return gaps


def main(num_prompts: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        bench = Bench(Path(name))
    pictures = bench.engine.pictures
    assert pictures
    print(f"{bench.num_tokens} placeholders; a prompt token takes {bench.engine.ready.token_ms:.2f} ms")
    data = new_picture(1)
    times = [timed_ms(lambda: pictures.tower.process(data, bench.num_tokens)) for _ in range(3)]
    encode = pictures.tower.try_out()
    tile_ms = min(timed_ms(encode) for _ in range(5))
    cost = round(pictures.token_cost * len(encode()))
    print(f"processing {statistics.median(times):.0f} ms; a tile {tile_ms:.0f} ms, as {cost} prompt tokens")
    text_ms = min(bench.alone_ms(bench.text(bench.num_tokens + 2)) for _ in range(2))
    first_ms = min(bench.alone_ms(bench.picture(seed)) for seed in (10, 11))
    again_ms = min(bench.alone_ms(bench.picture(seed)) for seed in (10, 11))
    print(f"first token: text {text_ms:.0f} ms, picture {first_ms:.0f} ms, the same again {again_ms:.0f} ms")
    kinds: dict[str, Callable[[int], NewRow]] = {
        "short prompts": lambda seed: bench.text(16),
        "texts as long": lambda seed: bench.text(bench.num_tokens + 2),
        "pictures": bench.picture,
    }
    for kind, make in kinds.items():
        gaps = sorted(bench.gaps_ms(make, num_prompts))
        shares = [f"p{share} {gaps[share * (len(gaps) - 1) // 100]:.0f}" for share in (50, 90, 99)]
        print(f"{kind}: gaps {', '.join(shares)} ms", flush=True)


def timed_ms(run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    run()
    return (time.perf_counter() - began_s) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=4)
    main(parser.parse_args().prompts)
