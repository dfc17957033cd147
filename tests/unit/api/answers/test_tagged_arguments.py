"""Qwen3-Coder's and GLM's calls, whose values have the types that the schema says."""

from api.answers.call_formats import CALL_FORMATS
from tests.support.tool_calls.answers import Answer, Reading
from tests.support.tool_calls.golden import TOOLS, check

HEAD = "<tool_call>\n<function=weather>\n"
TAIL = "</function>\n</tool_call>"
READ = '{"city": "Oslo \\"x\\"\\nN", "days": 3, "units": "c", "when": null, "places": ["a"], "exact": true}'
QUOTED = '"</parameter>"'
MARK = f'{{"when": {QUOTED}}}'


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def argument(name: str, value: str) -> str:
    return f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"


def test_every_cut_of_qwens_calls_says_the_same() -> None:
    values = [
        parameter("city", 'Oslo "x"\nN'),
        parameter("days", "3"),
        parameter("units", "c"),
        parameter("when", "null"),
        parameter("places", '["a"]'),
        parameter("exact", "True"),
    ]
    city = parameter("city", "Oslo")
    check(
        Reading(CALL_FORMATS["qwen3_coder"], tools=TOOLS),
        {
            f"Yes.\n{HEAD}{''.join(values)}{TAIL}": Answer("Yes.", calls=[("weather", READ)]),
            f"<function=now>\n</function>\n{HEAD}{city}{TAIL}": Answer(
                calls=[("now", "{}"), ("weather", '{"city": "Oslo"}')]
            ),
            f"{HEAD}{parameter('days', 'many')}{TAIL}": Answer(calls=[("weather", '{"days": "many"}')]),
            f"{HEAD}{parameter('when', QUOTED)}{TAIL}": Answer(calls=[("weather", MARK)]),
            f"{HEAD}{city}</tool_call>": Answer("</tool_call>", calls=[("weather", '{"city": "Oslo"}')]),
            f"{HEAD}<parameter=city>\nOs": Answer(calls=[("weather", '{"city": "Os')]),
            f"{HEAD}what?": Answer(f"{HEAD}what?"),
            "<tool_call>\n<parameter=a>": Answer("<tool_call>\n<parameter=a>"),
        },
    )


def test_every_cut_of_glms_calls_says_the_same() -> None:
    values = [
        argument("city", 'Oslo "x"\nN'),
        argument("days", "3"),
        argument("units", "c"),
        argument("when", "null"),
        argument("places", '["a"]'),
        argument("exact", "true"),
    ]
    check(
        Reading(CALL_FORMATS["glm45"], tools=TOOLS),
        {
            f"Yes.\n<tool_call>weather\n{''.join(values)}</tool_call>": Answer(
                "Yes.", "", [("weather", READ)]
            ),
            "<tool_call>now\n</tool_call>\n<tool_call>now</tool_call>": Answer(calls=[("now", "{}")] * 2),
            "<tool_call>now or never</tool_call>": Answer("<tool_call>now or never</tool_call>"),
        },
    )
