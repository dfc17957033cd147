"""Llama 3's calls, with the mark and without."""

from api.answers.call_formats import CALL_FORMATS
from tests.support.tool_calls.answers import Answer, Reading
from tests.support.tool_calls.golden import TOOLS, check

CITY = '{"city": "Oslo"}'
CALL = f'{{"name": "weather", "parameters": {CITY}}}'
READ = ("weather", CITY)
NOW = ("now", "{}")


def test_every_cut_says_the_same() -> None:
    check(
        Reading(CALL_FORMATS["llama3_json"], tools=TOOLS),
        {
            CALL: Answer(calls=[READ]),
            f"\n\n{CALL}\n": Answer(calls=[READ]),
            f'<|python_tag|>{CALL}; {{"type": "function", "name": "now"}}': Answer(calls=[READ, NOW]),
            f"Let me look.\n{CALL}": Answer("Let me look.", calls=[READ]),
            f"It is <|python_tag|>{CALL}": Answer("It is", calls=[READ]),
            f"A call is {CALL}": Answer(f"A call is {CALL}"),
            '{"name": "Oslo", "parameters": {}}': Answer('{"name": "Oslo", "parameters": {}}'),
            '{"city": "Oslo"}\n{': Answer('{"city": "Oslo"}\n{'),
            '<|python_tag|>search.call(query="x")': Answer('<|python_tag|>search.call(query="x")'),
        },
    )
