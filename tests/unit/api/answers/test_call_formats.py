"""Formats are found from a model's chat template and its vocabulary. Reasoning is apart from content."""

import pytest

from api.answers.call_formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    find_call_format,
    find_reasoning_format,
)
from api.requests.pool import named_format
from common.settings.settings import SettingError
from tests.support.tool_calls import Answer, Reading, check

THINK = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>{% endif %}"
DEEPSEEK = "{{ '<｜tool▁call▁begin｜>' + call.%s + '<｜tool▁sep｜>' + call.%s }}"
CALLS = {
    "hermes": "{{ tools }} <tool_call>\n{{ call | tojson }}\n</tool_call>" + THINK,
    "qwen3_coder": "{{ tools }} <tool_call>\n<function={{ call.name }}>\n<parameter={{ key }}>\n",
    "seed_oss": "{{ tools }} <seed:tool_call>\n<function={{ call.name }}>\n<parameter={{ key }}>",
    "glm45": "{{ tools }} <tool_call>{{ call.name }}\n<arg_key>{{ key }}</arg_key>" + THINK,
    "mistral": "{{ tools }} [TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}",
    "deepseek_v3": "{{ tools }}" + DEEPSEEK % ("type", "name") + "```json",
    "deepseek_v31": "{{ tools }}" + DEEPSEEK % ("name", "arguments"),
    "kimi_k2": "{{ tools }} <|tool_call_begin|>functions.{{ name }}:0<|tool_call_argument_begin|>",
    "openai": "{{ tools }} <|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>",
    "llama3_json": '{{ tools }} Environment: ipython {"name": function name, "parameters": {}}',
    "pythonic": "{{ tools }} [func_name1(name1=value1, name2=value2...), func_name2(params)]",
    "llama4_pythonic": "{{ tools }} <|header_start|> [func_name1(param1=value1), func_name2(...)]",
    "granite": "{{ tools }} <|tool_call|>",
    "nemotron_json": "{{ tools }} <TOOLCALL>[]</TOOLCALL>",
    "phi4_mini_json": "{{ tools }} functools[]",
    "jamba": "{{ tools }} <tool_calls>[]</tool_calls>",
    "lfm2": "{{ tools }} <|tool_call_start|>[]<|tool_call_end|>",
}
REASONING = {
    "qwen3": THINK,
    "glm45": CALLS["glm45"],
    "deepseek_r1": "{{ '<｜Assistant｜>' + content.split('</think>')[-1] }}",
    "deepseek_v3": "<｜Assistant｜>{% if thinking %}<think>{% else %}</think>{% endif %}",
    "mistral": "[THINK]{{ thinking }}[/THINK]",
    "seed_oss": "<seed:think>",
}
NO_TOKENS: dict[str, int] = {}


@pytest.mark.parametrize("name", [name for name, form in CALL_FORMATS.items() if form.signs])
def test_a_template_shows_how_calls_are_written(name: str) -> None:
    found = find_call_format(CALLS[name], NO_TOKENS.get)
    assert found is not None and found.name == name


def test_the_vocabulary_shows_it_where_the_template_does_not() -> None:
    found = find_call_format("{{ tools }}", {"[TOOL_CALLS]": 9}.get)
    assert found is not None and found.name == "mistral"
    assert find_call_format("{{ tools }}", {"a": 0}.get) is None


@pytest.mark.parametrize("name", REASONING)
def test_a_template_shows_how_a_model_thinks(name: str) -> None:
    found = find_reasoning_format(REASONING[name])
    assert found is not None and found.name == name


def test_a_template_that_thinks_otherwise_or_not_at_all() -> None:
    assert find_reasoning_format("{{ messages }}") is None
    assert find_reasoning_format("<think></think> <response></response>") is None
    assert find_reasoning_format(CALLS["openai"] + "<think>") is None


# --- reasoning ----------------------------------------------------------------------------------------------

QWEN = REASONING_FORMATS["qwen3"]
R1 = REASONING_FORMATS["deepseek_r1"]


def test_every_cut_of_reasoning_says_the_same() -> None:
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
def test_a_prompt_may_begin_thinking(prompt: str) -> None:
    check(
        Reading(reasoning=QWEN, prompt=prompt),
        {"\nSo\n</think>\nIt": Answer("It", "So"), "So": Answer("", "So")},
    )


def test_some_models_begin_thinking_without_a_mark() -> None:
    check(
        Reading(reasoning=R1), {"So</think>It": Answer("It", "So"), "<think>So</think>It": Answer("It", "So")}
    )
    check(Reading(reasoning=R1, prompt="<think>\n</think>\n"), {"It": Answer("It")})


def test_a_format_has_vllms_names_and_another_one_is_refused_with_those_there_are() -> None:
    assert named_format("tool_call_parser", CALL_FORMATS, "Qwen3_XML").name == "qwen3_coder"
    with pytest.raises(
        SettingError, match=r"^REASONING_PARSER: 'step3' is not one of deepseek_r1, deepseek_v3,"
    ):
        named_format("reasoning_parser", REASONING_FORMATS, "step3")
