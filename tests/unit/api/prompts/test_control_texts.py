"""Guards change nothing of what a template renders, and no control text of a client is whole with them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import ApiError
from api.prompts.chat_template import ChatTemplate
from api.prompts.control_texts import GUARDS, ControlTexts, control_texts, rendered_text
from tests.support.tokenizer import TOKENIZER, model_tokenizer

TEXTS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[[INST]]", "!"]
CONTROLS = ControlTexts(TEXTS)
PIECES = [
    *TEXTS,
    "<|im_",
    "end|>",
    "<|",
    "|>",
    "<",
    ">",
    "s>",
    "[",
    "INST]",
    " ",
    "\n",
    "a",
    "é🙂",
    '"',
    "\\",
    GUARDS[0],
]
CONTENT = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
OWN = model_tokenizer().chat_template
assert OWN is not None
TEMPLATES = {
    "the model's own": OWN,
    "trims": ChatTemplate("{% for m in messages %}[INST]{{ m.content | trim }}</s>{% endfor %}", {}),
    "JSON": ChatTemplate("<s>{{ messages | tojson }}{{ messages | tojson(ensure_ascii=True) }}", {}),
    "Python": ChatTemplate("<s>{{ messages }}{{ messages[0].content | upper | replace('A', 'b') }}", {}),
    "joins": ChatTemplate("<s>{% for m in messages %}{{ m.content }}{% endfor %}</s>", {}),
    "of parts": ChatTemplate("{{ '<|im_' + 'start|>' }}{{ messages[0].content }}{{ '<' + '/s>' }}", {}),
}


def texts(template: ChatTemplate, contents: list[str], controls: ControlTexts = CONTROLS) -> tuple[str, str]:
    """What the template renders, and the same with guards if something needs them."""
    messages: Any = [{"role": "user", "content": content} for content in contents]
    guard = controls.guard_for(messages, template.source)
    found = rendered_text(
        template.render(controls.guarded(messages, guard) if guard else messages, False, {}), guard
    )
    return found.text, found.guarded.text if found.guarded else found.text


@pytest.mark.parametrize("name", TEMPLATES)
@given(contents=st.lists(CONTENT, min_size=1, max_size=3))
def test_a_prompt_is_the_same_and_only_the_template_s_control_texts_are_whole(
    name: str, contents: list[str]
) -> None:
    template = TEMPLATES[name]
    messages: Any = [{"role": "user", "content": content} for content in contents]
    text, guarded = texts(template, contents)
    guard = CONTROLS.guard_for(contents, template.source)
    assert text == template.render(messages, False, {})
    for control in TEXTS:
        own = template.render([{**one, "content": "b"} for one in messages], False, {}).count(control)
        assert guarded.count(control) - guarded.count(f"!{guard}") * (control == "!") == own, control


@given(st.text() | CONTENT)
def test_texts_without_control_texts_are_not_guarded(content: str) -> None:
    controls = control_texts(TOKENIZER)
    specials = model_tokenizer().special_tokens
    assert specials.keys() >= {"<|im_end|>", "<|endoftext|>"}
    if not any(special in content for special in specials):
        text, guarded = texts(OWN, [content, "b"], controls)  # type: ignore[arg-type]
        assert guarded.replace(GUARDS[0], "").replace(GUARDS[1], "") == text.replace(GUARDS[0], "")
    assert controls.guard_for(["Is 3 < 4 or 5 > 4?\n", {"a": [None, 1, "<div>"]}], "") is None


def test_keys_are_guarded_and_values_that_are_no_text_stay() -> None:
    given = {"<s>": [1, None, True, ("a<s>",)], "b": {"c": "<s"}}
    assert CONTROLS.guarded(given, "M") == {"<Ms>": [1, None, True, ["a<Ms>"]], "b": {"c": "<Ms"}}
    assert CONTROLS.guard_text("[[INST]]", "M") == "[M[MINST]]"
    assert CONTROLS.guard_text("!", "M") == "!M"


def test_the_guard_is_in_no_text_and_in_no_template() -> None:
    assert CONTROLS.guard_for(["<s>", GUARDS[0]], f"{GUARDS[1]} \\ue002") == GUARDS[3]
    assert CONTROLS.guard_for(["<s>", "\\ue000"], "") == GUARDS[1]
    with pytest.raises(ApiError, match="private-use"):
        CONTROLS.guard_for(["<s>", "".join(GUARDS)], "")
    assert ControlTexts().guard_for(["<s>"], "") is None
    assert ControlTexts(guards_all=True).guard_for(["a"], "") == GUARDS[0]
