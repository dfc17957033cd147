"""A fleet of two workers with LoRA adapters: the ids are those of PEFT's models, whatever is killed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from benchmarks.client import Stream, stream
from tests.support.adapters.tiny_adapters import merged, save_adapter
from tests.support.engine import tiny_models
from tests.support.engine.reference import load, prompt_ids
from tests.support.engine.tiny_models import generate
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NUM_NEW, MANY_NEW = 16, 160
VOCAB = {"vocab_size": 49_152}
"""Ids of the bundled tokenizer."""
NAMES = ("one", "two", "")
PROMPTS = ["The capital of France is", "Once upon a time there was a lighthouse that"]
SETTINGS: dict[str, Any] = {
    "num_workers": 2,
    "dtype": "float32",
    "threads": 1,
    "kv_cache_bytes": "32MiB",
    "debug_kv": True,
    "worker_ttl_s": 3,
    "stopped_grace_s": 0,
    "allow_runtime_lora_updating": True,
}


class Adapted(NamedTuple):
    """A model with adapters: what serves it, the folder of each adapter, and the ids with which each prompt
    goes on, by PEFT.
    """

    model_id: str
    folders: dict[str, Path]
    expected: dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    config_name, sizes = tiny_models.FAMILIES["Llama"]
    folder = tiny_models.save_with_tokenizer(tmp_path_factory.mktemp("model"), config_name, sizes | VOCAB)
    model = load(folder)
    folders = {
        name: save_adapter(model, tmp_path_factory.mktemp(name), seed, r=4 + 4 * seed)
        for seed, name in enumerate(("one", "two", "three"))
    }
    prompts = prompt_ids(PROMPTS)
    expected = {
        name: [generate(merged(model, folders[name]) if name else model, ids, MANY_NEW) for ids in prompts]
        for name in (*folders, "")
    }
    return Adapted(str(folder), folders, expected)


@pytest.fixture(scope="module")
def fleet(adapted: Adapted) -> Iterator[Fleet]:
    given = ",".join(f"{name}={adapted.folders[name]}" for name in NAMES if name)
    with Fleet(**SETTINGS, model_id=adapted.model_id, lora_adapters=given) as fleet:
        yield fleet


def body(prompt: str, adapter: str, num_new: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {"max_new_tokens": num_new, "details": True, "ignore_eos": True}
    return {"inputs": prompt, "parameters": parameters | ({"adapter_id": adapter} if adapter else {})}


def cases() -> list[tuple[str, str, int]]:
    return [(prompt, name, place) for place, prompt in enumerate(PROMPTS) for name in NAMES]


async def test_streams_have_pefts_ids_and_go_on_with_their_adapters_when_a_worker_is_killed(
    fleet: Fleet, adapted: Adapted
) -> None:
    expected = adapted.expected
    assert len({str(expected[name]) for name in NAMES}) == len(NAMES), "each adapter changes the answer"
    url, streams = f"{fleet.base_url}/generate_stream", [Stream() for _ in cases()]
    tasks = [
        asyncio.create_task(stream(url, body(prompt, name, MANY_NEW), one))
        for one, (prompt, name, _) in zip(streams, cases(), strict=True)
    ]
    await wait_until(lambda: all(len(one.frames) > 4 for one in streams))
    old = fleet.pid("w0")
    os.kill(old, signal.SIGKILL)
    assert not all(task.done() for task in tasks)
    await asyncio.gather(*tasks)
    for one, (_, name, place) in zip(streams, cases(), strict=True):
        assert one.ids == expected[name][place], name
    await asyncio.to_thread(fleet.restarted, "w0", old)


async def test_an_adapter_is_loaded_while_the_fleet_serves_and_by_workers_that_start_later(
    fleet: Fleet, adapted: Adapted
) -> None:
    folders, expected = adapted.folders, adapted.expected
    url = f"{fleet.base_url}/generate_stream"
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=120) as client:

        async def workers_with_all() -> bool:
            listed = (await client.get("/admin/adapters")).json()
            return listed["num_workers"] == 2 and all(one["num_workers"] == 2 for one in listed["adapters"])

        await wait_until(workers_with_all)
        source = {"lora_name": "three", "lora_path": str(folders["three"])}
        reply = await client.post("/v1/load_lora_adapter", json=source)
        assert reply.status_code == 200, reply.text
        assert await workers_with_all(), "it answers once all have it"
        old = fleet.pid("w1")
        os.kill(old, signal.SIGKILL)
        answers = await asyncio.gather(*(stream(url, body(prompt, "three", NUM_NEW)) for prompt in PROMPTS))
        assert [answer.ids for answer in answers] == [ids[:NUM_NEW] for ids in expected["three"]]
        await asyncio.to_thread(fleet.restarted, "w1", old)
        await wait_until(workers_with_all)
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "three"})).status_code == 200
        refused = await client.post("/generate", json=body(PROMPTS[0], "three", 4))
        assert refused.status_code == 422

        async def is_forgotten() -> bool:
            return len((await client.get("/admin/adapters")).json()["adapters"]) == 2

        await wait_until(is_forgotten)
