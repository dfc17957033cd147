"""gpt-oss's messages: analysis is reasoning, final is content, commentary to a function is a call."""

from api.answers.call_formats import CALL_FORMATS
from tests.support.tool_calls.answers import Answer, Reading
from tests.support.tool_calls.golden import check

CITY = '{"city": "Oslo"}'
ANALYSIS = "<|channel|>analysis<|message|>They ask.<|end|>"
CALL = (
    f"<|start|>assistant<|channel|>commentary to=functions.weather<|constrain|>json<|message|>{CITY}<|call|>"
)
OTHER = f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{CITY}"
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.\n<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>"


def test_every_cut_says_the_same() -> None:
    check(
        Reading(CALL_FORMATS["openai"]),
        {
            ANALYSIS + CALL: Answer("", "They ask.", [("weather", CITY)]),
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
    )
