"""Calls in every format are read as they come, and the same for every cut of the text."""

from collections.abc import Mapping

import pytest

from api.answers.call_formats import CALL_FORMATS, REASONING_FORMATS
from api.answers.scanner import CallArguments, CallStart
from tests.support.tool_calls import TOOLS, Answer, Reading, check

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
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{CITY}<|tool_call_end|><|tool_calls_section_end|>"
)

# --- tagged arguments ---------------------------------------------------------------------------------------

QWEN = "<tool_call>\n<function=weather>\n"
END_OF_QWEN = "</function>\n</tool_call>"
TYPED = '{"city": "Oslo \\"x\\"\\nN", "days": 3, "units": "c", "when": null, "places": ["a"], "exact": true}'
QUOTED = '"</parameter>"'
MARK = f'{{"when": {QUOTED}}}'


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

# --- python calls -------------------------------------------------------------------------------------------

LITERALS = "<|python_start|>[weather(places=['a, (b', \"it's\\n\"], exact=True, when=None)]<|python_end|>"

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
        {f"So.{KIMI}": Answer("So.", calls=[READ])},
    ),
    "tgi": (
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
            f"{QWEN}{parameter('when', QUOTED)}{END_OF_QWEN}": Answer(calls=[("weather", MARK)]),
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
    ),
}


@pytest.mark.parametrize("form", ANSWERS)
def test_every_cut_of_an_answer_says_the_same(form: str) -> None:
    check(*ANSWERS[form])
