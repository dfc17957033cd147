"""Chats: messages, tools, and grammars of answers, as clients write them and as templates expect them.
Parameters: what fields become, which are refused, and what is left of them.
What a gateway knows of pools and their batchers, and which pools a request tries.
"""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.answers.answer import Reading
from api.errors import ApiError
from api.grammar.compile import COMPILED, Grammar
from api.http.body import parse_body
from api.http.openapi import json_schema
from api.prompts.chat_template import ChatTemplate
from api.prompts.tokenizer import load_sampling_defaults
from api.protocols.chat import (
    TOOL_PROMPT,
    ChatMessage,
    ChatRequest,
    FunctionSchema,
    ToolChoice,
    ToolSchema,
    answer_grammar,
    choose,
    reading_beside,
    reasoning_variables,
    render_prompt,
    template_messages,
)
from api.protocols.kserve import KServeParameters
from api.protocols.table import PROTOCOLS
from api.protocols.tgi import GenerateParameters
from api.requests import monitors
from api.requests.fields import Strict
from api.requests.monitors import SILENT_S, BatcherMonitor
from api.requests.registry import merge, pick_by_depth
from common.broker.directory import TTL_S, KnownPool, PoolEntry
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.settings.settings import SettingError, Settings
from tests.support.machine.clock import Clock
from tests.support.tokenizer import model_tokenizer, tokenizer_with
from tests.unit.api.test_grammar import accepts

# --- chat prompt messages -----------------------------------------------------------------------------------


def converted(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages([ChatMessage.model_validate(one) for one in messages])


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **fields}


def call(arguments: Any, call_id: str | None = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


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


def test_a_message_may_be_reasoning_alone() -> None:
    """As an answer is that was cut within it."""
    assert converted(assistant(reasoning_content="Hm"))[0]["content"] == ""
    with pytest.raises(ApiError, match="content` is required"):
        converted(assistant())


# --- chat prompt prompt -------------------------------------------------------------------------------------

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
SENT_TOOLS = [{"type": "function", "function": FUNCTION}]


def read_tools(tools: list[ToolSchema], choice: Any = None) -> ToolChoice | None:
    return choose([tool.function for tool in tools], choice, "tools", "tool_choice")


CHOICE = read_tools([ToolSchema.model_validate(one) for one in SENT_TOOLS])
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
    body = ChatRequest.model_validate({"messages": messages, **fields})
    return render_prompt(body, choice, False, tokenizer_with(chat_template=template)).text


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


def raises(condition: str) -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"


SAID = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
FIRST = "{# tool_calls #}" + PLAIN.source.replace(
    "[", raises("m.role == 'system' and not loop.first") + "[", 1
)
TURNS = FIRST.replace("[", raises("loop.previtem and loop.previtem.role == m.role") + "[", 1)


@pytest.mark.parametrize(
    ("source", "sent", "expected"),
    [
        (PLAIN.source, "s1 d2 u3 s4 u5", "s1 s2 u3 s4 u5"),
        (FIRST, "s1 d2 u3 s4 u5 u6", "s1+2 u3+4 u5 u6"),
        (FIRST, "s1 u2 a3 t4 s5 d6 a7 s8", "s1 u2 a3 t4+5+6 a7 u8"),
        (TURNS, "s1 u2 u3 s4 u5 a6 s7 u8", "s1 u2+3+4+5 a6 u7+8"),
        (
            "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
            + PLAIN.source.replace("[", raises("(m.role == 'user') != (m in rest[::2])") + "[", 1),
            "s1 u2 s3 a4 u5",
            "s1 u2+3 a4 u5",
        ),
        (raises("messages[0].role == 'system'") + TURNS, "s1 s2 u3 a4", "u1+2+3 a4"),
        (raises("messages[0].role == 'system'") + PLAIN.source, "s1 u2 s3 u4", "u1 u2+3 u4"),
        (
            "[{{ messages[0].role }}]{{ messages[0].content }}{{ '\n' }}{% for m in messages[1:] %}"
            "{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}\n{% endif %}"
            "{% endfor %}{# developer #}",
            "d1 s2 u3 d4 a5",
            "d1+2 u3+4 a5",
        ),
    ],
    ids=[
        "anywhere",
        "first",
        "after results",
        "in turns",
        "by count",
        "never",
        "never, users in a row",
        "drops others",
    ],
)
def test_what_system_and_users_say_is_where_the_template_takes_it(
    source: str, sent: str, expected: str
) -> None:
    """Claude Code says more as the system later in a chat; Codex begins with two messages of the system, and
    two of the user. The next turn's prompt begins as this one.
    """
    messages = [{"role": SAID[one[0]], "content": one[1:]} for one in sent.split()]
    found = [prompt(ChatTemplate(source, {}), None, messages[:end]) for end in (-1, len(messages))]
    shown = re.sub(r"\[(.)\w+\]", r" \1", found[1].replace("\n\n", "+").replace("\n", ""))
    assert shown.split() == expected.split() and found[1].startswith(found[0].rstrip("\n"))


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


# --- tools --------------------------------------------------------------------------------------------------

TOOLS = [ToolSchema.model_validate({"type": "function", "function": {"name": name}}) for name in "abc"]
NAMED = {"type": "function", "function": {"name": "b"}}


def names(choice: ToolChoice | None) -> list[str]:
    assert choice is not None
    return [tool.name for tool in choice.callable]


@pytest.mark.parametrize("choice", ["b", NAMED, {"type": "function", "name": "b"}])
def test_a_named_function_is_the_only_one_that_may_be_called(choice: Any) -> None:
    found = read_tools(TOOLS, choice)
    assert names(found) == ["b"] and found is not None
    assert found.is_forced and found.is_named and len(found.tools) == 3


@pytest.mark.parametrize("is_flat", [False, True])
def test_allowed_tools_are_those_that_may_be_called(is_flat: bool) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "name": "c"}, NAMED]}
    choice = {"type": "allowed_tools", **(allowed if is_flat else {"allowed_tools": allowed})}
    found = read_tools(TOOLS, choice)
    assert names(found) == ["c", "b"] and found is not None and found.is_forced and not found.is_named


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
    found = choose([function], choice, "tools", "tool_choice")
    return found and replace(found, parallel=False)


