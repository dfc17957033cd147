"""Who dies × of which model, under streams: that worker alone ends, and no token is lost or computed in
another way. Ids are those of an undisturbed fleet, and of transformers' `generate`.
"""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.models.speculation import save_faded, save_first_layers
from common import model_files
from tests.support.engine import tiny_models
from tests.support.engine.reference import prompt_ids
from tests.support.engine.tiny_models import HYBRIDS
from tests.support.fleet.fleet import Fleet, have_ended
from tests.support.load import Load, body
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NEW_TOKENS, STREAMS = 100, 4
VOCAB = {"vocab_size": 49_152, "max_position_embeddings": 512}
"""Ids of the bundled tokenizer."""
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "debug_kv": True,
    "kv_cache_bytes": "32MiB",
    "threads": 1,
    "worker_ttl_s": 3,
    "stopped_grace_s": 0,
}
RANKS, STAGES = {"num_shard": 2}, {"pipeline_parallel_size": 2}
TWO = {"num_workers": 2}
T5: dict[str, Any] = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
STUCK = {"step_timeout_s": 2}
"""Where a process is stopped. Elsewhere a busy machine would have the agent kill a slow engine."""
FP8 = {"kv_cache_dtype": "fp8_e5m2"}


def tiny(family: str, sizes: dict[str, Any]) -> Callable[[Path], dict[str, Any]]:
    """Saves a tiny model with the bundled tokenizer → the settings that serve it."""
    return lambda folder: {"model_id": tiny_models.save_with_tokenizer(folder, family, sizes | VOCAB)}


def drafted(folder: Path) -> dict[str, Any]:
    """A model whose draft is always right, and so pays: it has the layers that change anything."""
    save_faded(folder / "model", "smollm2", 6, 0.0)
    save_first_layers(folder / "draft", str(folder / "model"), 6)
    config = json.dumps({"model": str(folder / "draft"), "num_speculative_tokens": 3})
    return {"model_id": folder / "model", "speculative_config": config, "kv_cache_bytes": "128MiB"}


def guessed(_: Path) -> dict[str, Any]:
    """The bundled model, whose rows guess by what they have said before."""
    model = {"model_id": model_files.resolve("smollm2", dtype="float32"), "kv_cache_bytes": "128MiB"}
    return model | {"speculative_config": json.dumps({"method": "suffix"})}


llama = tiny("Llama", tiny_models.LLAMA | {"num_hidden_layers": 4})
latents = tiny(*tiny_models.FAMILIES["DeepSeek-V3"])
hybrid = tiny(*HYBRIDS["Granite4"])
KINDS: dict[str, tuple[Callable[[Path], dict[str, Any]], dict[str, Any]]] = {
    "draft": (drafted, TWO),
    "suffixes": (guessed, TWO),
    "encoder-decoder": (tiny("T5", T5), TWO),
    "states": (hybrid, TWO | {"kv_cache_bytes": "150KiB"}),
    "ranks": (llama, RANKS | STUCK),
    "ranks, two workers": (llama, RANKS | TWO | STUCK),
    "ranks, rounded cache": (llama, RANKS | FP8),
    "ranks, latents": (latents, RANKS),
    "stages": (llama, STAGES | STUCK),
    "stages, two workers": (llama, STAGES | TWO),
    "stages of ranks": (llama, STAGES | RANKS),
}
"""Kind → what makes its model, and what is set beside it. Memory has room for the states of two rows."""
REFERENCES = dict.fromkeys(("draft", "suffixes", "states"), "AutoModelForCausalLM")
REFERENCES |= {"encoder-decoder": "AutoModelForSeq2SeqLM"}
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
CASES: list[tuple[str, list[tuple[str, int, signal.Signals]]]] = [
    *((kind, [("w0", 0, KILL), ("w1", 1, KILL)]) for kind in ("draft", "suffixes", "encoder-decoder")),
    ("states", [("w0", 1, KILL)]),
    *(("ranks", [("w0", *victim)]) for victim in ((0, KILL), (1, KILL), (2, STOP))),
    ("ranks, two workers", [("w0", 2, STOP)]),
    *((kind, [("w0", 0, KILL)]) for kind in ("ranks, rounded cache", "ranks, latents")),
    *(("stages", [("w0", *victim)]) for victim in ((0, KILL), (1, KILL), (2, STOP))),
    ("stages, two workers", [("w0", 2, KILL)]),
    ("stages of ranks", [("w0", 3, KILL)]),
]
"""Kind, and who dies in turn: the worker, which of its processes (0 is the agent, others are ranks), how."""


