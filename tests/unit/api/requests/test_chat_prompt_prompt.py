"""Prompts of chats with tools, for templates that know them and for others."""

import json
from typing import Any

import pytest

from api.errors import ApiError
from api.prompts.chat_template import ChatTemplate
from api.prompts.control_texts import ControlTexts
from api.requests.chat_prompt import (
    TOOL_PROMPT,
    Chat,
    ChatMessage,
    reasoning_variables,
    render_prompt,
    template_messages,
)
from api.requests.tools import ToolSchema, read_tools

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CHOICE = read_tools([ToolSchema.model_validate(one) for one in TOOLS], None, None)
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Q"},
    {
        "role": "assistant",
        "content": "See:",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": "é"}'}}] * 2,
    },
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "tool", "tool_call_id": "1", "content": "two"},
]
PLAIN = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}", {})
NATIVE = ChatTemplate(
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
    "{{ '\n' }}{% endfor %}",
    {},
)
TEXTS = ChatTemplate(NATIVE.source.replace("c.function.arguments | tojson", "'' + c.function.arguments"), {})


def prompt(template: ChatTemplate, choice: Any = CHOICE, **fields: Any) -> str:
    messages = template_messages([ChatMessage.model_validate(one) for one in MESSAGES])
    return render_prompt(
        Chat(messages=messages, tools=choice, variables={}, **fields), template, ControlTexts()
    ).text


@pytest.mark.parametrize("template", [NATIVE, TEXTS])
def test_a_template_with_tools_gets_them(template: ChatTemplate) -> None:
    tools, *lines = prompt(template).splitlines()
    assert json.loads(tools) == TOOLS
    assert lines == ["[user]Q", '[assistant]See:<f {"x": "é"}><f {"x": "é"}>', "[tool]one", "[tool]two"]
    assert prompt(template, None).splitlines() == lines
    assert prompt(template, tool_prompt="Do.").splitlines()[-2:] == ["---", "Do."], "as TGI adds it"


def test_a_template_without_tools_gets_them_behind_the_last_message() -> None:
    call = '{"name": "f", "parameters": {"x": "é"}}'
    history = ["[user]Q", "[assistant]See:", call, call, "[user]one", "two"]
    *lines, mark, tools, text = prompt(PLAIN).splitlines()
    assert (lines, mark, text) == (history, "---", TOOL_PROMPT)
    assert json.loads(tools) == TOOLS
    assert prompt(PLAIN, None).splitlines() == history
    assert prompt(PLAIN, tool_prompt="Do.").splitlines()[-1] == "Do."


def test_effort_turns_thinking_on_and_off_where_the_template_can() -> None:
    thinks = ChatTemplate("{{ enable_thinking }}{{ reasoning_effort }}", {})
    assert reasoning_variables("none", {}, thinks) == {"enable_thinking": False, "reasoning_effort": "none"}
    assert reasoning_variables("low", {"a": 1}, thinks)["enable_thinking"] is True
    assert reasoning_variables("low", {"enable_thinking": False}, thinks)["enable_thinking"] is False
    assert reasoning_variables(None, {"a": 1}, thinks) == {"a": 1}
    assert reasoning_variables("low", {}, PLAIN) == {}
    with pytest.raises(ApiError, match="`reasoning_effort` must be one of"):
        reasoning_variables("hard", {}, thinks)
