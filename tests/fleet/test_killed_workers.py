"""Who dies × of which model, under streams: that worker alone ends, and no token is lost or computed in
another way. Ids are those of an undisturbed fleet, and of transformers' `generate`. And while nobody dies,
adapters come and go.
"""

import asyncio
import itertools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from benchmarks.models.speculation import save_faded, save_first_layers
from common import model_files
from common.pictures import decoded
from tests.support.adapters.tiny_adapters import merged, save_adapter
from tests.support.engine import tiny_models
from tests.support.engine.pictures.models import FAMILIES as PICTURE_FAMILIES
from tests.support.engine.pictures.models import picture
from tests.support.engine.reference import load, prompt_ids
from tests.support.engine.tiny_models import HYBRIDS
from tests.support.fleet.fleet import Fleet, have_ended
from tests.support.load import Load, body
from tests.support.pictures import TOKENS, data_url, make_processor, tokenizer_for
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

STREAMS = 4
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
STUCK = {"step_timeout_s": 2}
"""Where a process is stopped. Elsewhere a busy machine would have the agent kill a slow engine."""
FP8 = {"kv_cache_dtype": "fp8_e5m2"}
ADAPTERS = ("one", "two")
FAMILY, NAME, INLINE = "qwen2_vl", "Qwen2-VL", "<|vision_start|><|image_pad|><|vision_end|>"
"""Of the model that sees pictures."""


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


def texts(num_tokens: int) -> list[dict[str, Any]]:
    return [body(number, num_tokens) for number in range(STREAMS)]


def by_transformers(name: str, own: dict[str, Any], bodies: list[dict[str, Any]]) -> list[list[int]]:
    import torch
    import transformers

    model = getattr(transformers, name).from_pretrained(own["model_id"], dtype=torch.float32)
    return continued([model] * STREAMS, bodies)


def continued(models: Sequence[Any], bodies: list[dict[str, Any]]) -> list[list[int]]:
    """Greedy ids, each text by its own model."""
    prompts = prompt_ids([one["inputs"] for one in bodies])
    num_tokens = bodies[0]["parameters"]["max_new_tokens"]
    return [
        tiny_models.generate(model, prompt, num_tokens) for model, prompt in zip(models, prompts, strict=True)
    ]


def adapted(folder: Path) -> dict[str, Any]:
    """A model with two adapters."""
    own = llama(folder)
    given = [
        f"{name}={save_adapter(load(own['model_id']), folder / name, seed, r=4 + 4 * seed)}"
        for seed, name in enumerate(ADAPTERS)
    ]
    return own | {"lora_adapters": ",".join(given)}


def adapted_texts(num_tokens: int) -> list[dict[str, Any]]:
    """In turn with one of the adapters or without."""
    names = itertools.cycle([*({"adapter_id": name} for name in ADAPTERS), {}])
    return [one | {"parameters": one["parameters"] | next(names)} for one in texts(num_tokens)]


def by_peft(own: dict[str, Any], bodies: list[dict[str, Any]]) -> list[list[int]]:
    model, names = load(own["model_id"]), [one["parameters"].get("adapter_id") for one in bodies]
    return continued([merged(model, own["model_id"] / name) if name else model for name in names], bodies)


def seeing(folder: Path) -> dict[str, Any]:
    """A model that sees pictures."""
    chosen = PICTURE_FAMILIES[NAME]
    placeholder = tokenizer_for(FAMILY).convert_tokens_to_ids(TOKENS[FAMILY]["image_token"])
    text = chosen.sizes["text_config"] | {"max_position_embeddings": 1024}
    tiny_models.save(
        folder, chosen.name, {**chosen.sizes, "image_token_id": placeholder, "text_config": text}
    )
    make_processor(FAMILY, folder, **chosen.options)
    return {"model_id": folder}