@dataclass(frozen=True)
class Served:
    fleet: Fleet
    expected: list[list[int]]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    make, more = KINDS[request.param]
    own = make(tmp_path_factory.mktemp("model"))
    with Fleet(**{"num_workers": 1} | SETTINGS | more | own) as fleet:
        expected = asyncio.run(undisturbed(fleet))
        if name := REFERENCES.get(request.param):
            assert expected == generated(name, own["model_id"])
        yield Served(fleet, expected)


async def undisturbed(fleet: Fleet) -> list[list[int]]:
    return await Load(fleet, NEW_TOKENS, STREAMS).whole()


def generated(name: str, folder: Path) -> list[list[int]]:
    import torch
    import transformers

    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    prompts = prompt_ids([body(number, NEW_TOKENS)["inputs"] for number in range(STREAMS)])
    return [tiny_models.generate(model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(("served", "victims"), CASES, indirect=["served"], scope="module")
async def test_deaths_cost_no_token(served: Served, victims: list[tuple[str, int, signal.Signals]]) -> None:
    fleet = served.fleet
    await wait_until(lambda: fleet.workers_ready() == fleet.settings["num_workers"])
    struck = {name for name, _, _ in victims}
    others = {name: pid for name, pid in fleet.pids().items() if name not in struck}
    load = Load(fleet, NEW_TOKENS, STREAMS)
    for name, place, sent in victims:
        # where states wait for room, not every stream has begun
        await wait_until(lambda: sum(len(one.frames) > 5 for one in load.streams) >= 2)
        assert load.running
        old, ranks = fleet.pid(name), fleet.engines(name)
        os.kill([old, *(rank.pid for rank in ranks)][place], sent)
        await asyncio.to_thread(fleet.restarted, name, old)
        await wait_until(lambda ranks=ranks: have_ended(ranks))  # type: ignore[misc]
    assert await load.whole() == served.expected
    assert others.items() <= fleet.pids().items()
    if "speculative_config" in fleet.settings:
        shown = re.compile(r"^tokenfleet_accepted_tokens_total\{.*\} [1-9]", re.MULTILINE)
        await wait_until(lambda: shown.search(httpx.get(f"{fleet.base_url}/metrics").text) is not None)


async def test_a_second_turn_of_a_model_with_states_starts_from_a_snapshot(tmp_path: Path) -> None:
    fleet = Fleet(num_workers=1, **SETTINGS | hybrid(tmp_path) | {"kv_cache_bytes": "8MiB"})
    prompt = "Once upon a time there was a ship that sailed to an island far away in the sea, and"
    num_first = len(prompt_ids([prompt])[0])
    asked = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with fleet, httpx.AsyncClient(base_url=fleet.base_url, timeout=60) as client:
        await wait_until(lambda: fleet.workers_ready() == 1)
        answers: list[Any] = []
        for _ in range(2):
            prompt += answers[0]["choices"][0]["text"] + " Then they came home." if answers else ""
            answers.append((await client.post("/v1/completions", json=asked | {"prompt": prompt})).json())
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = tiny_models.generate(model, prompt_ids([prompt])[0], 40)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert answers[1]["choices"][0]["token_ids"] == expected
    assert cached[0] == 0 and cached[1] >= num_first // 16 * 16 > 0
