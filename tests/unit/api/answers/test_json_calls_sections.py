"""DeepSeek's and Kimi's calls."""

from api.answers.call_formats import CALL_FORMATS
from tests.support.tool_calls.answers import Answer, Reading
from tests.support.tool_calls.golden import check

CITY = '{"city": "Oslo"}'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OPEN = f"{CALL}function{SEP}weather\n```json\n"
FENCED = f"{OPEN}{CITY}\n```{CALL_END}"
PLAIN = f"{CALL}weather{SEP}{CITY}{CALL_END}"
READ = ("weather", CITY)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{CITY}<|tool_call_end|><|tool_calls_section_end|>"
)


def test_every_cut_of_deepseeks_calls_says_the_same() -> None:
    check(
        Reading(CALL_FORMATS["deepseek_v3"]),
        {
            f"{BEGIN}{FENCED}{END}": Answer(calls=[READ]),
            f"Yes.\n\n{BEGIN}{FENCED}\n{FENCED}{END}": Answer("Yes.", calls=[READ, READ]),
            f"{BEGIN}{PLAIN}{PLAIN}{END}So": Answer("So", calls=[READ, READ]),
            f"{BEGIN}Nothing.{END}": Answer(f"{BEGIN}Nothing.{END}"),
            f"{OPEN}Oslo": Answer(f"{OPEN}Oslo"),
            f"{CALL}" + "x" * 400 + SEP: Answer(f"{CALL}" + "x" * 400 + SEP),
        },
    )


def test_every_cut_of_kimis_calls_says_the_same() -> None:
    check(Reading(CALL_FORMATS["kimi_k2"]), {f"So.{KIMI}": Answer("So.", calls=[READ])})
