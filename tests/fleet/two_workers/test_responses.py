"""The Responses API through OpenAI's own package, with the real model, also while processes are killed."""

import asyncio
import contextlib
import os
import signal
from typing import Any

import openai
import pydantic
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from tests.support.answers import event_type
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until

ASKED: dict[str, Any] = {"model": "smollm2", "input": "Name three colours.", "temperature": 0}
SHORT = ASKED | {"max_output_tokens": 12}
LONG = ASKED | {"max_output_tokens": 80, "extra_body": {"ignore_eos": True}}


class Colour(pydantic.BaseModel):
    name: str
    red: int


async def test_create_stream_parse_and_conversations(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**SHORT, instructions="Be brief.", metadata={"a": "b"})
    assert whole.output_text and whole.status == "incomplete" and whole.metadata == {"a": "b"}
    events = [
        event async for event in await client.responses.create(**SHORT, instructions="Be brief.", stream=True)
    ]
    for event in events:
        event_type().validate_python(event.to_dict())
    async with client.responses.stream(**SHORT, instructions="Be brief.") as stream:
        kinds = [event.type async for event in stream]
    assert kinds == [event.type for event in events] and kinds[-1] == "response.incomplete"
    texts = [event.text for event in events if event.type == "response.output_text.done"]
    assert texts == [whole.output_text]
    parsed = await client.responses.parse(
        model="smollm2", input="A colour, please.", temperature=0, max_output_tokens=200, text_format=Colour
    )
    assert isinstance(parsed.output_parsed, Colour) or parsed.status == "incomplete"
    second = await client.responses.create(**SHORT, previous_response_id=whole.id)
    items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item.type for item in items] == ["message"] * 3
    assert await client.responses.retrieve(second.id) == second
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**SHORT, previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


async def has_ended(client: AsyncOpenAI, response_id: str) -> Response:
    """Return the response once it has ended, even if its gateways die meanwhile."""
    found: list[Response] = []

    async def ended() -> bool:
        with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
            found.append(await client.responses.retrieve(response_id))
        return bool(found) and found[-1].status not in ("queued", "in_progress")

    await wait_until(ended)
    return found[-1]


async def follow(client: AsyncOpenAI, response_id: str, events: list[Any]) -> None:
    """Add the following events, and connect again whenever the connection is lost."""

    async def followed() -> bool:
        with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError, openai.APIError):
            after = events[-1].sequence_number
            stream = await client.responses.retrieve(response_id, stream=True, starting_after=after)
            async for event in stream:
                events.append(event)  # noqa: PERF401  # those before a lost connection count
        return bool(events[-1].type in ("response.completed", "response.incomplete", "response.failed"))

    await wait_until(followed)


def num_tokens(response: Any) -> tuple[int, int]:
    """Usage without cached tokens, whose number depends on the worker."""
    return response.usage.input_tokens, response.usage.output_tokens


@pytest.mark.slow
async def test_a_background_response_outlives_every_process(client: AsyncOpenAI, fleet: Fleet) -> None:
    """Followed event by event or read at its end, it equals that of an undisturbed fleet."""
    undisturbed = await client.responses.create(**LONG)
    silent = await client.responses.create(**LONG, background=True)
    stream = await client.responses.create(**LONG, background=True, stream=True)
    events: list[Any] = []
    async for event in stream:
        events.append(event)
        if len(events) > 8:
            break
    await stream.close()
    pids = await asyncio.to_thread(fleet.pids)
    for name in ("g0", "g1", "w0", "w1", "b0"):
        os.kill(pids[name], signal.SIGKILL)
    response_id = events[0].response.id
    await follow(client, response_id, events)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == undisturbed.output_text == events[-1].response.output_text
    for one in (response_id, silent.id):
        found = await has_ended(client, one)
        assert (found.output_text, found.status) == (undisturbed.output_text, "incomplete")
        assert num_tokens(found) == num_tokens(undisturbed)
