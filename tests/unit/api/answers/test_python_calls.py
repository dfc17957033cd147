"""Calls as Python are read with JSON arguments."""

from api.answers.call_formats import CALL_FORMATS
from tests.support.tool_calls.answers import Answer, Reading
from tests.support.tool_calls.golden import TOOLS, check

LITERALS = "<|python_start|>[weather(places=['a, (b', \"it's\\n\"], exact=True, when=None)]<|python_end|>"


def test_every_cut_says_the_same() -> None:
    check(
        Reading(CALL_FORMATS["llama4_pythonic"], tools=TOOLS),
        {
            '[weather(city="Oslo", days=3), now()]': Answer(
                calls=[("weather", '{"city": "Oslo", "days": 3}'), ("now", "{}")]
            ),
            LITERALS: Answer(
                calls=[("weather", '{"places": ["a, (b", "it\'s\\n"], "exact": true, "when": null}')]
            ),
            '[weather(city={"a": [true, null]}, days=-1.5,)]': Answer(
                calls=[("weather", '{"city": {"a": [true, null]}, "days": -1.5}')]
            ),
            "I look:\n[ now( ) ]\nDone.": Answer("I look:Done.", calls=[("now", "{}")]),
            "[1] says [now()].": Answer("[1] says [now()]."),
            "[weather(x) for x in y]": Answer("[weather(x) for x in y]"),
            "[later()]": Answer("[later()]"),
            '[weather(city="Oslo", days=date(1))]': Answer(")]", calls=[("weather", '{"city": "Oslo"')]),
        },
    )
