"""Beam searches through Redis, on every route and as jobs: their sequences are transformers'."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from common.broker.committed import read
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.records import BeamSequence, pack_ids, unpack_sequences
from common.messages.request import BeamParams, Generate, StoppingParams
from tests.support.broker_state import admit
from tests.support.engine.reference import Found, prompt_ids, reference_beams
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.http_calls import PROMPT, post
from tests.support.prompts import PROMPTS
from tests.support.waiting import wait_until

KEYS = Keys("default")
NEW_TOKENS = 17
WIDTH = 4
BEAMS = {"beam_width": WIDTH}
NUM_SHOWN = 12
CHAT = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": NUM_SHOWN}


async def sequences_of(redis: Redis, request_id: str) -> list[BeamSequence]:
    """Wait for the end of a beam search → its sequences."""
    await wait_until(lambda: redis.hexists(KEYS.request(request_id), "terminal"))
    state = (await read(PoolClient(redis, KEYS), [request_id]))[request_id]
    assert not state.error and state.num_tokens == state.num_final, state
    return unpack_sequences(state.records)


def beam_request(name: str, prompt: list[int], num_tokens: int, width: int = WIDTH) -> Generate:
    return Generate(name, "d", pack_ids(prompt), StoppingParams(num_tokens), beams=BeamParams(width))


def check_found(found: list[BeamSequence], expected: list[Found]) -> None:
    assert [sequence.ids for sequence in found] == [ids for ids, _ in expected]
    assert [sequence.score for sequence in found] == pytest.approx([score for _, score in expected], abs=1e-3)


async def test_sequences_are_those_of_transformers(fleet: Fleet, redis: Redis) -> None:
    [prompt] = prompt_ids(PROMPTS[20:21])
    await admit(redis, beam_request("beams", prompt, NEW_TOKENS))
    found = await sequences_of(redis, "beams")
    check_found(found, *reference_beams([prompt], NEW_TOKENS, num_beams=WIDTH))


def expected(ids: Sequence[int]) -> list[Any]:
    return close(reference_beams([ids], NUM_SHOWN, num_beams=WIDTH)[0])


def close(found: list[Found]) -> list[Any]:
    """Equal to these ids, and to scores that differ in their last digits."""
    return [(ids, pytest.approx(score, abs=1e-3)) for ids, score in found]


def of_choices(choices: list[dict[str, Any]]) -> list[Found]:
    return [(choice["token_ids"], choice["beam_score"]) for choice in choices]


def of_details(details: dict[str, Any]) -> list[Found]:
    sequences = [details, *details["best_of_sequences"]]
    return [([token["id"] for token in one["tokens"]], one["beam_score"]) for one in sequences]


async def test_ids_and_scores_equal_transformers_on_every_route(
    http: httpx.AsyncClient, redis: Redis
) -> None:
    found = expected(prompt_ids([PROMPT])[0])
    completion = {"prompt": PROMPT, "max_tokens": NUM_SHOWN, "return_token_ids": True} | BEAMS
    assert of_choices((await post(http, "/v1/completions", completion))["choices"]) == found
    chat = await post(http, "/v1/chat/completions", CHAT | BEAMS | {"return_token_ids": True})
    assert of_choices(chat["choices"]) == expected(chat["prompt_token_ids"])
    generate = {"inputs": PROMPT, "parameters": BEAMS | {"max_new_tokens": NUM_SHOWN, "details": True}}
    assert of_details((await post(http, "/generate", generate))["details"]) == found
    await redis.xadd(KEYS.submit, {"job": json.dumps({"id": "beams", **generate})})
    result = json.loads(await wait_until(lambda: redis.get(KEYS.result("beams"))))
    assert of_details(result["details"]) == found
