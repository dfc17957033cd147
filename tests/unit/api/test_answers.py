"""Formats are found from a model's chat template and its vocabulary. Reasoning is apart from content.
Calls in every format are read as they come, and the same for every cut of the text.
Answers as content, reasoning and calls: whatever a model writes is read, and no text is lost.
What of an answer's text is shown, and when.
Chunks of OpenAI's routes: those that differ in their text alone are rendered from one frame.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.answers.answer import HttpAnswer, Rendering
from api.answers.answer import Reading as Terms
from api.answers.call_formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    find_call_format,
    find_reasoning_format,
)
from api.answers.chat_answer import ChoiceParser, render_message
from api.answers.logprobs import token_bytes
from api.answers.scanner import ContentDelta
from api.protocols.choices import Choice
from api.protocols.openai import PLACE_OF_TEXT, ChatCompletionRenderer, CompletionRenderer
from api.requests.pool import named_format
from api.streams.stream import Stream
from common.detokenize import StopMatcher
from common.messages.events import Terminal, Tokens
from common.messages.records import pack_floats, pack_ids
from common.messages.request import Generate, StoppingParams
from common.settings.settings import SettingError
from tests.support.events import new_stream
from tests.support.tokenizer import IM_END, TOKENIZER, ids, model_tokenizer
from tests.support.tool_calls import SCHEMA, TOOLS, Answer, Reading, check

THINK = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>{% endif %}"
DEEPSEEK = "{{ '<｜tool▁call▁begin｜>' + call.%s + '<｜tool▁sep｜>' + call.%s }}"
CALLS = {
    "hermes": "{{ tools }} <tool_call>\n{{ call | tojson }}\n</tool_call>" + THINK,
    "qwen3_coder": "{{ tools }} <tool_call>\n<function={{ call.name }}>\n<parameter={{ key }}>\n",
    "seed_oss": "{{ tools }} <seed:tool_call>\n<function={{ call.name }}>\n<parameter={{ key }}>",
    "glm45": "{{ tools }} <tool_call>{{ call.name }}\n<arg_key>{{ key }}</arg_key>" + THINK,
    "mistral": "{{ tools }} [TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}",
    "deepseek_v3": "{{ tools }}" + DEEPSEEK % ("type", "name") + "```json",
    "deepseek_v31": "{{ tools }}" + DEEPSEEK % ("name", "arguments"),
    "kimi_k2": "{{ tools }} <|tool_call_begin|>functions.{{ name }}:0<|tool_call_argument_begin|>",
    "openai": "{{ tools }} <|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>",
    "llama3_json": '{{ tools }} Environment: ipython {"name": function name, "parameters": {}}',
    "pythonic": "{{ tools }} [func_name1(name1=value1, name2=value2...), func_name2(params)]",
    "llama4_pythonic": "{{ tools }} <|header_start|> [func_name1(param1=value1), func_name2(...)]",
    "granite": "{{ tools }} <|tool_call|>",
    "nemotron_json": "{{ tools }} <TOOLCALL>[]</TOOLCALL>",
    "phi4_mini_json": "{{ tools }} functools[]",
    "jamba": "{{ tools }} <tool_calls>[]</tool_calls>",
    "lfm2": "{{ tools }} <|tool_call_start|>[]<|tool_call_end|>",
}
REASONING = {
    "qwen3": THINK,
    "glm45": CALLS["glm45"],
    "deepseek_r1": "{{ '<｜Assistant｜>' + content.split('</think>')[-1] }}",
    "deepseek_v3": "<｜Assistant｜>{% if thinking %}<think>{% else %}</think>{% endif %}",
    "mistral": "[THINK]{{ thinking }}[/THINK]",
    "seed_oss": "<seed:think>",
}
NO_TOKENS: dict[str, int] = {}


@pytest.mark.parametrize("name", [name for name, form in CALL_FORMATS.items() if form.signs])
def test_a_template_shows_how_calls_are_written(name: str) -> None:
    found = find_call_format(CALLS[name], NO_TOKENS.get)
    assert found is not None and found.name == name


def test_the_vocabulary_shows_it_where_the_template_does_not() -> None:
    found = find_call_format("{{ tools }}", {"[TOOL_CALLS]": 9}.get)
    assert found is not None and found.name == "mistral"
    assert find_call_format("{{ tools }}", {"a": 0}.get) is None


@pytest.mark.parametrize("name", REASONING)
def test_a_template_shows_how_a_model_thinks(name: str) -> None:
    found = find_reasoning_format(REASONING[name])
    assert found is not None and found.name == name


def test_a_template_that_thinks_otherwise_or_not_at_all() -> None:
    assert find_reasoning_format("{{ messages }}") is None
    assert find_reasoning_format("<think></think> <response></response>") is None
    assert find_reasoning_format(CALLS["openai"] + "<think>") is None


# --- reasoning ----------------------------------------------------------------------------------------------

THINKING = REASONING_FORMATS["qwen3"]
R1 = REASONING_FORMATS["deepseek_r1"]
SO = Answer("It", "So")
THOUGHT: list[tuple[Reading, Mapping[str, Answer]]] = [
    (
        Reading(reasoning=THINKING),
        {
            "<think>\nSo </thin. \n</think>\n\n It rains.\n": Answer("It rains.\n", "So </thin."),
            "<think></think>It": Answer("It"),
            "<think>\nSo": Answer("", "So"),
            " It rains. <think>So</think>": Answer(" It rains. <think>So</think>"),
            "<thin": Answer("<thin"),
        },
    ),
    *(
        (Reading(reasoning=THINKING, prompt=prompt), {"\nSo\n</think>\nIt": SO, "So": Answer("", "So")})
        for prompt in ("<think>\n", "</think> a <think>", "a <think> b </think><|assistant|><think>\n\n")
    ),
    (Reading(reasoning=R1), {"So</think>It": SO, "<think>So</think>It": SO}),  # the mark is not needed
    (Reading(reasoning=R1, prompt="<think>\n</think>\n"), {"It": Answer("It")}),
]


@pytest.mark.parametrize(("reading", "golden"), THOUGHT)
def test_every_cut_of_reasoning_says_the_same(reading: Reading, golden: Mapping[str, Answer]) -> None:
    check(reading, golden)


def test_a_format_has_vllms_names_and_another_one_is_refused_with_those_there_are() -> None:
    assert named_format("tool_call_parser", CALL_FORMATS, "Qwen3_XML").name == "qwen3_coder"
    with pytest.raises(
        SettingError, match=r"^REASONING_PARSER: 'step3' is not one of deepseek_r1, deepseek_v3,"
    ):
        named_format("reasoning_parser", REASONING_FORMATS, "step3")


# --- json calls ---------------------------------------------------------------------------------------------

CITY = '{"city": "Oslo"}'
READ = ("weather", CITY)
NOW = ("now", "{}")

# --- Hermes -------------------------------------------------------------------------------------------------

HERMES = Reading(CALL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
ARGUMENTS = '{"a": [1, -2.5e3, "x\\n</tool_call>é"], "b": null}'
HERMES_CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
HERMES_ANSWERS = {
    HERMES_CALL: Answer(calls=[("f", ARGUMENTS)]),
    f"Let me see.\n{HERMES_CALL}\n{HERMES_CALL}\nThat is it.": Answer(
        "Let me see.That is it.", calls=[("f", ARGUMENTS), ("f", ARGUMENTS)]
    ),
    f"<think>\nSo: <tool_call>\n</think>\n\nYes. \n{HERMES_CALL}": Answer(
        "Yes.", "So: <tool_call>", calls=[("f", ARGUMENTS)]
    ),
    '<tool_call>{"name": "f"}</tool_call>': Answer(calls=[("f", "{}")]),
    '<tool_call>{"arguments": {"a": 1}, "id": [0], "name": "f"}': Answer(calls=[("f", '{"a": 1}')]),
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}': Answer(calls=[("f", '{"a": 1}')]),
    '<tool_call>{"name": "f", "arguments": {"a": "two\nlines"}}': Answer(
        calls=[("f", '{"a": "two\\nlines"}')]
    ),
    "  a  <tool_call> b <tool_call": Answer("  a  <tool_call> b <tool_call"),
    '<tool_call>\n{"name": "f", "arguments"= 1} \n': Answer('<tool_call>\n{"name": "f", "arguments"= 1} \n'),
    f"<tool_call>{HERMES_CALL}": Answer("<tool_call>", calls=[("f", ARGUMENTS)]),
    # A call that was begun stays, with the arguments that were sent.
    '<tool_call>\n{"name": "f", "arguments": {"a": 1,, } what?': Answer(
        ", } what?", calls=[("f", '{"a": 1,')]
    ),
    '<tool_call>\n{"name": "f", "arguments": {"a": "b': Answer(calls=[("f", '{"a": "b')]),
}


# --- Llama 3 ------------------------------------------------------------------------------------------------

LLAMA_CALL = f'{{"name": "weather", "parameters": {CITY}}}'

# --- Mistral ------------------------------------------------------------------------------------------------

LIST = f'[{{"name": "weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]'

# --- DeepSeek and Kimi --------------------------------------------------------------------------------------

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OPEN = f"{CALL}function{SEP}weather\n```json\n"
FENCED = f"{OPEN}{CITY}\n```{CALL_END}"
PLAIN = f"{CALL}weather{SEP}{CITY}{CALL_END}"
KIMI_FORECAST = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>"
)

# --- tagged arguments ---------------------------------------------------------------------------------------

QWEN = "<tool_call>\n<function=weather>\n"
END_OF_QWEN = "</function>\n</tool_call>"
TYPED = '{"city": "Oslo \\"x\\"\\nN", "days": 3, "units": "c", "when": null, "places": ["a"], "exact": true}'
QUOTED = '"</parameter>"'


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def argument(name: str, value: str) -> str:
    return f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"


QWEN_VALUES = [
    parameter("city", 'Oslo "x"\nN'),
    parameter("days", "3"),
    parameter("units", "c"),
    parameter("when", "null"),
    parameter("places", '["a"]'),
    parameter("exact", "True"),
]
QWEN_CITY = parameter("city", "Oslo")
GLM_VALUES = [
    argument("city", 'Oslo "x"\nN'),
    argument("days", "3"),
    argument("units", "c"),
    argument("when", "null"),
    argument("places", '["a"]'),
    argument("exact", "true"),
]

# --- harmony ------------------------------------------------------------------------------------------------

ANALYSIS = "<|channel|>analysis<|message|>They ask.<|end|>"
HARMONY_CALL = (
    f"<|start|>assistant<|channel|>commentary to=functions.weather<|constrain|>json<|message|>{CITY}<|call|>"
)
OTHER = f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{CITY}"
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.\n<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>"

# --- every format -------------------------------------------------------------------------------------------

ANSWERS: dict[str, tuple[Reading, Mapping[str, Answer]]] = {
    "hermes": (HERMES, HERMES_ANSWERS),
    "llama3_json": (
        Reading(CALL_FORMATS["llama3_json"], tools=TOOLS),
        {
            LLAMA_CALL: Answer(calls=[READ]),
            f"\n\n{LLAMA_CALL}\n": Answer(calls=[READ]),
            f'<|python_tag|>{LLAMA_CALL}; {{"type": "function", "name": "now"}}': Answer(calls=[READ, NOW]),
            f"Let me look.\n{LLAMA_CALL}": Answer("Let me look.", calls=[READ]),
            f"It is <|python_tag|>{LLAMA_CALL}": Answer("It is", calls=[READ]),
            f"A call is {LLAMA_CALL}": Answer(f"A call is {LLAMA_CALL}"),
            '{"name": "Oslo", "parameters": {}}': Answer('{"name": "Oslo", "parameters": {}}'),
            '{"city": "Oslo"}\n{': Answer('{"city": "Oslo"}\n{'),
            '<|python_tag|>search.call(query="x")': Answer('<|python_tag|>search.call(query="x")'),
        },
    ),
    "mistral": (
        Reading(CALL_FORMATS["mistral"]),
        {
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CITY}, "id": "a"}}]': Answer(calls=[READ]),
            f"[TOOL_CALLS]{LIST}": Answer(calls=[READ, NOW]),
            f"So.[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]now[ARGS]{{}}": Answer("So.", "", [READ, NOW]),
            f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{CITY}": Answer(calls=[READ]),
            f"[TOOL_CALLS]weather{CITY}": Answer(calls=[READ]),
            "[TOOL_CALLS] I cannot [1, 2].": Answer("[TOOL_CALLS] I cannot [1, 2]."),
            "[TOOL_CALLS][1, 2]": Answer("[TOOL_CALLS][1, 2]"),
            '[TOOL_CALLS]weather{"city": Oslo}': Answer("Oslo}", calls=[("weather", '{"city": ')]),
        },
    ),
    "deepseek_v3": (
        Reading(CALL_FORMATS["deepseek_v3"]),
        {
            f"{BEGIN}{FENCED}{END}": Answer(calls=[READ]),
            f"Yes.\n\n{BEGIN}{FENCED}\n{FENCED}{END}": Answer("Yes.", calls=[READ, READ]),
            f"{BEGIN}{PLAIN}{PLAIN}{END}So": Answer("So", calls=[READ, READ]),
            f"{BEGIN}Nothing.{END}": Answer(f"{BEGIN}Nothing.{END}"),
            f"{OPEN}Oslo": Answer(f"{OPEN}Oslo"),
            f"{CALL}" + "x" * 400 + SEP: Answer(f"{CALL}" + "x" * 400 + SEP),
        },
    ),
    "kimi_k2": (
        Reading(CALL_FORMATS["kimi_k2"]),
        {f"So.{KIMI_FORECAST % CITY}": Answer("So.", calls=[READ])},
    ),
    "tgi": (
        Reading(CALL_FORMATS["tgi"]),
        {
            '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}': Answer(
                calls=[("weather", '{"city": "Oslo", "days": 3}')]
            ),
            '{"name":"now"}': Answer(calls=[NOW]),
            '{"parameters": {"a": 1}, "name": "now"}': Answer(calls=[("now", '{"a": 1}')]),
            '{"parameters": {"a": 1}}': Answer('{"parameters": {"a": 1}}'),
            '{"name": 1}': Answer('{"name": 1}'),
            " It rains. ": Answer(" It rains. "),
            'I look.\n{ "name": "now" }': Answer("I look.", calls=[NOW]),
            '{"name":"now", "parameters": {"a": ': Answer(calls=[("now", '{"a": ')]),
        },
    ),
    "qwen3_coder": (
        Reading(CALL_FORMATS["qwen3_coder"], tools=TOOLS),
        {
            f"Yes.\n{QWEN}{''.join(QWEN_VALUES)}{END_OF_QWEN}": Answer("Yes.", calls=[("weather", TYPED)]),
            f"<function=now>\n</function>\n{QWEN}{QWEN_CITY}{END_OF_QWEN}": Answer(
                calls=[("now", "{}"), ("weather", '{"city": "Oslo"}')]
            ),
            f"{QWEN}{parameter('days', 'many')}{END_OF_QWEN}": Answer(
                calls=[("weather", '{"days": "many"}')]
            ),
            f"{QWEN}{parameter('when', QUOTED)}{END_OF_QWEN}": Answer(
                calls=[("weather", f'{{"when": {QUOTED}}}')]
            ),
            f"{QWEN}{QWEN_CITY}</tool_call>": Answer("</tool_call>", calls=[("weather", '{"city": "Oslo"}')]),
            f"{QWEN}<parameter=city>\nOs": Answer(calls=[("weather", '{"city": "Os')]),
            f"{QWEN}what?": Answer(f"{QWEN}what?"),
            "<tool_call>\n<parameter=a>": Answer("<tool_call>\n<parameter=a>"),
        },
    ),
    "glm45": (
        Reading(CALL_FORMATS["glm45"], tools=TOOLS),
        {
            f"Yes.\n<tool_call>weather\n{''.join(GLM_VALUES)}</tool_call>": Answer(
                "Yes.", "", [("weather", TYPED)]
            ),
            "<tool_call>now\n</tool_call>\n<tool_call>now</tool_call>": Answer(calls=[("now", "{}")] * 2),
            "<tool_call>now or never</tool_call>": Answer("<tool_call>now or never</tool_call>"),
        },
    ),
    "openai": (
        Reading(CALL_FORMATS["openai"]),
        {
            ANALYSIS + HARMONY_CALL: Answer("", "They ask.", [("weather", CITY)]),
            ANALYSIS + FINAL: Answer("It rains.", "They ask."),
            ANALYSIS + OTHER: Answer("", "They ask.", [("weather", CITY)]),
            f"{PREAMBLE}<|start|>assistant{ANALYSIS}{FINAL}": Answer("I look.\n\nIt rains.", "They ask."),
            "<|channel|>analysis<|message|>They": Answer("", "They"),
            "<|channel|>commentary to=python<|message|>1 + 1<|call|>": Answer("", "1 + 1"),
            "<|channel|>commentary to=functions.now<|message|><|call|>": Answer(calls=[("now", "{}")]),
            "It rains.": Answer("It rains."),
            '<|channel|>commentary to=functions.now<|message|>{"a" 1}<|call|>' + FINAL: Answer(
                "1}It rains.", calls=[("now", '{"a" ')]
            ),
        },
    ),
    "llama4_pythonic": (
        Reading(CALL_FORMATS["llama4_pythonic"], tools=TOOLS),
        {
            '[weather(city="Oslo", days=3), now()]': Answer(
                calls=[("weather", '{"city": "Oslo", "days": 3}'), ("now", "{}")]
            ),
            "[weather(places=['a, (b', \"it's\\n\"], exact=True, when=None)]<|python_end|>": Answer(
                calls=[("weather", '{"places": ["a, (b", "it\'s\\n"], "exact": true, "when": null}')]
            ),
            '[weather(city={"a": [true, null]}, days=-1.5,)]': Answer(
                calls=[("weather", '{"city": {"a": [true, null]}, "days": -1.5}')]
            ),
            "I look:\n[ now( ) ]\nDone.": Answer("I look:Done.", calls=[("now", "{}")]),
            "[1] says [now()].": Answer("[1] says [now()]."),
            "[weather(x) for x in y]": Answer("[weather(x) for x in y]"),
            "[later()]": Answer("[later()]"),
            '[weather(city="x", days=date(1))]': Answer("date(1))]", calls=[("weather", '{"city": "x"')]),
        },
    ),
}


@pytest.mark.parametrize("form", ANSWERS)
def test_every_cut_of_an_answer_says_the_same(form: str) -> None:
    check(*ANSWERS[form])


# --- chat answer --------------------------------------------------------------------------------------------

ONE_CALL = '<tool_call>\n{"name": "%s", "arguments": {"x": 1}}\n</tool_call>\n'
READING = Terms(calls="hermes", reasoning="qwen3", tools=[("f", "{}"), ("g", "{}")])


def test_ids_of_calls_follow_from_the_choice_and_the_place() -> None:
    first, again = ChoiceParser(READING, "r.0"), ChoiceParser(READING, "r.0")
    ids = [first.call_id(0), first.call_id(1), ChoiceParser(READING, "r.1").call_id(0)]
    assert len(set(ids)) == 3 and first.call_id(0) == again.call_id(0) and len(ids[0]) == len("call_") + 24
    short = ChoiceParser(Terms(calls="mistral"), "r.0").call_id(0)
    assert len(short) == 9 and short.isalnum(), "the templates of Mistral's models take no others"


def test_an_answer_that_max_tokens_cuts_behind_its_last_call_is_whole() -> None:
    whole = ONE_CALL % "f"
    for text, expected in (
        (whole, "tool_calls"),
        (whole.removesuffix("\n</tool_call>\n"), "tool_calls"),
        (whole + "<tool_call>\n", "length"),
        (whole[: whole.index("}")], "length"),
        (whole + "And", "length"),
        (whole + '<tool_call>\n{"name": "g"', "length"),
        (whole + '<tool_call>\n{"name": "g", "arguments": {', "length"),
    ):
        parser = ChoiceParser(Terms(calls="hermes", tools=[("f", "{}"), ("g", "{}")]), "r.0")
        parser.read(text, 9, True)
        assert parser.finish_reason("length") == expected, text


FORECAST = {"city": "Oslo", "days": 3}
JSON = json.dumps(FORECAST)
BY_NAME = f'{{"name": "weather", "arguments": {JSON}}}'
PYTHON = 'weather(city="Oslo", days=3)'
TAGGED = (
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n"
)
GLM = (
    "weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
)
DEEPSEEK_FORECAST = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
FORECASTS = {
    "hermes": f"<tool_call>\n{BY_NAME}\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n{TAGGED}</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{TAGGED}</seed:tool_call>",
    "llama3_json": BY_NAME.replace("arguments", "parameters"),
    "llama4_pythonic": f"<|python_start|>[{PYTHON}]<|python_end|>",
    "pythonic": f"[{PYTHON}]",
    "mistral": f"[TOOL_CALLS]weather[ARGS]{JSON}",
    "deepseek_v3": DEEPSEEK_FORECAST % JSON,
    "deepseek_v31": DEEPSEEK_FORECAST % JSON,
    "kimi_k2": KIMI_FORECAST % JSON,
    "glm45": f"<tool_call>{GLM}</tool_call>",
    "openai": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>",
    "granite": f"<|tool_call|>[{BY_NAME}]",
    "nemotron_json": f"<TOOLCALL>[{BY_NAME}]</TOOLCALL>",
    "jamba": f"<tool_calls>[{BY_NAME}]</tool_calls>",
    "phi4_mini_json": f"functools[{BY_NAME}]",
    "lfm2": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "tgi": f'{{"name": "weather", "parameters": {JSON}}}',
}


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_only_a_complete_call_counts_wherever_the_text_ends(form: str) -> None:
    """As at a stop string; in every format."""
    reading = Terms(calls=form, tools=[("weather", json.dumps(SCHEMA))])
    reasons = []
    for end in range(len(FORECASTS[form]) + 1):
        parser = ChoiceParser(reading, "r.0")
        message = render_message(parser, parser.read(FORECASTS[form][:end], 9, True))
        reasons.append(parser.finish_reason("stop"))
        if reasons[-1] == "tool_calls":
            [call] = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == FORECAST, FORECASTS[form][:end]
    assert reasons == sorted(reasons) and reasons[-1] == "tool_calls"


ANY = {"$ref": "#/$defs/any"}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"anyOf": 5}, "3"),
        ({"anyOf": [{"$ref": "#/$defs/number%20of"}, {"$ref": "#/$defs/number of"}]}, 3),
        ({"anyOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/text"}]}, "3"),
        (ANY, "3"),
    ],
)
def test_an_argument_has_the_type_that_references_lead_to(schema: Any, value: Any) -> None:
    known = {"any": {"anyOf": 300 * [ANY]}, "number of": {"type": "integer"}, "text": {"type": "string"}}
    parameters = {"properties": {"days": schema}, "$defs": known}
    parser = ChoiceParser(Terms(calls="seed_oss", tools=[("weather", json.dumps(parameters))]), "r.0")
    written = f"<seed:tool_call>\n{TAGGED}</seed:tool_call>"
    [call] = render_message(parser, parser.read(written, 9, True))["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo", "days": value}


# --- chat answer parser -------------------------------------------------------------------------------------

PIECES = (
    '{"name": "weather", "arguments": {"city": "Oslo"}}',
    "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>",
    "weather\n<arg_key>city</arg_key>\n<arg_value>",
    "</arg_value>",
    '[weather(city="Oslo")]',
    "weather[ARGS]{",
    "commentary to=functions.weather",
    "<think>",
    "</think>",
    *'{}[](),:;"\\=\n ',
    "'",
    "é😀",
    "text",
    "name",
    "1e",
    "nul",
)
MARKS = {
    form.name: st.sampled_from([*form.marks, *PIECES]) | st.text(max_size=3) for form in CALL_FORMATS.values()
}
EVERY_FORMAT = pytest.mark.parametrize("form", CALL_FORMATS.values(), ids=lambda form: form.name)


@EVERY_FORMAT
@given(data=st.data())
@settings(max_examples=15)
def test_nonsense_is_read(form: CallFormat, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(MARKS[form.name], max_size=12))
    reading = Reading(form, REASONING_FORMATS["qwen3"] if data.draw(st.booleans()) else None, TOOLS)
    text = "".join(pieces)
    whole = reading.read(text)
    assert reading.read(*pieces) == whole
    assert reading.read(*text) == whole
    is_plain = form.name != "openai" and not text.lstrip().startswith("<think>")
    if is_plain and not whole.calls and not whole.reasoning:
        assert whole.content == text


@EVERY_FORMAT
def test_an_answer_of_the_clients_form_is_no_call_behind_its_beginning(form: CallFormat) -> None:
    """Only its first text says whether an answer is calls, where another form was asked for."""
    texts = [
        '{"a": [\n{"name": "now", "parameters": {}}]}',
        '{"a": "<tool_call>{\\"name\\": \\"now\\"}"}',
        "12",
    ]
    for text in [*texts, *(f'"{mark}\n' + '{"name": "now", "arguments": {}}"' for mark in form.marks)]:
        parser = ChoiceParser(Terms(form.name, tools=[("now", "{}")], is_either=True), "r")
        read = [delta for i, char in enumerate(text, 1) for delta in parser.read(char, 1, i == len(text))]
        content = "".join(one.text for one in read if isinstance(one, ContentDelta))
        assert (content, parser.scanner.num_calls) == (text, 0) or form.name == "openai"


# --- stop holdback ------------------------------------------------------------------------------------------

LETTERS = "ab"
PLAIN_ID = ids("a")[0]


def generated(
    texts: list[str], stops: list[str], min_new_tokens: int = 0, special: int | None = None
) -> Stream:
    """A stream with these texts, up to the first stop string, as a worker would have made it."""
    stream = Stream(
        Generate("r", "", pack_ids([1]), StoppingParams(99, min_new_tokens, stops)), model_tokenizer()
    )
    matcher, reason = StopMatcher(stops), "length"
    for i, text in enumerate(texts):
        token_id = IM_END if i == special else PLAIN_ID
        stream.add_event(Tokens("r", 1, i, pack_ids([token_id]), pack_floats([-1.0]), [text]))
        if i >= min_new_tokens and matcher.step(text):
            reason = "stop_sequence"
            break
    stream.end(Terminal("r", reason, stream.num_tokens))
    return stream


def shown(stream: Stream, **rendering: Any) -> tuple[list[str], Choice]:
    text = Choice(0, stream, "", Rendering(**rendering))
    pieces = [text.step() for _ in range(stream.num_tokens - 1)]
    return [*pieces, text.last()], text


@given(
    texts=st.lists(st.text(LETTERS, max_size=3), min_size=1, max_size=12),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    min_new_tokens=st.integers(0, 4),
    include_stop=st.booleans(),
)
def test_stop_strings_are_cut_out_and_nothing_else(
    texts: list[str], stops: list[str], min_new_tokens: int, include_stop: bool
) -> None:
    stream = generated(texts, stops, min_new_tokens)
    pieces, text = shown(stream, include_stop=include_stop)
    begin = len("".join(texts[:min_new_tokens]))
    whole = "".join(stream.texts)
    ends = [(whole.index(stop, begin) + len(stop), stop) for stop in stops if stop in whole[begin:]]
    if ends:
        end = min(ends)[0]
        stop = max((stop for at, stop in ends if at == end), key=len)
        whole = whole[: end - (0 if include_stop else len(stop))]
        assert text.stop_reason == stop
    assert "".join(pieces) == whole


@given(
    texts=st.lists(st.text(LETTERS, max_size=3), min_size=1, max_size=12),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
)
def test_no_more_is_held_back_than_may_be_part_of_a_stop_string(texts: list[str], stops: list[str]) -> None:
    stream = generated(texts, stops)
    text, so_far = Choice(0, stream, "", Rendering()), ""
    for i in range(stream.num_tokens - 1):
        so_far += text.step()
        whole = "".join(texts[: i + 1])
        assert whole.startswith(so_far)
        held = whole[len(so_far) :]
        assert any(stop.startswith(held) and stop != held for stop in stops) or not held
        longer = [whole[k:] for k in range(len(so_far)) if any(stop.startswith(whole[k:]) for stop in stops)]
        assert not longer, "shown, although a stop string may begin there"


def test_special_tokens_are_not_shown_but_count_in_stop_strings() -> None:
    texts = ["one", "<|im_end|>", " two", " three"]
    assert shown(generated(texts, [], special=1))[0] == ["one", "", " two", " three"]
    assert shown(generated(texts, [], special=1), skip_special=False)[0] == texts
    pieces, _ = shown(generated(texts, ["e<|im_end|> t"], special=1))
    assert pieces == ["on", "", ""]
    assert shown(generated(texts, ["one two"], special=1))[0] == ["", "one", " tw", "o three"]
    assert shown(generated(["a", "<|im_end|>", "b"], ["end|>c"], special=1))[0] == ["a", "", "b"]


def test_a_token_that_ends_the_answer_is_not_shown() -> None:
    for reason, stop_reason in (("eos_token", None), ("stop_sequence", PLAIN_ID)):
        stream = generated(["one", " two"], [])
        stream.terminal = Terminal("r", reason, 2)
        pieces, text = shown(stream)
        assert (pieces, text.stop_reason) == (["one", ""], stop_reason)
        assert shown(stream, include_stop=True)[0] == ["one", " two"]


def test_bytes_of_tokens_add_up_to_the_text() -> None:
    for text in ("é", " naïve", "🙂", "日本の", "\n\t x", "a<0x41>"):
        assert b"".join(token_bytes(TOKENIZER, token_id) for token_id in ids(text)) == text.encode()
    assert token_bytes(TOKENIZER, IM_END) == b"<|im_end|>"
    assert token_bytes(TOKENIZER, 10**7) == b""


# --- render -------------------------------------------------------------------------------------------------

TEXTS = ["", ' "a"\\', "\x00\u2028é🙂", PLACE_OF_TEXT, "no", "t", "end"]
RENDERERS = [ChatCompletionRenderer, CompletionRenderer]


def chunks(
    kind: type, rendering: Rendering, plain: bool, n: int = 2, stopping: dict[str, Any] | None = None
) -> list[bytes]:
    """All chunks of answers with TEXTS, a token at a time in turns."""
    streams = [new_stream(f"r{i}", stopping=stopping) for i in range(n)]
    requests = [stream.request for stream in streams]
    answer = HttpAnswer("r", "/x", True, 5, PLACE_OF_TEXT, "f", n, [b""], requests, [""], rendering)
    renderer = kind(answer, streams)
    renderer.is_plain = renderer.is_plain and plain
    feed = renderer.chunks()
    shown: list[bytes] = []
    for text in TEXTS:
        for stream in streams:
            stream.append([28], [-1.0], [text], [])
            shown += feed.take()
    for stream in streams:
        stream.end(Terminal(stream.request.request_id, "length", len(TEXTS)))
    return [*shown, *feed.take()]


@pytest.mark.parametrize("kind", RENDERERS)
@pytest.mark.parametrize("rendering", [Rendering(), Rendering(usage=True)], ids=["", "usage"])
def test_plain_chunks_have_the_same_bytes(kind: type, rendering: Rendering) -> None:
    assert chunks(kind, rendering, plain=True) == chunks(kind, rendering, plain=False)
    held = {"stop": ["note"]}
    assert chunks(kind, rendering, True, stopping=held) == chunks(kind, rendering, False, stopping=held)
