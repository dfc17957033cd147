"""Prompts with pictures through a whole fleet: ids are those of transformers' `generate`, also together, from
cached blocks, and when a worker dies.
"""

import asyncio
import copy
import io
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from PIL import Image

from benchmarks.client import Stream, stream
from common.pictures import decoded
from tests.support.engine import tiny_models
from tests.support.engine.pictures.models import FAMILIES
from tests.support.fleet.fleet import Fleet
from tests.support.pictures import TOKENS, data_url, make_processor, tokenizer_for
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

FAMILY, NAME, INLINE = "qwen2_vl", "Qwen2-VL", "<|vision_start|><|image_pad|><|vision_end|>"
NUM_NEW = 40
TEXT_BEFORE = 16
"""Tokens of whole blocks before the picture of a chat."""
SETTINGS = {"device": "cpu", "dtype": "float32", "debug_kv": True, "kv_cache_bytes": "32MiB", "threads": 1}


class Served(NamedTuple):
    """A fleet, and its model in transformers with the processor."""

    fleet: Fleet
    model: Any
    processor: Any

    def expected(self, text: str, contents: Sequence[bytes]) -> list[int]:
        """Greedy new ids after a text with `{}` for each picture."""
        images = [[decoded(content) for content in contents]]
        prompt = text.format(*[INLINE] * len(contents))
        inputs: Any = self.processor(images=images, text=[prompt], return_tensors="pt")
        output = copy.deepcopy(self.model).generate(
            **inputs, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        new: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return new


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, chosen = tmp_path_factory.mktemp("model"), FAMILIES[NAME]
    placeholder = tokenizer_for(FAMILY).convert_tokens_to_ids(TOKENS[FAMILY]["image_token"])
    text = chosen.sizes["text_config"] | {"max_position_embeddings": 1024}
    sizes = {**chosen.sizes, "image_token_id": placeholder, "text_config": text}
    model = tiny_models.save(folder, chosen.name, sizes)
    processor = make_processor(FAMILY, folder, **chosen.options)
    with Fleet(num_workers=2, model_id=folder, worker_ttl_s=3, **SETTINGS) as fleet:
        yield Served(fleet, model, processor)


def noise(seed: int, height: int = 50, width: int = 70) -> bytes:
    """The file of a picture like no other."""
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    target = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(target, "PNG")
    return target.getvalue()


def body(text: str, contents: Sequence[bytes]) -> dict[str, Any]:
    """A request of TGI whose text has `{}` for each picture."""
    inputs = text.format(*(f"![]({data_url(content)})" for content in contents))
    return {"inputs": inputs, "parameters": {"max_new_tokens": NUM_NEW, "ignore_eos": True, "details": True}}


PROMPTS: list[tuple[str, list[bytes]]] = [
    ("What is {} this?", [noise(1)]),
    ("{} and {}: which is larger?", [noise(2), noise(3, 30, 90)]),
    ("Tell me more of\n{}", [noise(1)]),
    ("What is {} this?", [noise(4)]),
]


async def test_prompts_with_pictures_alone_and_together_and_when_a_worker_dies(served: Served) -> None:
    """The next one gets the pictures again."""
    expected = [served.expected(*prompt) for prompt in PROMPTS]
    url = f"{served.fleet.base_url}/generate_stream"
    assert [(await stream(url, body(*prompt))).ids for prompt in PROMPTS] == expected
    streams = [Stream() for _ in PROMPTS]
    tasks = [
        asyncio.create_task(stream(url, body(*prompt), one))
        for prompt, one in zip(PROMPTS, streams, strict=True)
    ]
    await wait_until(lambda: all(len(one.frames) > 3 for one in streams))
    assert not all(task.done() for task in tasks)
    os.kill(served.fleet.pid("w0"), signal.SIGKILL)
    await asyncio.gather(*tasks)
    assert [one.ids for one in streams] == expected


async def test_a_second_turn_finds_the_picture_cached_and_another_picture_does_not(served: Served) -> None:
    def chat(content: bytes, *more: dict[str, Any]) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": data_url(content)}}
        text = {"type": "text", "text": "What is on this picture, in so many words that blocks are filled?"}
        messages = [{"role": "user", "content": [part, text]}, *more]
        return {"messages": messages, "max_tokens": 8, "ignore_eos": True}

    async def ask(content: bytes, *more: dict[str, Any]) -> tuple[str, int]:
        async with httpx.AsyncClient(base_url=served.fleet.base_url, timeout=120) as http:
            answered = (await http.post("/v1/chat/completions", json=chat(content, *more))).json()
        cached = answered["usage"].get("prompt_tokens_details") or {}
        return answered["choices"][0]["message"]["content"], cached.get("cached_tokens", 0)

    picture, other = noise(11, 60, 60), noise(12, 60, 60)
    first, _ = await ask(picture)
    turn = [{"role": "assistant", "content": first}, {"role": "user", "content": "And why?"}]
    _, cached = await ask(picture, *turn)
    _, of_other = await ask(other, *turn)
    assert of_other <= TEXT_BEFORE < 4 * TEXT_BEFORE <= cached
