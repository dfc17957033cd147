"""Prompts from messages, compared with what transformers makes of the same template."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from api.errors import ApiError
from api.prompts.chat_template import ChatTemplate
from common import model_files
from common.settings.settings import SettingError
from tests.support.tokenizer import model_tokenizer

CHAT = [
    {"role": "system", "content": "  Be <brief> & kind.\n"},
    {"role": "user", "content": "Hé 🙂\n\n\tHow are you? "},
    {"role": "assistant", "content": " Fine.\n"},
    {"role": "user", "content": "{{ 1 + 1 }} <|im_end|>", "name": "Ann"},
]
TEMPLATES = {
    "chatml": "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "trims": "{{ bos_token }}\n{% for m in messages %}\n"
    "    {% if m['role'] == 'system' %}\nSYS {{ m['content'] | trim }}\n"
    "    {% elif m['role'] == 'user' %}\n[INST] {{ m['content'] | trim }} [/INST]\n    {% else %}\n"
    "{{ m['content'] | trim }}{{ eos_token }}\n    {% endif %}\n{% endfor %}",
    "blocks": "{%- set ns = namespace(n=0, last='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% generation %}{{ ns.n }}: {{ m | tojson(indent=1) }}"
    "{{ [m.content] | tojson }}{% endgeneration %}"
    "{% if ns.n > 2 %}{% break %}{% endif %}{% endfor %}"
    "{{ dict(a=1).items() | list }}{{ tools is none }}{{ nothing }}",
    "given": "{{ style | upper }}{% if thinking is defined and thinking %} thinks{% endif %}"
    "{{ messages | length }}"
    "{{ strftime_now('%Y') }}",
}
VARIABLES = {"style": "loud", "thinking": True}


@pytest.fixture(scope="module")
def path() -> Path:
    return model_files.resolve("smollm2")


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("name", ["the model's own", *TEMPLATES])
def test_rendered_prompts_are_those_of_transformers(
    path: Path, tokenizer: Any, name: str, add_generation_prompt: bool
) -> None:
    own = ChatTemplate.load(path)
    assert own is not None
    template = ChatTemplate(TEMPLATES[name], own.special_tokens) if name in TEMPLATES else own
    for chat in (CHAT, CHAT[1:3], CHAT[3:]):
        variables = {"add_generation_prompt": add_generation_prompt, **VARIABLES}
        theirs = tokenizer.apply_chat_template(
            chat, chat_template=TEMPLATES.get(name), tokenize=False, **variables
        )
        ids = tokenizer.apply_chat_template(
            chat, chat_template=TEMPLATES.get(name), return_dict=False, **variables
        )
        ours = template.render(chat, add_generation_prompt, VARIABLES)
        assert ours == theirs
        assert model_tokenizer().encode(ours, add_special_tokens=False) == ids


@pytest.mark.parametrize("name", ["the model's own", "chatml", "trims"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon ", " a\n", "CONTINUE"])
def test_a_last_message_is_continued_as_transformers_does(
    path: Path, tokenizer: Any, name: str, content: str
) -> None:
    own = ChatTemplate.load(path)
    assert own is not None
    template = ChatTemplate(TEMPLATES[name], own.special_tokens) if name in TEMPLATES else own
    chat = [*CHAT[:2], {"role": "assistant", "content": content}]
    theirs = tokenizer.apply_chat_template(
        chat, chat_template=TEMPLATES.get(name), tokenize=False, continue_final_message=True
    )
    assert template.render_open(chat, {}) == theirs
    assert theirs.endswith(content.strip() if name == "trims" else content)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "xpected"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ dict.__class__.__init__.__globals__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "__class__"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "division"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_errors_of_a_template_are_422(source: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        ChatTemplate(source, {}).render(CHAT, True, {})
    assert (caught.value.status, caught.value.error_type, caught.value.param) == (
        422,
        "template_error",
        "messages",
    )


def test_files_that_hold_the_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    eos = {"content": "</s>", "lstrip": False}
    write(
        tmp_path,
        "tokenizer_config.json",
        {"chat_template": "config{{ bos_token }}{{ eos_token }}", "bos_token": "<s>", "eos_token": eos},
    )
    assert rendered(tmp_path) == "config<s></s>"
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "of several"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": several})
    assert rendered(tmp_path) == "of several"
    write(tmp_path, "chat_template.json", {"chat_template": "of a processor"})
    assert rendered(tmp_path) == "of a processor"
    (tmp_path / "chat_template.jinja").write_text("of its own file é")
    assert rendered(tmp_path) == "of its own file é"


@pytest.mark.parametrize(
    ("source", "cause"), [("{% for", "is no chat template: "), (None, "is no chat template: .*No such file")]
)
def test_a_file_that_is_no_template_is_refused(source: str | None, cause: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    if source is not None:
        file.write_text(source)
    with pytest.raises(SettingError, match=f"^CHAT_TEMPLATE: {file} {cause}"):
        ChatTemplate.load(tmp_path, None, str(file))


LLAMA = (
    "{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}"
    "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
)
HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m['tool_calls'] %}{{ '```json\n' + c['function']['arguments'] + '```' }}"
    "{% endfor %}{% endfor %}"
)
PYTHONIC = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
    "{% endfor %}{{ tools }}"
)


@pytest.mark.parametrize(
    ("source", "takes_tools", "wants_text"),
    [(LLAMA, True, False), (HERMES, True, False), (DEEPSEEK, False, True), (PYTHONIC, True, True)],
)
def test_what_a_template_does_with_tools_is_read_from_it(
    source: str, takes_tools: bool, wants_text: bool
) -> None:
    template = ChatTemplate(source, {})
    assert (template.takes_tools, template.wants_text_arguments) == (takes_tools, wants_text)


def test_requests_with_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": several})
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render(CHAT, True, {}) == "plain"
    assert template.for_tools.render(CHAT, True, {}, [{"a": 1}]) == "[{'a': 1}]"


def write(path: Path, name: str, content: object) -> None:
    (path / name).write_text(json.dumps(content))


def rendered(path: Path) -> str:
    template = ChatTemplate.load(path)
    assert template is not None
    return template.render(CHAT, True, {})
