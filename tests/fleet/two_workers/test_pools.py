"""A pool of another model, of another family, served beside the first by the same gateways: it is named by
`model`. Its tokenizer is none of its own (TOKENIZER_NAME).
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from tests.support.engine import tiny_models, tiny_tokenizers
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until_sync

pytestmark = pytest.mark.slow

SETTINGS = {"dtype": "float32", "kv_cache_bytes": "64MiB", "threads": 1}
NEW_TOKENS = 40
VOCABULARY = 640
"""Ids of the tiny model; its tokenizer has some fewer."""


TEMPLATE = "{% for message in messages %}<|im_end|>{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random Phi-3 without a tokenizer. It computes every K anew beyond 32 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    name, sizes = tiny_models.FAMILIES["Phi3-longrope"]
    tiny_models.save(folder, name, sizes | {"vocab_size": VOCABULARY})
    (folder / "tokenizer.json").unlink()
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizers.byte_level(folder)
    config = {"chat_template": TEMPLATE, "eos_token": tiny_tokenizers.END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def fleets(fleet: Fleet, tiny: Path, tokenizer: Path) -> Iterator[tuple[Fleet, Fleet]]:
    own = {"pool": "tiny", "model_id": tiny, "tokenizer_name": tokenizer}
    with Fleet(**SETTINGS, redis_url=fleet.redis_url, **own) as second:
        yield fleet, second


def is_served(fleet: Fleet, model: str) -> bool:
    """Whether the gateways know a worker of the model."""
    with contextlib.suppress(openai.InternalServerError):
        return bool(complete(fleet, model))
    return False


def complete(fleet: Fleet, model: str) -> str:
    client = openai.OpenAI(base_url=f"{fleet.base_url}/v1", api_key="none", max_retries=0)
    choice = client.completions.create(
        model=model,
        prompt="The sky is",
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert choice.model == model
    return choice.choices[0].text


def test_the_first_gateway_serves_both(fleets: tuple[Fleet, Fleet], tiny: Path, tokenizer: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    wait_until_sync(lambda: is_served(fleets[0], "tiny"))
    own = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    prompt = own.encode("The sky is").ids
    ids = tiny_models.generate(
        AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), prompt, NEW_TOKENS
    )
    assert (
        complete(fleets[0], "tiny")
        == own.decode(ids, skip_special_tokens=True)
        != complete(fleets[0], "smollm2")
    )
    client = openai.OpenAI(base_url=f"{fleets[0].base_url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["smollm2", str(tiny), "tiny"]


def test_chats_and_grammars_are_in_the_other_tokenizer(fleets: tuple[Fleet, Fleet], tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    client = openai.OpenAI(base_url=f"{fleets[0].base_url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "The sky"}],
        extra_body={"structured_outputs": {"regex": "[ab]{4}"}},
    )
    assert answer.usage and answer.usage.prompt_tokens == len(own.encode("<|im_end|>The sky").ids)
    assert re.fullmatch("[ab]{4}", answer.choices[0].message.content or "")
    assert (
        answer.choices[0].finish_reason == "stop"
    )  # the tokenizer's own end, which the model's config lacks


def test_a_pool_whose_fleet_is_gone_is_gone(fleets: tuple[Fleet, Fleet]) -> None:
    fleets[1].kill()
    client = openai.OpenAI(base_url=f"{fleets[0].base_url}/v1", api_key="none")
    wait_until_sync(lambda: [model.id for model in client.models.list()] == ["smollm2"])
    assert complete(fleets[0], "smollm2")