async def accepted(grammar: Grammar | None, choice: ToolChoice | None, reasoning: str = "") -> set[str]:
    """Those of the texts that are whole answers; all, where nothing is forced."""
    reading = Reading(calls="hermes" if choice else "", reasoning=reasoning)
    texts = {CALL, WRONG_CALL, FITS, TEXT, THOUGHT + CALL, THOUGHT + FITS}
    found = await answer_grammar(grammar, choice, reading, model_tokenizer())
    if found is None:
        return texts
    assert found is not None and found.kind == COMPILED
    return {text for text in texts if accepts(found.text, text)}


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
    assert reading_beside(like_calls, tools(), reading) == Reading()
    for grammar in others:
        found = reading_beside(grammar, tools(), reading)
        assert found == replace(reading, is_either=True)
    for choice in (None, tools("required"), tools("f")):
        assert reading_beside(like_calls, choice, reading) == reading
    assert reading_beside(None, tools(), reading) == reading
    forced = await answer_grammar(like_calls, tools(), Reading(), model_tokenizer())
    assert forced is not None and not accepts(forced.text, CALL)
    assert accepts(forced.text, '{"name": "f", "parameters": {}}')


# --- defaults -----------------------------------------------------------------------------------------------

QWEN = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "do_sample": True,
    "eos_token_id": [1, 2],
    "min_p": None,
}


def write(directory: Path, content: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_values_are_the_model_s_unless_settings_say_otherwise(tmp_path: Path) -> None:
    model, other = write(tmp_path, QWEN), tmp_path / "other"
    other.mkdir()
    of_other = {"repetition_penalty": 1.05, "max_new_tokens": 2048}
    write(other, of_other)
    mode = {"logprobs_mode": "raw_logprobs"}
    of_model = {"temperature": 0.6, "top_k": 20, "top_p": 0.95} | mode
    assert load_sampling_defaults(model, Settings()) == of_model
    assert load_sampling_defaults(model, Settings(generation_config="vllm")) == mode
    elsewhere = Settings(generation_config=str(other))
    assert load_sampling_defaults(model, elsewhere) == of_other | mode
    argv = ["--override-generation-config", '{"temperature": 0, "min_p": 0.1}']
    assert load_sampling_defaults(model, Settings.read(argv, {})) == of_model | {
        "temperature": 0,
        "min_p": 0.1,
    }
    assert load_sampling_defaults(tmp_path / "without", Settings(logprobs_mode="raw_logits")) == {
        "logprobs_mode": "raw_logits"
    }


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        (QWEN | {"top_p": 1.5}, {}, "GENERATION_CONFIG: `top_p`: Input should be less than or equal to 1"),
        (QWEN | {"top_k": "20"}, {}, "`top_k`: Input should be a valid integer"),
        (QWEN, {"generation_config": "/nowhere"}, "/nowhere/generation_config.json does not exist"),
    ],
)
def test_what_cannot_be_a_default_ends_the_start(
    tmp_path: Path, content: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingError, match=words):
        load_sampling_defaults(write(tmp_path, content), Settings(**settings))


