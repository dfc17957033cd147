"""Prompts with pictures through a whole fleet: ids are those of transformers' `generate`, also together, from
cached blocks, and when a worker dies.
"""

import asyncio
import copy
import io
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from benchmarks.client import Stream, stream
from common.pictures import decoded
from tests.support.engine import tiny_models
from tests.support.engine.pictures.models import FAMILIES
from tests.support.fleet.fleet import Fleet
from tests.support.pictures.gateways import data_url
from tests.support.pictures.processors import CLASSES, TOKENS, make_processor, tokenizer_for
from tests.support.waiting import wait_until

MODELS = {"idefics3": "Idefics3", "qwen2_vl": "Qwen2-VL"}
"""Model types → names in `FAMILIES`."""


class SeeingReference:
    """A model in transformers, with its processor."""

    def __init__(self, folder: Path, family: str) -> None:
        """Make the model, and write it to a folder."""
        chosen = FAMILIES[MODELS[family]]
        assert CLASSES[family][1] == chosen.processor
        placeholder = tokenizer_for(family).convert_tokens_to_ids(TOKENS[family]["image_token"])
        text = chosen.sizes["text_config"] | {"max_position_embeddings": 1024}
        sizes = {**chosen.sizes, "image_token_id": placeholder, "text_config": text}
        self.model = tiny_models.save(folder, chosen.name, sizes)
        self.processor = make_processor(family, folder, **chosen.options)

    def ids(self, text: str, contents: Sequence[bytes], count: int) -> list[int]:
        """Greedy new ids after a prompt with these pictures."""
        images = [[decoded(content) for content in contents]]
        inputs: Any = self.processor(images=images, text=[text], return_tensors="pt")
        output = copy.deepcopy(self.model).generate(
            **inputs, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        new: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return new


pytestmark = pytest.mark.slow

NUM_NEW = 40
TEXT_BEFORE = 16
"""Tokens of whole blocks before the picture of a chat."""
SETTINGS = {"device": "cpu", "dtype": "float32", "debug_kv": True, "kv_cache_bytes": "32MiB", "threads": 1}
INLINE = {"idefics3": "<image>", "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
Served = tuple[str, SeeingReference, Fleet]


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("model")
    reference = SeeingReference(folder, request.param)
    with Fleet(num_workers=2, model_id=folder, worker_ttl_s=3, **SETTINGS) as fleet:
        yield request.param, reference, fleet


@pytest.fixture
async def http(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served[2].base_url, timeout=120) as client:
        yield client


def noise(seed: int, height: int = 50, width: int = 70) -> bytes:
    """The file of a picture like no other."""
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    target = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(target, "PNG")
    return target.getvalue()


def body(text: str, *contents: bytes) -> dict[str, Any]:
    """A request of TGI whose text has `{}` for each picture."""
    inputs = text.format(*(f"![]({data_url(content)})" for content in contents))
    parameters = {"max_new_tokens": NUM_NEW, "ignore_eos": True, "details": True}
    return {"inputs": inputs, "parameters": parameters}


async def generated(http: httpx.AsyncClient, text: str, *contents: bytes) -> list[int]:
    answered = await http.post("/generate", json=body(text, *contents))
    assert answered.status_code == 200, answered.text
    return [token["id"] for token in answered.json()["details"]["tokens"]]


def expected(served: Served, text: str, *contents: bytes) -> list[int]:
    family, reference, _ = served
    return reference.ids(text.format(*[INLINE[family]] * len(contents)), contents, NUM_NEW)


async def test_prompts_with_pictures_alone_and_together(served: Served, http: httpx.AsyncClient) -> None:
    prompts = [
        ("What is {} this?", (noise(1),)),
        ("{} and {}: which is larger?", (noise(2), noise(3, 30, 90))),
        ("Tell me more of\n{}", (noise(1),)),
        ("Nothing to see.", ()),
        ("What is {} this?", (noise(4),)),
    ]
    wanted = [expected(served, text, *contents) for text, contents in prompts if contents]
    alone = [await generated(http, text, *contents) for text, contents in prompts]
    assert [ids for ids, (_, contents) in zip(alone, prompts, strict=True) if contents] == wanted
    together = await asyncio.gather(*(generated(http, text, *contents) for text, contents in prompts))
    assert together == alone


async def test_a_second_turn_finds_the_picture_cached_and_another_picture_does_not(
    served: Served, http: httpx.AsyncClient
) -> None:
    def chat(content: bytes, *more: dict[str, Any]) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": data_url(content)}}
        text = {"type": "text", "text": "What is on this picture, in so many words that blocks are filled?"}
        messages = [{"role": "user", "content": [part, text]}, *more]
        return {"messages": messages, "max_tokens": 8, "ignore_eos": True}

    async def ask(content: bytes, *more: dict[str, Any]) -> tuple[str, int]:
        answered = (await http.post("/v1/chat/completions", json=chat(content, *more))).json()
        cached = answered["usage"].get("prompt_tokens_details") or {}
        return answered["choices"][0]["message"]["content"], cached.get("cached_tokens", 0)

    picture, other = noise(11, 60, 60), noise(12, 60, 60)
    first, _ = await ask(picture)
    turn = [{"role": "assistant", "content": first}, {"role": "user", "content": "And why?"}]
    _, cached = await ask(picture, *turn)
    _, of_other = await ask(other, *turn)
    assert of_other <= TEXT_BEFORE < 4 * TEXT_BEFORE <= cached


async def test_a_worker_that_dies_costs_no_token(served: Served) -> None:
    """The next one gets the pictures again."""
    _, _, fleet = served
    texts = [f"Picture {i}: {{}} What is it?" for i in range(4)]
    wanted = [expected(served, text, noise(20 + i)) for i, text in enumerate(texts)]
    streams = [Stream() for _ in texts]
    url = f"{fleet.base_url}/generate_stream"
    tasks = [
        asyncio.create_task(stream(url, body(text, noise(20 + i)), one))
        for i, (text, one) in enumerate(zip(texts, streams, strict=True))
    ]
    await wait_until(lambda: all(len(one.frames) > 3 for one in streams))
    assert not all(task.done() for task in tasks)
    os.kill(fleet.pid("w0"), signal.SIGKILL)
    await asyncio.gather(*tasks)
    assert [one.ids for one in streams] == wanted
