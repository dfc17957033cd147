"""Chats: messages, tools, and grammars of answers, as clients write them and as templates expect them."""

import json
from dataclasses import replace
from typing import Any

import llguidance
import pytest

from api.answers.answer import Reading
from api.errors import ApiError
from api.grammar.check import byte_tokenizer
from api.grammar.compile import CompiledGrammar, Grammar
from api.prompts.chat_template import ChatTemplate, ControlTexts
from api.requests.chat_prompt import (
    TOOL_PROMPT,
    ChatMessage,
    FunctionSchema,
    ToolChoice,
    ToolSchema,
    answer_grammar,
    read_tools,
    reading_beside,
    reasoning_variables,
    render_prompt,
    template_messages,
)
from tests.support.tokenizer import model_tokenizer

# --- chat prompt messages -----------------------------------------------------------------------------------


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


# --- chat prompt prompt -------------------------------------------------------------------------------------

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
SENT_TOOLS = [{"type": "function", "function": FUNCTION}]
CHOICE = read_tools([ToolSchema.model_validate(one) for one in SENT_TOOLS], None, None)
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


def prompt(template: ChatTemplate, choice: Any = CHOICE, messages: Any = MESSAGES, **fields: Any) -> str:
    messages = template_messages([ChatMessage.model_validate(one) for one in messages])
    return render_prompt(messages, template, ControlTexts(), tools=choice, variables={}, **fields).text


@pytest.mark.parametrize("template", [NATIVE, TEXTS])
def test_a_template_with_tools_gets_them(template: ChatTemplate) -> None:
    tools, *lines = prompt(template).splitlines()
    assert json.loads(tools) == SENT_TOOLS
    assert lines == ["[user]Q", '[assistant]See:<f {"x": "é"}><f {"x": "é"}>', "[tool]one", "[tool]two"]
    assert prompt(template, None).splitlines() == lines
    assert prompt(template, tool_prompt="Do.").splitlines()[-2:] == ["---", "Do."], "as TGI adds it"


@pytest.mark.parametrize(
    ("source", "sent", "first"),
    [
        (PLAIN.source, [], "system"),
        (PLAIN.source, [{"role": "system", "content": "Be brief."}], "system"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN.source,
            [],
            "user",
        ),
    ],
)
def test_a_template_without_tools_gets_them_at_the_beginning_so_the_next_turn_finds_the_prompt(
    source: str, sent: list[Any], first: str
) -> None:
    template, call = ChatTemplate(source, {}), '{"name": "f", "parameters": {"x": "é"}}'
    turns = [prompt(template, messages=[*sent, *MESSAGES[:end]]) for end in (1, 4)]
    tools, tool_prompt, *lines = turns[1].removeprefix(f"[{first}]").splitlines()
    assert json.loads(tools) == SENT_TOOLS and tool_prompt == TOOL_PROMPT
    own = ["---", "Be brief.", "[user]Q"] if sent else ["[user]Q"] if first == "system" else ["---", "Q"]
    assert lines == [*own, "[assistant]See:", call, call, "[user]one", "two"]
    assert turns[1].startswith(turns[0])


def test_tgis_tool_prompt_has_the_tools_where_tgi_puts_them() -> None:
    call = '{"name": "f", "parameters": {"x": "é"}}'
    history = ["[user]Q", "[assistant]See:", call, call, "[user]one", "two"]
    *lines, mark, tools, text = prompt(PLAIN, tool_prompt="Do.").splitlines()
    assert (lines, mark, text) == (history, "---", "Do.")
    assert json.loads(tools) == SENT_TOOLS
    assert prompt(PLAIN, None, tool_prompt="Do.").splitlines() == history


def test_effort_turns_thinking_on_and_off_where_the_template_can() -> None:
    thinks = ChatTemplate("{{ enable_thinking }}{{ reasoning_effort }}", {})
    assert reasoning_variables("none", {}, thinks) == {"enable_thinking": False, "reasoning_effort": "none"}
    assert reasoning_variables("low", {"a": 1}, thinks)["enable_thinking"] is True
    assert reasoning_variables("low", {"enable_thinking": False}, thinks)["enable_thinking"] is False
    assert reasoning_variables(None, {"a": 1}, thinks) == {"a": 1}
    assert reasoning_variables("low", {}, PLAIN) == {}
    with pytest.raises(ApiError, match="`reasoning_effort` must be one of"):
        reasoning_variables("hard", {}, thinks)


# --- tools --------------------------------------------------------------------------------------------------

TOOLS = [ToolSchema.model_validate({"type": "function", "function": {"name": name}}) for name in "abc"]
NAMED = {"type": "function", "function": {"name": "b"}}


def names(choice: ToolChoice | None) -> list[str]:
    assert choice is not None
    return [tool.name for tool in choice.callable]


