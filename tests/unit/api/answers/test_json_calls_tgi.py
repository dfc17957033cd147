"""TGI's calls: the name among the arguments."""

from api.answers.call_formats import CALL_FORMATS
from tests.support.tool_calls.answers import Answer, Reading
from tests.support.tool_calls.golden import check


def test_every_cut_says_the_same() -> None:
    check(
        Reading(CALL_FORMATS["tgi"]),
        {
            '{"function": {"_name": "weather", "city": "Oslo", "days": 3}}': Answer(
                calls=[("weather", '{"city": "Oslo", "days": 3}')]
            ),
            '{"function":{"_name":"now"}}': Answer(calls=[("now", "{}")]),
            '{"function": {"a": 1, "_name": "now"}}': Answer(calls=[("now", '{"a": 1}')]),
            '{"function": {"a": 1}}': Answer('{"function": {"a": 1}}'),
            '{"function": "now"}': Answer('{"function": "now"}'),
            " It rains. ": Answer(" It rains. "),
            '{"function":{"_name":"now", "a": ': Answer(calls=[("now", '{"a": ')]),
        },
    )
