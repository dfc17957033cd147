"""anthropic: messages whole and streamed, tools in a loop, counted tokens, and refusals as its exceptions."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.clients.questions import MODEL, QUESTION, TOO_LONG, WARM, WARM_SCHEMA, user
from tests.support.fleet.fleet import Fleet

anthropic: Any = pytest.importorskip("anthropic")
pytestmark = pytest.mark.slow
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
TOOL = {"name": "get_weather", "description": "Weather of a place", "input_schema": WARM_SCHEMA}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=fleet.base_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_is_the_same_streamed_and_whole(client: Any) -> None:
    whole = client.messages.create(**ASKED, messages=user(QUESTION), system="Be brief.")
    with client.messages.stream(**ASKED, messages=user(QUESTION), system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert whole.stop_reason == final.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    total = final.usage.input_tokens + final.usage.cache_read_input_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=user(QUESTION), system="Be brief.")
    assert final.usage.cache_read_input_tokens > 0 and counted.input_tokens == total
    assert whole._request_id and whole.id == f"msg_{whole._request_id}"


def test_a_call_of_a_tool_and_its_result(client: Any) -> None:
    first = client.messages.create(**ASKED, **FORCED, messages=user(WARM))
    with client.messages.stream(**ASKED, **FORCED, messages=user(WARM)) as stream:
        streamed = stream.get_final_message()
    [call] = first.content
    assert (first.stop_reason, call.name) == ("tool_use", "get_weather") and set(call.input) == {"place"}
    assert streamed.content[0].input == call.input and streamed.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "31 degrees"}
    turns = [
        *user(WARM),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(**ASKED, messages=turns, tools=[TOOL], tool_choice={"type": "none"})
    assert last.content[0].text and last.stop_reason in ("end_turn", "max_tokens")


def test_its_tool_runner_comes_to_an_end(client: Any) -> None:
    """Whether the model calls the tool is its own affair."""

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get_weather(place: str) -> str:
        """Weather of a place."""
        return f"31 degrees in {place}"

    runner = client.beta.messages.tool_runner(
        **ASKED, messages=user(WARM), tools=[get_weather], max_iterations=3
    )
    assert runner.until_done().role == "assistant"


def test_refusals_are_its_exceptions(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        client.messages.create(**ASKED, messages=user(TOO_LONG))
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**ASKED, messages=user(QUESTION), stop_sequences=[""])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**(ASKED | {"model": "other"}), messages=user(QUESTION))


async def test_its_asynchronous_client(fleet: Fleet) -> None:
    async with anthropic.AsyncAnthropic(base_url=fleet.base_url, auth_token="none") as client:
        events = [
            one async for one in await client.messages.create(**ASKED, messages=user("Hi"), stream=True)
        ]
    assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]