@pytest.mark.parametrize("choice", ["b", NAMED, {"type": "function", "name": "b"}])
def test_a_named_function_is_the_only_one_that_may_be_called(choice: Any) -> None:
    found = read_tools(TOOLS, choice, None)
    assert names(found) == ["b"] and found is not None
    assert found.is_forced and found.is_named and len(found.tools) == 3


@pytest.mark.parametrize("is_flat", [False, True])
def test_allowed_tools_are_those_that_may_be_called(is_flat: bool) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "name": "c"}, NAMED]}
    choice = {"type": "allowed_tools", **(allowed if is_flat else {"allowed_tools": allowed})}
    found = read_tools(TOOLS, choice, None)
    assert names(found) == ["c", "b"] and found is not None and found.is_forced and not found.is_named


@pytest.mark.parametrize(
    ("allowed", "field"),
    [
        ({"mode": "some", "tools": [NAMED]}, "tool_choice.allowed_tools.mode"),
        ({"mode": "auto", "tools": [{"type": "function", "name": "z"}]}, "tool_choice.allowed_tools.tools"),
        ({"mode": "auto", "tools": [3]}, "tool_choice.allowed_tools.tools[0]"),
    ],
)
def test_wrong_allowed_tools_are_refused(allowed: Any, field: str) -> None:
    with pytest.raises(ApiError) as refusal:
        read_tools(TOOLS, {"type": "allowed_tools", "allowed_tools": allowed}, None)
    assert refusal.value.param == field and f"`{field}`" in refusal.value.text


@pytest.mark.parametrize("kind", ["array", "string", ["array", "null"], 3])
def test_parameters_that_are_no_object_are_refused(kind: Any) -> None:
    function = {"name": "a", "parameters": {"type": kind}}
    with pytest.raises(ApiError, match="must be the JSON schema of an object") as refusal:
        read_tools([ToolSchema.model_validate({"type": "function", "function": function})], None, None)
    assert refusal.value.param == "tools.a.parameters"


# --- answer grammar -----------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FORMAT = Grammar("json", '{"type": "array", "items": {"type": "boolean"}}', "response_format")
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
WRONG_CALL = CALL.replace("1", '"a"')
FITS = "[true, false]"
THOUGHT = "<think>\nHm. [maybe]\n</think>\n\n"
TEXT = "Hello."


def tools(choice: str = "auto", strict: bool = False) -> ToolChoice | None:
    function = FunctionSchema(name="f", parameters=SCHEMA, strict=strict)
    return read_tools([ToolSchema(type="function", function=function)], choice, False)


async def accepted(grammar: Grammar | None, choice: ToolChoice | None, reasoning: str = "") -> set[str]:
    """Those of the texts that are whole answers; all, where nothing is forced."""
    reading = Reading(calls="hermes" if choice else "", reasoning=reasoning)
    texts = {CALL, WRONG_CALL, FITS, TEXT, THOUGHT + CALL, THOUGHT + FITS}
    found = await answer_grammar(grammar, choice, reading, model_tokenizer())
    if found is None:
        return texts
    assert isinstance(found, CompiledGrammar)
    return {text for text in texts if matches(found.source, text)}


def matches(source: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(byte_tokenizer(), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize("grammar", [None, FORMAT])
async def test_required_calls_are_all_there_is(grammar: Grammar | None) -> None:
    assert await accepted(grammar, tools("required")) == {CALL}
    assert await accepted(grammar, tools("f"), "qwen3") == {CALL, THOUGHT + CALL}


async def test_text_that_calls_nothing_has_the_response_format() -> None:
    assert await accepted(FORMAT, tools()) == {CALL, FITS}
    assert await accepted(FORMAT, tools(), "qwen3") == {CALL, FITS, THOUGHT + CALL, THOUGHT + FITS}
    assert await accepted(FORMAT, None, "qwen3") == {FITS, THOUGHT + FITS}


def of_object(**properties: str) -> Grammar:
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in properties.items()}}
    return Grammar("json", json.dumps(schema), "response_format")


@pytest.mark.parametrize("form", ["llama3_json", "tgi"])
async def test_an_object_with_the_properties_of_a_call_is_none(form: str) -> None:
    """A client that asks for just such an object does not mean a call; one that takes any object may."""
    reading = Reading(calls=form)
    like_calls = of_object(name="string", parameters="object", function="object")
    others = [of_object(name="string", age="integer"), Grammar("json", "{}", "f"), FORMAT]
    assert await reading_beside(like_calls, tools(), reading) == Reading()
    for grammar in others:
        found = await reading_beside(grammar, tools(), reading)
        assert found == replace(reading, is_either=True)
    for choice in (None, tools("required"), tools("f")):
        assert await reading_beside(like_calls, choice, reading) == reading
    assert await reading_beside(None, tools(), reading) == reading
    forced = await answer_grammar(like_calls, tools(), Reading(), model_tokenizer())
    assert isinstance(forced, CompiledGrammar) and not matches(forced.source, CALL)
    assert matches(forced.source, '{"name": "f", "parameters": {}}')
