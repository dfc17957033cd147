"""Many models on one worker (MODELS): they are served in turns, whatever is killed."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from deploy.launcher.embedded_broker import Broker
from tests.support.chaos.engine import WAKE_MS
from tests.support.chaos.launcher import ChaosFleet
from tests.support.engine import tiny_models
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until_sync

PROMPT = [5, 17, 42, 99, 7]
NUM_NEW = 24
NAMES = ("a", "b", "c")
VOCAB = {"vocab_size": 49_152}
"""Ids of the bundled tokenizer."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int]]]:
    """Name → folder of a tiny model, and the ids that it continues PROMPT with."""
    found = {}
    for name, family in zip(NAMES, ("Llama", "Qwen2", "Mistral"), strict=True):
        config_name, sizes = tiny_models.FAMILIES[family]
        folder = tmp_path_factory.mktemp(name)
        tiny_models.save_with_tokenizer(folder, config_name, sizes | VOCAB)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found[name] = folder, tiny_models.generate(model, PROMPT, NUM_NEW)
    return found


@pytest.fixture(scope="module")
def fleet(expected: dict[str, tuple[Path, list[int]]]) -> Iterator[Fleet]:
    models = ",".join(f"{name}={folder}" for name, (folder, _) in expected.items())
    with Fleet(models=models, dtype="float32", kv_cache_bytes="16MiB", model_id=None) as fleet:
        yield fleet


def ask(fleet: Fleet, name: str, num_new: int = NUM_NEW) -> list[int]:
    body: dict[str, Any] = {"model": name, "prompt": PROMPT, "max_tokens": num_new, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{fleet.base_url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


@pytest.fixture
def swapping(broker: Broker) -> Iterator[ChaosFleet]:
    """A fleet of one worker without models, which takes half a second to wake one."""
    with chaos_fleet(broker) as fleet:
        yield fleet


def chaos_fleet(broker: Broker) -> ChaosFleet:
    return ChaosFleet(
        step_ms=2,
        redis_url=broker.url,
        models=",".join(f"{name}=smollm2" for name in NAMES),
        **{WAKE_MS: 500},
    )


def num_swaps(fleet: Fleet) -> int:
    return fleet.errors().count(" is next (")


def strike(fleet: Fleet, victim: str, delay_s: float, swaps_before: int) -> None:
    """Kill the worker or its engines, a moment after a swap has begun."""
    wait_until_sync(lambda: num_swaps(fleet) > swaps_before, 60)
    time.sleep(delay_s)
    pids = [one.pid for one in fleet.engines("w0")] if victim == "engine" else [fleet.pid("w0")]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "agent"])
def test_a_kill_within_a_swap_loses_nothing(swapping: ChaosFleet, victim: str) -> None:
    """While the old model still has rows, while its engine goes to sleep, while the new one wakes."""
    expected = ask(swapping, "a", 200)
    for delay_s in (0.0, 0.2, 1.2):
        swaps_before = num_swaps(swapping)
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(ask, swapping, name, 200) for name in (*NAMES, *NAMES)]
            strike(swapping, victim, delay_s, swaps_before)
        assert [answer.result() for answer in answers] == 6 * [expected]


@pytest.mark.slow
def test_an_engine_that_is_killed_while_it_sleeps_is_started_anew_beside_the_others(
    swapping: ChaosFleet,
) -> None:
    expected = ask(swapping, "a")
    ask(swapping, "b")
    agent, [asleep, _] = swapping.pid("w0"), swapping.engines("w0")
    asleep.kill()
    assert ask(swapping, "a") == expected
    assert swapping.pid("w0") == agent and asleep.pid not in [one.pid for one in swapping.engines("w0")]


@pytest.mark.slow
def test_requests_wait_for_a_sleeping_model_while_the_whole_fleet_is_killed(broker: Broker) -> None:
    """They are in Redis: the next fleet answers them, and the client finds its stream there."""
    body = {"model": "b", "prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, "stream": True}
    with chaos_fleet(broker) as fleet:
        url = f"{fleet.base_url}/v1/completions"
        with httpx.stream("POST", url, json=body | {"resume_s": 120}, timeout=60) as answer:
            assert answer.status_code == 200
            path = answer.headers["content-location"]
            wait_until_sync(lambda: num_swaps(fleet) > 0, 60)
            fleet.kill()
    with chaos_fleet(broker) as fleet:
        frames = httpx.get(fleet.base_url + path, timeout=120).text
        assert frames.count('"text"') >= 50 and '"finish_reason":"length"' in frames
        assert frames.rstrip().endswith("data: [DONE]")


@pytest.mark.slow
def test_one_worker_answers_requests_for_all_models_in_turns(
    fleet: Fleet, expected: dict[str, tuple[Path, list[int]]]
) -> None:
    """None is refused while its model sleeps, and each answer is its own model's."""
    names = [*NAMES, *reversed(NAMES), *NAMES]
    assert [ask(fleet, name) for name in names] == [expected[name][1] for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask(fleet, name), names))
    assert answers == [expected[name][1] for name in names]
