"""Bulk work of the benchmarks; prints nothing. Many requests of the class `batch`, all of one shape, sent as
jobs through Redis or as the lines of one batch over HTTP.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.serve import WORDS_PER_TOKEN, prompt
from common.broker.client import connect
from common.broker.committed import in_slices
from common.broker.keys import Keys
from tests.support.fleet.fleet import Fleet

KEYS = Keys("default")
COMPLETIONS = "/v1/completions"
SEND_S = 600.0


@dataclass(frozen=True)
class Shape:
    """Prompt and answer of a request, in tokens; prompts differ from the first word on."""

    in_tokens: int
    out_tokens: int

    def prompt(self, seed: int) -> str:
        return prompt(seed, max(1, int(self.in_tokens * WORDS_PER_TOKEN)))

    def body(self, model: str, seed: int) -> dict[str, Any]:
        """A request to /v1/completions."""
        return {
            "model": model,
            "prompt": self.prompt(seed),
            "max_tokens": self.out_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


async def send_jobs(fleet: Fleet, model: str, shape: Shape, seeds: range) -> None:
    """Appends a job for each seed to the stream `submit`."""
    parameters = {"max_new_tokens": shape.out_tokens, "ignore_eos": True}
    async with connect(fleet.redis_url) as redis:
        for some in in_slices(list(seeds), 500):
            async with redis.pipeline(transaction=False) as pipe:
                for seed in some:
                    job = {"id": f"j{seed}", "inputs": shape.prompt(seed), "parameters": parameters}
                    pipe.xadd(KEYS.submit, {"job": json.dumps(job)})
                await pipe.execute()


async def send_batch(fleet: Fleet, model: str, shape: Shape, seeds: range) -> None:
    """Uploads a file with a line for each seed, and makes a batch of it."""
    content = b"".join(lines(model, shape, seeds))
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=SEND_S) as http:
        sent = await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
        sent.raise_for_status()
        batch = {
            "input_file_id": sent.json()["id"],
            "endpoint": COMPLETIONS,
            "completion_window": "best_effort",
        }
        (await http.post("/v1/batches", json=batch)).raise_for_status()


def lines(model: str, shape: Shape, seeds: range) -> Iterator[bytes]:
    for seed in seeds:
        body = shape.body(model, seed)
        line = {"custom_id": f"line-{seed}", "method": "POST", "url": COMPLETIONS, "body": body}
        yield json.dumps(line).encode() + b"\n"


Send = Callable[[Fleet, str, Shape, range], Awaitable[None]]
WAYS: dict[str, Send] = {"jobs": send_jobs, "batches": send_batch}