SEEN: list[tuple[str, list[bytes]]] = [
    ("What is {} this?", [picture(1)]),
    ("{} and {}: which is larger?", [picture(2), picture(3, 30, 90)]),
    ("Tell me more of\n{}", [picture(1)]),
    ("What is {} this?", [picture(4)]),
]
"""Prompts with `{}` for each of their pictures."""


def with_pictures(num_tokens: int) -> list[dict[str, Any]]:
    """The next worker gets the pictures again."""
    own = zip(texts(num_tokens), SEEN, strict=True)
    return [
        one | {"inputs": text.format(*(f"![]({data_url(content)})" for content in contents))}
        for one, (text, contents) in own
    ]


def by_its_processor(own: dict[str, Any], bodies: list[dict[str, Any]]) -> list[list[int]]:
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(own["model_id"], dtype="float32")
    processor = make_processor(FAMILY, own["model_id"], **PICTURE_FAMILIES[NAME].options)
    num_tokens, found = bodies[0]["parameters"]["max_new_tokens"], []
    for text, contents in SEEN:
        prompt = text.format(*[INLINE] * len(contents))
        images = [[decoded(content) for content in contents]]
        inputs: Any = dict(processor(images=images, text=[prompt], return_tensors="pt"))
        [ids] = inputs.pop("input_ids").tolist()
        found.append(tiny_models.generate(model, ids, num_tokens, **inputs))
    return found


llama = tiny("Llama", tiny_models.LLAMA | {"num_hidden_layers": 4})
latents = tiny(*tiny_models.FAMILIES["DeepSeek-V3"])
hybrid = tiny(*HYBRIDS["Granite4"])


class Kind(NamedTuple):
    """What makes a model, what is set beside it, what it is asked for, and whose ids are right.

    Attributes:
        num_tokens: of each answer: a tiny model says a hundred before a second worker is killed.
    """

    make: Callable[[Path], dict[str, Any]]
    settings: dict[str, Any]
    reference: Callable[[dict[str, Any], list[dict[str, Any]]], list[list[int]]] | None = None
    bodies: Callable[[int], list[dict[str, Any]]] = texts
    num_tokens: int = 100


