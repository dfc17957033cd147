"""Answers as content, reasoning and calls: whatever a model writes is read, and no text is lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.answers.answer import Reading
from api.answers.call_formats import CALL_FORMATS, REASONING_FORMATS, CallFormat
from api.answers.chat_answer import AnswerParser, ChoiceParser, finish_reason, render_message
from api.answers.scanner import ContentDelta
from tests.support.tool_calls import SCHEMA, TOOLS
from tests.support.tool_calls import Reading as ReadingOf

# --- chat answer --------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "%s", "arguments": {"x": 1}}\n</tool_call>\n'
READING = Reading(calls="hermes", reasoning="qwen3", tools=[("f", "{}"), ("g", "{}")])


def test_ids_of_calls_follow_from_the_choice_and_the_place() -> None:
    first, again = ChoiceParser(READING, "r.0"), ChoiceParser(READING, "r.0")
    ids = [first.call_id(0), first.call_id(1), ChoiceParser(READING, "r.1").call_id(0)]
    assert len(set(ids)) == 3 and first.call_id(0) == again.call_id(0) and len(ids[0]) == len("call_") + 24
    short = ChoiceParser(Reading(calls="mistral"), "r.0").call_id(0)
    assert len(short) == 9 and short.isalnum(), "the templates of Mistral's models take no others"


def test_the_reason_of_the_end() -> None:
    for fields, expected in (
        ({}, "tool_calls"),
        ({"is_older": True}, "function_call"),
        ({"is_named": True}, "stop"),
    ):
        parser = ChoiceParser(Reading(calls="hermes", **fields), "r.0")  # type: ignore[arg-type]
        assert finish_reason(parser, "stop") == "stop"
        parser.read(CALL % "f", 9, True)
        assert {finish_reason(parser, reason) for reason in ("stop", "length")} == {expected}


def test_an_answer_that_max_tokens_cuts_behind_its_last_call_is_whole() -> None:
    whole = CALL % "f"
    for text, expected in (
        (whole.removesuffix("\n</tool_call>\n"), "tool_calls"),
        (whole + "<tool_call>\n", "length"),
        (whole[: whole.index("}")], "length"),
        (whole + "And", "length"),
        (whole + '<tool_call>\n{"name": "g"', "length"),
        (whole + '<tool_call>\n{"name": "g", "arguments": {', "length"),
    ):
        parser = ChoiceParser(Reading(calls="hermes", tools=[("f", "{}"), ("g", "{}")]), "r.0")
        parser.read(text, 9, True)
        assert finish_reason(parser, "length") == expected, text


ARGUMENTS = {"city": "Oslo", "days": 3}
JSON = json.dumps(ARGUMENTS)
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
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>%s"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
CALLS = {
    "hermes": f"<tool_call>\n{BY_NAME}\n</tool_call>",
    "qwen3_coder": f"<tool_call>\n{TAGGED}</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{TAGGED}</seed:tool_call>",
    "llama3_json": BY_NAME.replace("arguments", "parameters"),
    "llama4_pythonic": f"<|python_start|>[{PYTHON}]<|python_end|>",
    "pythonic": f"[{PYTHON}]",
    "mistral": f"[TOOL_CALLS]weather[ARGS]{JSON}",
    "deepseek_v3": DEEPSEEK % JSON,
    "deepseek_v31": DEEPSEEK % JSON,
    "kimi_k2": KIMI % JSON,
    "glm45": f"<tool_call>{GLM}</tool_call>",
    "openai": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>",
    "granite": f"<|tool_call|>[{BY_NAME}]",
    "nemotron_json": f"<TOOLCALL>[{BY_NAME}]</TOOLCALL>",
    "jamba": f"<tool_calls>[{BY_NAME}]</tool_calls>",
    "phi4_mini_json": f"functools[{BY_NAME}]",
    "lfm2": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "tgi": f'{{"function": {{"_name": "weather", {JSON[1:]}}}',
}


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_only_a_complete_call_counts_wherever_the_text_ends(form: str) -> None:
    """As at a stop string; in every format."""
    reading = Reading(calls=form, tools=[("weather", json.dumps(SCHEMA))])
    reasons = []
    for end in range(len(CALLS[form]) + 1):
        parser = ChoiceParser(reading, "r.0")
        message = render_message(parser, parser.read(CALLS[form][:end], 9, True))
        reasons.append(finish_reason(parser, "stop"))
        if reasons[-1] == "tool_calls":
            [call] = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == ARGUMENTS, CALLS[form][:end]
    assert reasons == sorted(reasons) and reasons[-1] == "tool_calls"


# --- chat answer parser -------------------------------------------------------------------------------------

PIECES = (
    '{"name": "weather", "arguments": {"city": "Oslo"}}',
    '{"function": {"_name": "now", "a": 1}}',
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
    reading = ReadingOf(form, REASONING_FORMATS["qwen3"] if data.draw(st.booleans()) else None, TOOLS)
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
        parser = AnswerParser(TOOLS, form, is_either=True)
        read = [*(delta for char in text for delta in parser.feed(char)), *parser.finish()]
        content = "".join(one.text for one in read if isinstance(one, ContentDelta))
        assert (content, parser.scanner.num_calls) == (text, 0) or form.name == "openai"
