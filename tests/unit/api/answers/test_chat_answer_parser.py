"""Whatever a model writes is read, the same for every cut; where there is no call no text is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.answers.call_formats import CALL_FORMATS, REASONING_FORMATS, CallFormat
from api.answers.chat_answer import AnswerParser
from api.answers.scanner import ContentDelta
from tests.support.tool_calls.answers import Reading
from tests.support.tool_calls.golden import TOOLS

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
    reading = Reading(form, REASONING_FORMATS["qwen3"] if data.draw(st.booleans()) else None, TOOLS)
    text = "".join(pieces)
    whole = reading.read(text)
    assert reading.read(*pieces) == whole
    assert reading.read(*text) == whole
    is_plain = form.name != "openai" and not text.lstrip().startswith("<think>")
    if is_plain and not whole.calls and not whole.reasoning:
        assert whole.content == text


@EVERY_FORMAT
@given(text=st.text())
@settings(max_examples=8)
def test_text_is_content(form: CallFormat, text: str) -> None:
    whole = Reading(form, tools=TOOLS).read(text)
    assert (whole.content, whole.calls) == (text, [])


def test_without_formats_all_is_content_at_once() -> None:
    parser = AnswerParser()
    assert parser.feed("<think> a") == [ContentDelta("<think> a")]
    assert parser.feed(" ") == []
    assert parser.finish() == [ContentDelta(" ")]


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
