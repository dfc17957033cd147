"""Messages as clients write them, and as templates expect them."""

import json
from typing import Any

import pytest

from api.errors import ApiError
from api.requests.chat_prompt import ChatMessage, template_messages


def converted(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages([ChatMessage.model_validate(one) for one in messages])


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **fields}


def call(arguments: Any, call_id: str | None = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_arguments_are_objects() -> None:
    for given, expected in (
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ('{"a": ', '{"a": '),  # a model wrote it, and its client sends it back
    ):
        [message] = converted(assistant(tool_calls=[call(given)]))
        assert message["tool_calls"] == [call(expected)]
        assert message["content"] == ""


def test_results_belong_to_their_calls() -> None:
    newer = converted(
        assistant(tool_calls=[call("{}", "call_7")]),
        {"role": "tool", "tool_call_id": "call_7", "content": "1"},
    )
    assert newer[1] == {"role": "tool", "content": "1", "tool_call_id": "call_7"}
    function = {"name": "f", "arguments": "{}"}
    older = converted(
        {"role": "user", "content": "?"},
        assistant(function_call=function),
        {"role": "function", "name": "f", "content": "1"},
        assistant(function_call=function),
        {"role": "function", "name": "f", "content": "2"},
    )
    ids = [one["tool_calls"][0]["id"] if "tool_calls" in one else one["tool_call_id"] for one in older[1:]]
    assert ids == ["call00001", "call00001", "call00002", "call00002"]
    assert [one["role"] for one in older] == ["user", "assistant", "tool", "assistant", "tool"]


def test_reasoning_has_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        [message] = converted({"role": "assistant", "content": "a", name: "why"})
        assert (message["reasoning"], message["reasoning_content"]) == ("why", "why")


def content(**message: Any) -> Any:
    [made] = template_messages([ChatMessage.model_validate_json(json.dumps(message))])
    return made["content"]


def test_a_refusal_of_the_assistant_is_content() -> None:
    part = {"type": "refusal", "refusal": "I can't."}
    assert content(role="assistant", content=[part]) == "I can't."
    assert content(role="assistant", content=[{"type": "text", "text": "No: "}, part]) == "No: I can't."
    assert content(role="assistant", content=None, refusal="I can't.") == "I can't."
    assert content(role="assistant", content="Yes.", refusal=None) == "Yes."


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "is of type 'refusal'"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "content[0].refusal` is required"),
        ({"role": "assistant", "content": [{"type": "text"}]}, "content[0].text` is required"),
        ({"role": "assistant", "content": None}, "content` is required"),
        ({"role": "user", "content": None, "refusal": "x"}, "content` is required"),
    ],
)
def test_others_are_refused_by_name(message: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as refused:
        content(**message)
    assert words in refused.value.text
