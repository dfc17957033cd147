"""The cases with pictures of text-generation-inference's own integration tests, by their names: each request
as its test sends it, with pictures of ours, and the shape of the answer. What a model says of a picture is
tested where engines are (tests/unit/gpu_worker/engine/pictures, tests/fleet/pictures).

`test_flash_gemma3` and `test_exceed_window` have no picture. Those of Llama 4 are comments at TGI.
"""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from deploy.launcher.embedded_broker import Broker
from tests.integration.api.tgi.test_shapes import (
    CHOICE,
    CHUNK,
    KNOWN,
    MESSAGE,
    PARAMETERS,
    TOKEN,
    USAGE,
    paths,
)
from tests.support.answers.openai_frames import CHAT_PATH, frames, streamed
from tests.support.fleet.scripted_worker import Answer, FakeWorker
from tests.support.pictures.gateways import data_url, image_part, png, showing, user
from tests.support.pictures.processors import make_processor

Seeing = tuple[FakeWorker, httpx.AsyncClient]
CHICKEN, COW = data_url(png()), data_url(png(color="brown"))
WHOLE_ANSWER = f"generated_text:str details.finish_reason:str details.generated_tokens:int {TOKEN}"
WHOLE_CHAT = f"{KNOWN} {CHOICE} {MESSAGE} {USAGE}"
LOAD = 4


def opaque(mode: str, kind: str) -> str:
    """An empty picture of 100 x 100 pixels, as TGI's tests make it."""
    target = io.BytesIO()
    Image.new(mode, (100, 100), (0, 0, 0, 0) if mode == "RGBA" else (255, 255, 255)).save(target, kind)
    return data_url(target.getvalue(), f"image/{kind.lower()}")


SHORT = {"max_new_tokens": 10}
URL_PROMPT = f"<|begin_of_text|><|begin_of_text|>User:![]({CHICKEN})What is in this image?<end_of_utterance>"
STORY = f"User:![]({CHICKEN})Write me a short story<end_of_utterance> \nAssistant:"
BOTH = f"User:![]({CHICKEN})![]({COW})Where are the cow and chicken?<end_of_utterance> \nAssistant:"
TALE = f"User:![]({CHICKEN})Can you tell me a very short story based on the image?"
STANDING = f"![]({COW})Where is the cow standing?\n"
PROMPTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "test_idefics": (STORY, 1, SHORT),
    "test_idefics_two_images": (BOTH, 2, SHORT),
    "test_idefics_load": (STORY, 1, SHORT),
    "test_flash_idefics2_next_simple": (STORY, 1, SHORT),
    "test_flash_idefics2_two_images": (BOTH, 2, {"max_new_tokens": 20}),
    "test_flash_idefics2_next_all_params": ("Test request", 0, PARAMETERS),
    "test_flash_idefics2_next_load": (STORY, 1, SHORT),
    "test_flash_idefics3_next_simple_url": (f"{URL_PROMPT}\nAssistant:", 1, SHORT | {"seed": 1337}),
    "test_flash_smolvlm_next_simple_url": (f"{URL_PROMPT}\nAssistant:", 1, SHORT | {"seed": 1337}),
    "test_flash_llava_next_simple": (TALE, 1, SHORT),
    "test_flash_llava_next_all_params": ("Test request", 0, PARAMETERS),
    "test_flash_llava_next_load": (TALE, 1, SHORT),
    "test_flash_pali_gemma": (STANDING, 1, {"max_new_tokens": 20}),
    "test_flash_pali_gemma_two_images": (f"caption![]({CHICKEN})![]({COW})\n", 2, {"max_new_tokens": 20}),
    "test_flash_pali_gemma_image": (f"![]({COW})caption es", 1, {"max_new_tokens": 20}),
}
"""Case → its prompt with pictures as Markdown, how many, and its parameters."""

AFTER = {"seed": 42}
CHATS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "test_flash_qwen2_vl_simple": ([image_part(CHICKEN), "Describe this image."], AFTER),
    "test_flash_qwen2_vl_simple_streaming": ([image_part(CHICKEN), "Describe this image."], AFTER),
    "test_flash_qwen2_vl_bay": ([image_part(COW), "Describe the image"], AFTER),
    "test_flash_qwen2_vl_inpaint": ([image_part(COW), "Describe the image"], AFTER),
    "test_flash_qwen2_5_vl_simple": ([image_part(CHICKEN), "Describe the image"], AFTER),
    "test_flash_qwen2_5_vl_simple_streaming": ([image_part(CHICKEN), "Describe the image"], AFTER),
    "test_flash_qwen2_5_vl_bay": ([image_part(COW), "Describe the image"], AFTER),
    "test_flash_qwen2_5_vl_inpaint": ([image_part(COW), "Describe the image"], AFTER),
    "test_flash_gemma3_image_cow_dog": ([image_part(COW), "What is the breed of the dog?"], AFTER),
    "test_flash_gemma3_image_cow": ([image_part(COW), "What is shown in this image?"], AFTER),
    "test_flash_gemma3_image_base64_rgba": ([image_part(opaque("RGBA", "PNG")), "What do you see?"], AFTER),
    "test_flash_gemma3_image_base64_rgb_png": ([image_part(opaque("RGB", "PNG")), "What do you see?"], AFTER),
    "test_flash_gemma3_image_base64_rgb_jpg": (
        [image_part(opaque("RGB", "JPEG")), "What do you see?"],
        AFTER,
    ),
    "test_mllama_simpl": (["Describe the image in 10 words.", image_part(CHICKEN)], {"temperature": 0.0}),
    "test_mllama_load": (["Describe the image in 10 words.", image_part(CHICKEN)], {"temperature": 0.0}),
}
"""Case → the parts of its message, and its parameters."""


@pytest.fixture
async def seeing(broker: Broker, tmp_path: Path) -> AsyncIterator[Seeing]:
    make_processor("idefics3", tmp_path)
    async with showing(broker.url, tmp_path, Answer([40, 41])) as (worker, _, client):
        yield worker, client


def check_shape(name: str, expected: str, value: Any) -> None:
    assert set(expected.split()) - {*paths(value)} == set(), name


async def test_prompts_with_pictures(seeing: Seeing) -> None:
    worker, client = seeing
    for name, (prompt, num_pictures, parameters) in PROMPTS.items():
        body = {"inputs": prompt, "parameters": {"details": True, **parameters}}
        times = LOAD if name.endswith("_load") else 1
        answers = await asyncio.gather(*(client.post("/generate", json=body) for _ in range(times)))
        for answer in answers:
            assert answer.status_code == 200, answer.text
            check_shape(name, WHOLE_ANSWER, answer.json())
        assert len({answer.json()["generated_text"] for answer in answers}) == 1, name
        assert [len(one.pictures) for one in worker.seen[-times:]] == times * [num_pictures], name


async def test_chats_with_pictures(seeing: Seeing) -> None:
    worker, client = seeing
    for name, (parts, parameters) in CHATS.items():
        body = {"model": "tgi", "messages": user(*parts), "max_tokens": 100, **parameters}
        if name.endswith("_streaming"):
            chunks = frames(await streamed(client, CHAT_PATH, body))
            found = {place for chunk in chunks for place in paths(chunk)}
            assert set(f"{CHUNK} choices[].delta.content:str".split()) - found == set(), name
        else:
            times = LOAD if name.endswith("_load") else 1
            for answer in await asyncio.gather(*(client.post(CHAT_PATH, json=body) for _ in range(times))):
                assert answer.status_code == 200, answer.text
                check_shape(name, WHOLE_CHAT, answer.json())
        assert len(worker.seen[-1].pictures) == 1, name