CAUSAL = partial(by_transformers, "AutoModelForCausalLM")
KINDS = {
    "draft": Kind(drafted, TWO, CAUSAL),
    "suffixes": Kind(guessed, TWO, CAUSAL),
    "encoder-decoder": Kind(
        tiny("T5", tiny_models.T5), TWO, partial(by_transformers, "AutoModelForSeq2SeqLM"), num_tokens=400
    ),
    "states": Kind(hybrid, TWO | {"kv_cache_bytes": "150KiB"}, CAUSAL),  # room for two rows
    "adapters": Kind(adapted, TWO | {"allow_runtime_lora_updating": True}, by_peft, adapted_texts, 160),
    "pictures": Kind(seeing, TWO, by_its_processor, with_pictures),
    "ranks": Kind(llama, RANKS | STUCK),
    "ranks, two workers": Kind(llama, RANKS | TWO | STUCK),
    "ranks, rounded cache": Kind(llama, RANKS | FP8),
    "ranks, latents": Kind(latents, RANKS),
    "stages": Kind(llama, STAGES | STUCK),
    "stages, two workers": Kind(llama, STAGES | TWO),
    "stages of ranks": Kind(llama, STAGES | RANKS),
}
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
CASES: list[tuple[str, list[tuple[str, int, signal.Signals]]]] = [
    *((kind, [("w0", 0, KILL), ("w1", 1, KILL)]) for kind in ("draft", "suffixes", "encoder-decoder")),
    ("states", [("w0", 1, KILL)]),
    *((kind, [("w0", 0, KILL)]) for kind in ("adapters", "pictures")),
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
    """A fleet, what it is asked for, and what is right."""

    fleet: Fleet
    bodies: list[dict[str, Any]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind = KINDS[request.param]
    own, bodies = kind.make(tmp_path_factory.mktemp("model")), kind.bodies(kind.num_tokens)
    with Fleet(**{"num_workers": 1} | SETTINGS | kind.settings | own) as fleet:
        expected = asyncio.run(undisturbed(fleet, bodies))
        if kind.reference:
            assert expected == kind.reference(own, bodies)
        yield Served(fleet, bodies, expected)


async def undisturbed(fleet: Fleet, bodies: list[dict[str, Any]]) -> list[list[int]]:
    return await Load(fleet, bodies).whole()


def num_interrupted(fleet: Fleet) -> int:
    """The number of deaths so far under which requests ran."""
    return len(re.findall(r"is removed; [1-9]\d* requests? resumed", fleet.output() + fleet.errors()))


@pytest.mark.parametrize(("served", "victims"), CASES, indirect=["served"], scope="module")
async def test_deaths_cost_no_token(served: Served, victims: list[tuple[str, int, signal.Signals]]) -> None:
    fleet = served.fleet
    await wait_until(lambda: fleet.workers_ready() == fleet.settings["num_workers"])
    struck = {name: (fleet.pid(name), fleet.engines(name)) for name, _, _ in victims}
    others = {name: pid for name, pid in fleet.pids().items() if name not in struck}
    streams = Load(fleet, served.bodies)
    # where states wait for room, not every stream has begun
    await wait_until(lambda: sum(len(one.frames) > 5 for one in streams.streams) >= 2)
    for number, (name, place, sent) in enumerate(victims, num_interrupted(fleet) + 1):
        agent, ranks = struck[name]
        os.kill([agent, *(rank.pid for rank in ranks)][place], sent)
        await wait_until(lambda number=number: num_interrupted(fleet) >= number)  # type: ignore[misc]
        await streams.progress(5)
    assert await streams.whole() == served.expected
    for name, (agent, ranks) in struck.items():
        await asyncio.to_thread(fleet.restarted, name, agent)
        await wait_until(lambda ranks=ranks: have_ended(ranks))  # type: ignore[misc]
    assert others.items() <= fleet.pids().items()
    if "speculative_config" in fleet.settings:
        shown = re.compile(r"^tokenfleet_accepted_tokens_total\{.*\} [1-9]", re.MULTILINE)
        await wait_until(lambda: shown.search(httpx.get(f"{fleet.base_url}/metrics").text) is not None)


@pytest.mark.parametrize("served", ["adapters"], indirect=True, scope="module")
async def test_an_adapter_is_loaded_while_the_fleet_serves_and_by_workers_that_start_later(
    served: Served, tmp_path: Path
) -> None:
    fleet, source = served.fleet, {"lora_name": "three"}
    folder = Path(fleet.settings["model_id"])
    source["lora_path"] = str(save_adapter(load(folder), tmp_path / "three", 3))
    bodies = [one | {"parameters": one["parameters"] | {"adapter_id": "three"}} for one in texts(16)]
    expected = continued([merged(load(folder), tmp_path / "three")] * STREAMS, bodies)
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=120) as client:

        async def workers_with_all() -> bool:
            listed = (await client.get("/admin/adapters")).json()
            return listed["num_workers"] == 2 and all(one["num_workers"] == 2 for one in listed["adapters"])

        await wait_until(workers_with_all)
        reply = await client.post("/v1/load_lora_adapter", json=source)
        assert reply.status_code == 200, reply.text
        assert await workers_with_all(), "it answers once all have it"
        old = fleet.pid("w1")
        os.kill(old, signal.SIGKILL)
        assert await Load(fleet, bodies).whole() == expected
        await asyncio.to_thread(fleet.restarted, "w1", old)
        await wait_until(workers_with_all)
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "three"})).status_code == 200
        refused = await client.post("/generate", json=bodies[0])
        assert refused.status_code == 422

        async def is_forgotten() -> bool:
            return len((await client.get("/admin/adapters")).json()["adapters"]) == 2

        await wait_until(is_forgotten)
