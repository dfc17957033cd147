"""Mistral's calls, in the form of older and of newer models."""

from api.answers.call_formats import CALL_FORMATS
from tests.support.tool_calls.answers import Answer, Reading
from tests.support.tool_calls.golden import check

CITY = '{"city": "Oslo"}'
CALL = ("weather", CITY)
NOW = ("now", "{}")
LIST = f'[{{"name": "weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]'


def test_every_cut_says_the_same() -> None:
    check(
        Reading(CALL_FORMATS["mistral"]),
        {
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {CITY}, "id": "a"}}]': Answer(calls=[CALL]),
            f"[TOOL_CALLS]{LIST}": Answer(calls=[CALL, NOW]),
            f"So.[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]now[ARGS]{{}}": Answer("So.", "", [CALL, NOW]),
            f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{CITY}": Answer(calls=[CALL]),
            f"[TOOL_CALLS]weather{CITY}": Answer(calls=[CALL]),
            "[TOOL_CALLS] I cannot [1, 2].": Answer("[TOOL_CALLS] I cannot [1, 2]."),
            "[TOOL_CALLS][1, 2]": Answer("[TOOL_CALLS][1, 2]"),
            '[TOOL_CALLS]weather{"city": Oslo}': Answer("Oslo}", calls=[("weather", '{"city": ')]),
        },
    )