# --- validate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [*dict.fromkeys(row.body for row in PROTOCOLS), GenerateParameters, KServeParameters]
)
def test_a_number_is_checked_by_the_range_that_the_document_shows(body: type[Strict]) -> None:
    for name, shown in json_schema(body, "validation")["properties"].items():
        [number, *_] = shown.get("anyOf", [shown])
        least = number.get("minimum", number.get("exclusiveMinimum"))
        assert not {"ge", "gt"} & {*number}  # of numbers that pydantic checks and does not show
        for wrong in ("NaN", least - (1 if "minimum" in number else 0)) if least is not None else ():
            with pytest.raises(ApiError, match=f"`{name}`: Input should be"):
                parse_body(body, f'{{"{name}": {wrong}}}'.encode())


# --- pool choice --------------------------------------------------------------------------------------------


def test_two_pools_are_picked_at_random_and_the_shorter_queue_comes_first() -> None:
    depths = {"a": 0.1, "b": 0.5, "c": 2.0}
    picks = [tuple(pick_by_depth(depths, random.Random(seed))) for seed in range(300)]
    assert {*picks} == {("a", "b"), ("a", "c"), ("b", "c")}
    assert min(Counter(picks).values()) > 60


# --- directory ----------------------------------------------------------------------------------------------

OLD, NEW = PoolEntry("redis://a", num_ready=1), PoolEntry("redis://a", num_ready=2)


def test_a_pool_that_a_new_directory_lacks_is_known_until_it_is_silent_for_too_long() -> None:
    known = merge({"a": KnownPool(OLD, 0.2)}, {}, 0.5)
    assert known == {"a": KnownPool(OLD, 0.7)} and known["a"].is_live
    assert not merge(known, {}, 10)["a"].is_live
    assert merge(known, {}, TTL_S) == {}


# --- monitors -----------------------------------------------------------------------------------------------

HOUR_MS = 3_600_000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(monitors, "time", clock)
    return clock


def new_monitor() -> BatcherMonitor:
    redis: Any = None
    return BatcherMonitor(PoolClient(redis, Keys("default")), Settings())


def test_a_heartbeat_counts_from_its_own_time(clock: Clock) -> None:
    monitor = new_monitor()
    monitor.update("b0-1", 1000.0, 1000.0 + 1000 * SILENT_S - 500)
    assert monitor.active == "b0-1"
    clock.now_s += 1.0
    assert not monitor.works and monitor.describe().startswith("the active batcher b0-1 hangs")


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
def test_a_jump_of_the_broker_s_clock_changes_nothing(clock: Clock, jump_ms: float) -> None:
    monitor = new_monitor()
    monitor.update("b0-1", 2 * HOUR_MS, 2 * HOUR_MS)
    clock.now_s += 1.0
    monitor.update("b0-1", 2 * HOUR_MS + 500, 2 * HOUR_MS + 1000 + jump_ms)
    assert monitor.active == "b0-1"
    clock.now_s += SILENT_S + 1.0
    monitor.update("b0-1", 2 * HOUR_MS + 500, 2 * HOUR_MS + 1000 + jump_ms)
    assert not monitor.works, "a heartbeat that seems to come from the future grows old, too"


def test_between_two_holders_the_last_heartbeat_counts(clock: Clock) -> None:
    monitor = new_monitor()
    monitor.update("b0-1", 1000.0, 1000.0)
    clock.now_s += SILENT_S - 1
    monitor.update("", None, 4000.0)
    assert monitor.works and monitor.active == ""
    monitor.update("b1-1", 4500.0, 4500.0)
    clock.now_s += SILENT_S - 1
    assert monitor.active == "b1-1"
