"""Beam searches through Redis: their sequences are transformers', also when the worker dies in between."""

import os
import signal
from typing import Any

import pytest
from redis.asyncio import Redis

from common.broker.committed import read
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.beams import BeamSequence, unpack_sequences
from common.messages.codec import decode
from common.messages.plan import Report
from common.messages.records import pack_ids
from common.messages.request import BeamParams, Generate, StoppingParams
from tests.support.broker_state import admit
from tests.support.engine.reference import Found, prompt_ids, reference_beams
from tests.support.fleet.fleet import Fleet
from tests.support.prompts import PROMPTS
from tests.support.waiting import wait_until

KEYS = Keys("default")
NEW_TOKENS = 17
WIDTH = 4


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


async def test_a_search_whose_worker_dies_finds_the_same(fleet: Fleet, redis: Redis) -> None:
    """Nothing of it is published before its end, so nothing is published twice."""
    [prompt] = prompt_ids(PROMPTS[20:21])
    num_tokens = 60
    await admit(redis, beam_request("undisturbed", prompt, num_tokens))
    undisturbed = await sequences_of(redis, "undisturbed")
    workers = [name.decode() for name in await redis.zrange(KEYS.workers, 0, -1)]
    seen: dict[Any, Any] = {KEYS.reports(worker): "0" for worker in workers}
    await new_reports(redis, seen)
    await admit(redis, beam_request("killed", prompt, num_tokens))
    while not any(report.prefilled for report in await new_reports(redis, seen)):
        pass
    worker = await redis.hget(KEYS.request("killed"), "worker")  # type: ignore[misc]
    os.kill(fleet.pid(worker.decode().split("-")[0]), signal.SIGKILL)
    assert await sequences_of(redis, "killed") == undisturbed
    assert await redis.hget(KEYS.request("killed"), "attempt") == b"2"  # type: ignore[misc]


async def new_reports(redis: Redis, seen: dict[Any, Any]) -> list[Report]:
    """Reports of workers, by the names of their streams, since those that were seen."""
    reports = []
    for name, entries in await redis.xread(seen, block=100):
        reports += [decode(Report, fields[b"report"]) for _, fields in entries]
        seen[name.decode()] = entries[-1][0]
    return reports
