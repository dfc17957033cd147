"""Reasoning is apart from content, whether the prompt or the answer begins it."""

from typing import get_args

import pytest

from api.answers.call_formats import REASONING_FORMATS
from common.settings.types import ReasoningParser
from tests.support.tool_calls.answers import Answer, Reading
from tests.support.tool_calls.golden import check

QWEN = REASONING_FORMATS["qwen3"]
R1 = REASONING_FORMATS["deepseek_r1"]


def test_every_cut_says_the_same() -> None:
    check(
        Reading(reasoning=QWEN),
        {
            "<think>\nSo </thin. \n</think>\n\n It rains.\n": Answer(" It rains.\n".strip(" "), "So </thin."),
            "<think></think>It": Answer("It"),
            "<think>\nSo": Answer("", "So"),
            " It rains. <think>So</think>": Answer(" It rains. <think>So</think>"),
            "<thin": Answer("<thin"),
        },
    )


@pytest.mark.parametrize(
    "prompt", ["<think>\n", "</think> a <think>", "a <think> b </think><|assistant|><think>\n\n"]
)
def test_a_prompt_may_begin_it(prompt: str) -> None:
    check(
        Reading(reasoning=QWEN, prompt=prompt),
        {"\nSo\n</think>\nIt": Answer("It", "So"), "So": Answer("", "So")},
    )


@pytest.mark.parametrize("prompt", ["", "<think>\n\n</think>\n\n", "What is <think>?<|assistant|>"])
def test_a_prompt_that_does_not_begin_it(prompt: str) -> None:
    check(Reading(reasoning=QWEN, prompt=prompt), {"It": Answer("It")})


def test_some_models_begin_it_without_a_mark() -> None:
    check(
        Reading(reasoning=R1), {"So</think>It": Answer("It", "So"), "<think>So</think>It": Answer("It", "So")}
    )
    check(Reading(reasoning=R1, prompt="<think>\n</think>\n"), {"It": Answer("It")})


def test_mistral_has_marks_of_its_own() -> None:
    check(Reading(reasoning=REASONING_FORMATS["mistral"]), {"[THINK]So[/THINK]It": Answer("It", "So")})


def test_the_formats_are_the_values_of_reasoning_parser() -> None:
    names, *_ = get_args(ReasoningParser)
    assert set(get_args(names)) == {*REASONING_FORMATS, "none"}
