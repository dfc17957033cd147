"""Structured output while workers are killed: by a schema, as a forced call, by a regex, and after thinking,
each answer is that of an undisturbed fleet, of two workers and of one with two ranks.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import psutil
import pytest

from tests.support.chaos.outcome import count_resumes
from tests.support.engine import tiny_models
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
SCHEMA = {
    "type": "object",
    "properties": {
        "story": {
            "type": "array",
            "items": {"type": "string", "maxLength": 9},
            "minItems": 8,
            "maxItems": 12,
        },
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4},
    },
    "required": ["story", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}
QUESTION = {"role": "user", "content": "Tell a story."}
TEMPLATE = """{% for one in messages %}<|im_start|>{{ one.role }}
{{ one.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking %}<think>{% endif %}"""
THINKING, PLAIN = ({"chat_template_kwargs": {"enable_thinking": on}} for on in (True, False))
KINDS: list[dict[str, Any]] = [
    {"response_format": FORMAT},
    {"response_format": FORMAT, "temperature": 1.2},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.2},
    {"structured_outputs": {"regex": "([a-z]{3} ){60}end"}, "max_tokens": 400},
    {"response_format": FORMAT, "temperature": 0.7, **THINKING},
]
COMMON = {
    "messages": [QUESTION],
    "max_tokens": 200,
    "stream": True,
    "return_token_ids": True,
    "temperature": 0,
}
BODIES = [{**COMMON, **PLAIN, **kind, "seed": seed} for kind in KINDS for seed in (1, 2)]
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_bytes": "64MiB",
    "worker_ttl_s": 3,
    "threads": 1,
    "reasoning_parser": "qwen3",
}
SIZES = tiny_models.LLAMA | {"vocab_size": 49_152, "max_position_embeddings": 1024, "eos_token_id": 2}


class Answers:
    """Answers, as far as they have come; `num_frames` counts the frames of all."""

    def __init__(self, fleet: Fleet) -> None:
        self.url = f"{fleet.base_url}/v1/chat/completions"
        self.num_frames = 0

    async def all(self) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(timeout=600) as client:
            return await asyncio.gather(*(self.ask(client, body) for body in BODIES))

    async def ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer's ids, reasoning, content, arguments of its call, and finish reason."""
        said: dict[str, Any] = {"ids": [], "reasoning": "", "content": "", "arguments": "", "reason": ""}
        async with client.stream("POST", self.url, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    add(said, json.loads(line.removeprefix("data: "))["choices"][0])
                    self.num_frames += 1
        return said


def add(said: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    calls = delta.get("tool_calls") or [{"function": {}}]
    said["ids"] += choice.get("token_ids") or []
    said["reasoning"] += delta.get("reasoning_content") or ""
    said["content"] += delta.get("content") or ""
    said["arguments"] += calls[0]["function"].get("arguments") or ""
    said["reason"] = choice["finish_reason"] or said["reason"]


@pytest.fixture(scope="module", params=[{"num_workers": 2}, {"num_workers": 1, "num_shard": 2}], ids=str)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet of a tiny random model with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save_with_tokenizer(folder, "Llama", SIZES)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with Fleet(model_id=folder, **SETTINGS, **request.param) as fleet:
        yield fleet


async def test_answers_are_valid_and_those_of_an_undisturbed_fleet(fleet: Fleet) -> None:
    undisturbed = await Answers(fleet).all()
    for said, body in zip(undisturbed, BODIES, strict=True):
        may_think = not body["chat_template_kwargs"]["enable_thinking"]  # it may begin of its own accord
        assert said["ids"] and (said["reasoning"] or may_think), said
        if "structured_outputs" in body:
            assert said["content"].endswith(" end") and said["reason"] == "stop", said
        elif said["reason"] == "length":
            assert said["reasoning"] and not said["content"], said  # nothing ends the thinking of this model
        else:
            jsonschema.validate(json.loads(said["content"] or said["arguments"]), SCHEMA)
    for place in (0, -1):
        assert await interrupted(fleet, place) == undisturbed


async def interrupted(fleet: Fleet, place: int) -> list[dict[str, Any]]:
    """Return answers during which w0's agent, or its last rank, is killed."""
    await wait_until(lambda: fleet.workers_ready() == fleet.settings["num_workers"])
    agent = psutil.Process(fleet.pid("w0"))
    victims = [agent, *sorted(agent.children(), key=lambda process: process.pid)]
    moved, answers = (await count_resumes(fleet.base_url))["died"], Answers(fleet)
    asked = asyncio.create_task(answers.all())
    await wait_until(lambda: answers.num_frames > 10 * len(BODIES))
    os.kill(victims[place].pid, signal.SIGKILL)
    found = await asked

    async def has_moved() -> bool:
        return (await count_resumes(fleet.base_url))["died"] > moved

    await wait_until(has_moved)
    return found
