"""Hermes' calls are read as they come, for every cut of the text."""

import pytest

from api.answers.call_formats import CALL_FORMATS, REASONING_FORMATS
from api.answers.scanner import CallArguments, CallStart
from tests.support.tool_calls.answers import Answer, Reading, cuts

HERMES = Reading(CALL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
ARGUMENTS = '{"a": [1, -2.5e3, "x\\n</tool_call>é"], "b": null}'
ONE = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
GOLDEN = {
    ONE: Answer(calls=[("f", ARGUMENTS)]),
    f"Let me see.\n{ONE}\n{ONE}\nThat is it.": Answer(
        "Let me see.That is it.", calls=[("f", ARGUMENTS), ("f", ARGUMENTS)]
    ),
    f"<think>\nSo: <tool_call>\n</think>\n\nYes. \n{ONE}": Answer(
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
    f"<tool_call>{ONE}": Answer("<tool_call>", calls=[("f", ARGUMENTS)]),
    # A call that was begun stays, with the arguments that were sent.
    '<tool_call>\n{"name": "f", "arguments": {"a": 1,, } what?': Answer(
        ", } what?", calls=[("f", '{"a": 1,')]
    ),
    '<tool_call>\n{"name": "f", "arguments": {"a": "b': Answer(calls=[("f", '{"a": "b')]),
}


@pytest.mark.parametrize("text", GOLDEN)
def test_every_cut_says_the_same(text: str) -> None:
    assert HERMES.read(text) == GOLDEN[text]
    for pieces in cuts(text):
        assert HERMES.read(*pieces) == GOLDEN[text], pieces


def test_the_name_comes_first_and_arguments_as_they_come() -> None:
    pieces = ["<tool_call>", '{"name": "f", "arguments": ', '{"a', '": "x', 'yz"', "}}"]
    *deltas, last = HERMES.deltas(pieces)
    assert deltas == [
        [],
        [],
        [CallStart(0, "f"), CallArguments(0, '{"a')],
        [CallArguments(0, '": "x')],
        [CallArguments(0, 'yz"')],
        [CallArguments(0, "}")],
    ]
    assert last == []
