"""A coding agent's shape of requests over many turns: what is killed in each of them changes no answer, and
prompts find their prefixes in the cache.
"""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.clients.questions import MODEL, WARM_SCHEMA
from tests.support.fleet.fleet import Fleet

anthropic: Any = pytest.importorskip("anthropic")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

KILLED = ("w0", "g0", "b0", "w1", "g1")
PLACES = ("Rome", "Oslo", "Lima", "Bern", "Cairo")
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={:05x};"
RULES = "".join(f"Rule {i}: read a file before you change it, and say what you did.\n" for i in range(60))
Strike = Callable[[int], None]
"""Kills a process in the turn with this number, or nothing."""


@pytest.fixture(scope="module")
def struck_fleet() -> Iterator[Fleet]:
    with Fleet(kv_cache_bytes="128MiB", num_gateways=2, num_batchers=2, num_workers=2) as fleet:
        yield fleet


def talk_as_claude_code(base_url: str, strike: Strike) -> list[Any]:
    """The arguments of each turn's call, by Anthropic's package."""
    tool = {"name": "get_weather", "description": "Weather of a place", "input_schema": WARM_SCHEMA}
    asked = {"model": MODEL, "max_tokens": 60, "tools": [tool], "extra_body": {"temperature": 0}}
    messages: list[Any] = []
    found = []
    with anthropic.Anthropic(base_url=base_url, api_key="none") as client:
        for i, place in enumerate(PLACES):
            messages.append({"role": "user", "content": f"How warm is it in {place}?"})
            system = [
                {"type": "text", "text": BILLING.format(i)},
                {"type": "text", "text": "You are an agent."},
            ]
            choice = {"type": "any", "disable_parallel_tool_use": True}
            with client.messages.stream(
                **asked, system=system, messages=messages, tool_choice=choice
            ) as stream:
                for number, _ in enumerate(stream):
                    if number == 3:
                        strike(i)
                message = stream.get_final_message()
            [call] = message.content
            result = {"type": "tool_result", "tool_use_id": call.id, "content": f"{i} degrees"}
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result]},
            ]
            found.append(call.input)
    return found


def test_what_is_killed_in_each_turn_changes_no_answer(struck_fleet: Fleet) -> None:
    killed: list[str] = []

    def strike(turn: int) -> None:
        name = KILLED[turn]
        pid = struck_fleet.pid(name)
        os.kill(pid, signal.SIGKILL)
        killed.append(name)
        struck_fleet.restarted(name, pid)

    undisturbed = talk_as_claude_code(struck_fleet.base_url, lambda turn: None)
    assert len(undisturbed) == len(PLACES) and all(undisturbed)
    assert talk_as_claude_code(struck_fleet.base_url, strike) == undisturbed
    assert killed == [*KILLED]


def test_twenty_turns_find_their_prefixes(fleet: Fleet) -> None:
    """Of the tokens that a prompt has in common with the one before it, at least 95% are cached, although
    Claude Code's line in the system prompt changes with each turn, and the model's template has no tools.
    """
    names = ("read", "write", "find")
    tools = [{"name": one, "description": f"To {one} a file", "input_schema": WARM_SCHEMA} for one in names]
    messages: list[Any] = []
    hits, previous = [], 0
    with anthropic.Anthropic(base_url=fleet.base_url, api_key="none") as client:
        for i in range(20):
            messages.append({"role": "user", "content": f"Read the file number {i} and say what is in it."})
            system = [{"type": "text", "text": BILLING.format(i)}, {"type": "text", "text": RULES}]
            own = {
                "model": MODEL,
                "max_tokens": 8,
                "tools": tools,
                "extra_body": {"temperature": 0, "ignore_eos": True},
            }
            message = client.messages.create(**own, system=system, messages=messages)
            usage = message.usage
            if previous:
                hits.append((usage.cache_read_input_tokens, previous))
            previous = usage.cache_read_input_tokens + usage.input_tokens
            messages.append({"role": "assistant", "content": message.content})
    cached, shared = (sum(column) for column in zip(*hits, strict=True))
    print(f"{cached} of {shared} tokens of prefixes were cached: {cached / shared:.3f}")
    assert len(hits) == 19 and cached >= 0.95 * shared
