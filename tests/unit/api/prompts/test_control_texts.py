"""Control texts that a client wrote are text: guards change nothing of what a template renders, and the
plain copy gives the ids of the original.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from api.errors import ApiError
from api.prompts.chat_template import (
    GUARDS,
    ChatTemplate,
    ControlTexts,
    Guarded,
    PlainCopy,
    control_texts,
    rendered_text,
)
from tests.support.source_tree import ROOT
from tests.support.tokenizer import IM_END, TOKENIZER, model_tokenizer

# --- control texts ------------------------------------------------------------------------------------------

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


def test_the_guard_is_in_no_text_and_in_no_template() -> None:
    assert CONTROLS.guard_for(["<s>", GUARDS[0]], f"{GUARDS[1]} \\ue002") == GUARDS[3]
    assert CONTROLS.guard_for(["<s>", "\\ue000"], "") == GUARDS[1]
    with pytest.raises(ApiError, match="private-use"):
        CONTROLS.guard_for(["<s>", "".join(GUARDS)], "")
    assert ControlTexts().guard_for(["<s>"], "") is None
    assert ControlTexts(guards_all=True).guard_for(["a"], "") == GUARDS[0]


# --- control texts plain copy -------------------------------------------------------------------------------

GUARD = "\ue000"
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
LETTERS = sorted({*"▁abcdefgins<|>[]/ACLS\n é"})


def tokenizer(*added: AddedToken, normalizer: Any = None, splitter: Any = None) -> Tokenizer:
    vocabulary = {letter: i for i, letter in enumerate(["?", *LETTERS, "▁a", "ab", "</", "s>"])}
    merges = [("▁", "a"), ("a", "b"), ("<", "/"), ("s", ">")]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="?"))
    if normalizer is not None:
        made.normalizer = normalizer
    if splitter is not None:
        made.pre_tokenizer = splitter
    made.decoder = decoders.Fuse()
    made.add_special_tokens([*added])
    made.add_tokens([AddedToken("<a>", normalized=False)])
    first = made.token_to_id(added[0].content)
    assert first is not None
    made.post_processor = processors.TemplateProcessing(
        single=f"{added[0].content} $A {added[0].content}", special_tokens=[(added[0].content, first)]
    )
    return made


def both(**flags: Any) -> tuple[AddedToken, AddedToken]:
    return AddedToken("<s>", **flags), AddedToken("</s>", **flags)


def unigram() -> Tokenizer:
    """A model that knows its control tokens as pieces of texts, and the likeliest ones."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in LETTERS)]
    made = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    made.add_special_tokens([*both(normalized=False), AddedToken("<unk>", normalized=False)])
    return made


def words() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "ab": 3, "c": 4}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken("</s>", normalized=False), AddedToken("<unk>", normalized=False)])
    return made


METASPACE = pre_tokenizers.Metaspace(prepend_scheme="first")
TOKENIZERS = {
    "bundled": TOKENIZER,
    "plain": tokenizer(*both(normalized=False)),
    "takes spaces before": tokenizer(*both(normalized=False, lstrip=True)),
    "takes spaces after it": tokenizer(*both(normalized=False, rstrip=True)),
    "whole words": tokenizer(*both(normalized=False, single_word=True)),
    "prepends": tokenizer(*both(normalized=False), normalizer=PREPENDED),
    "prepends to normalized": tokenizer(*both(normalized=True), normalizer=PREPENDED),
    "prepends first": tokenizer(*both(normalized=False), splitter=METASPACE),
    "composes": tokenizer(*both(normalized=True, rstrip=True), normalizer=normalizers.NFKC()),
    "knows them as pieces": unigram(),
    "knows them as words": words(),
    "lowers": tokenizer(*both(normalized=True), normalizer=normalizers.Lowercase()),
}
COPIES = {name: PlainCopy(one) for name, one in TOKENIZERS.items()}
SPECIAL = {name: "<|im_end|>" if one is TOKENIZER else "</s>" for name, one in TOKENIZERS.items()}
WORDS = ["a", "ab", " ", "  ", "\n", "é", "c", "<", "s>", "</", "<a>", "e\u0301", "A"]
ORDINARY = (
    st.lists(st.sampled_from(WORDS), max_size=5)
    .map("".join)
    .filter(lambda text: "<s>" not in text and "</s>" not in text)
)


def ids(name: str, guarded: str, add_special_tokens: bool = False) -> list[int]:
    found: list[int] = COPIES[name].encode(Guarded(guarded, GUARD), add_special_tokens).ids
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(parts=st.lists(ORDINARY, min_size=1, max_size=4), add_special_tokens=st.booleans())
def test_ids_of_ordinary_texts_are_the_same(name: str, parts: list[str], add_special_tokens: bool) -> None:
    """With a template's control tokens between them."""
    text = SPECIAL[name].join(parts)
    expected = TOKENIZERS[name].encode(text, add_special_tokens=add_special_tokens).ids
    assert ids(name, text, add_special_tokens) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(before=ORDINARY, after=ORDINARY)
def test_a_client_s_control_text_is_text_and_the_template_s_stays_a_token(
    name: str, before: str, after: str
) -> None:
    special = SPECIAL[name]
    special_id = TOKENIZERS[name].token_to_id(special)
    assert special_id is not None
    written = f"{before}{special[0]}{GUARD}{special[1:]}{after}"
    assert ids(name, written).count(special_id) == 0
    around = ids(name, f"a {special} {written} {special} a")
    assert around.count(special_id) == ids(name, f"a {special} {before}c{after} {special} a").count(
        special_id
    )


def test_a_client_cannot_write_an_alias() -> None:
    copy = COPIES["bundled"]
    with pytest.raises(ApiError, match="private-use"):
        copy.aliased(Guarded(f"a{copy.aliases[IM_END]}", GUARD))
    assert len({*copy.aliases.values()}) == len(copy.aliases) == 17


def test_ids_of_this_repository_s_texts_are_the_same() -> None:
    """As messages in the model's own template: no text needs guards, and those of the copy are equal."""
    controls, template = control_texts(TOKENIZER), model_tokenizer().chat_template
    assert template is not None
    for file in [*ROOT.glob("docs/*.md"), *ROOT.glob("api/prompts/*.py"), *ROOT.glob("api/page/*.*")]:
        content = file.read_text()
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "\n Yes. "}]
        text = template.render(messages, True, {})
        assert ids("bundled", text) == TOKENIZER.encode(text, add_special_tokens=False).ids
        if not any(special in content for special in model_tokenizer().special_tokens):
            assert controls.guard_for(messages, template.source) is None, file
