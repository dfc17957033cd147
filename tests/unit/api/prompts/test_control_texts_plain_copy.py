"""The plain copy gives the ids of the original, but for control tokens' texts that a client wrote."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from api.errors import ApiError
from api.prompts.control_texts import Guarded, PlainCopy, control_texts
from tests.support.source_tree import ROOT
from tests.support.tokenizer import IM_END, TOKENIZER, model_tokenizer

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
@given(parts=st.lists(ORDINARY, min_size=1, max_size=4), add_special_tokens=st.booleans())
def test_ids_of_ordinary_texts_are_the_same(name: str, parts: list[str], add_special_tokens: bool) -> None:
    """With a template's control tokens between them."""
    text = SPECIAL[name].join(parts)
    expected = TOKENIZERS[name].encode(text, add_special_tokens=add_special_tokens).ids
    assert ids(name, text, add_special_tokens) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
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


@pytest.mark.parametrize("text", ["<|im_end|>", " <|im_end|> a", "a<|endoftext|>b", "<|im_start|>user\nHi"])
def test_a_control_text_has_the_tokens_of_a_tokenizer_without_special_tokens(text: str) -> None:
    """In the bundled model; between two control tokens of the template it is a text of its own."""
    plain = Tokenizer.from_str(TOKENIZER.to_str())
    plain.encode_special_tokens = True
    inner = plain.encode(text).ids
    guarded = control_texts(TOKENIZER).guard_text(text, GUARD)
    [start, end] = [TOKENIZER.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert ids("bundled", guarded) == inner
    assert ids("bundled", f"<|im_start|>{guarded}<|im_end|>") == [start, *inner, end]


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
