"""The bound on a text's tokens holds for every text, and is not given where none can hold."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from api.prompts.tokenizer import BYTE_LEVEL, BYTE_TOKENS, TextBound, text_bound
from tests.support.tokenizer import TOKENIZER

WORDS = {"a": 0, "b": 1, "ab": 2, "▁": 3, "▁a": 4, "é": 5, "<0x00>": 6}
BYTES = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"aa": 256}


def bpe(vocabulary: dict[str, int] = WORDS, **options: Any) -> Tokenizer:
    merges = [("a", "b"), ("▁", "a")] if vocabulary is WORDS else [("a", "a")]
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))


def composed(tokenizer: Tokenizer, normalizer: Any = None, splitter: Any = None) -> Tokenizer:
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if splitter is not None:
        tokenizer.pre_tokenizer = splitter
    return tokenizer


def with_token(token: AddedToken) -> Tokenizer:
    tokenizer = bpe(BYTES)
    tokenizer.add_special_tokens([token])
    return tokenizer


bound_of = functools.cache(text_bound)
"""It reads a whole vocabulary: once, not for each text."""
PREPENDED = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
BOUNDED = [
    TOKENIZER,
    composed(bpe(BYTES), normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    composed(
        bpe(BYTES), None, pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    ),
]


@pytest.mark.parametrize("tokenizer", BOUNDED)
@given(text=st.text() | st.text("ạ̈ \n1é<|im_end>\x04") | st.text("ᾧ̓͂ͅ가각"))
def test_no_text_has_fewer_tokens_than_the_bound_says(tokenizer: Tokenizer, text: str) -> None:
    bound = bound_of(tokenizer)
    assert bound is not None
    assert bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


UNBOUNDED: Sequence[tuple[str, Tokenizer]] = [
    ("unknown characters in a row are one token", bpe(unk_token="é", fuse_unk=True)),
    ("unknown characters are dropped", bpe()),
    ("bytes that are no token are dropped", composed(bpe(), None, pre_tokenizers.ByteLevel())),
    ("a word is one token", Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))),
    ("spaces are left out", composed(bpe(unk_token="é"), None, pre_tokenizers.Whitespace())),
    (
        "matches are left out",
        composed(bpe(unk_token="é"), None, pre_tokenizers.Split(Regex(" "), "removed")),
    ),
    ("spaces at the ends are left out", composed(bpe(unk_token="é"), normalizers.Strip())),
    ("any number is one", composed(bpe(unk_token="é"), normalizers.Replace(Regex("a+"), "a"))),
    ("a token takes the spaces beside it", with_token(AddedToken("<s>", rstrip=True))),
]


@pytest.mark.parametrize(("why", "tokenizer"), UNBOUNDED, ids=[why for why, _ in UNBOUNDED])
def test_there_is_no_bound_where_a_token_may_stand_for_any_text(why: str, tokenizer: Tokenizer) -> None:
    assert text_bound(tokenizer) is None


def test_sentencepiece_s_tokens_have_a_character_for_each_of_the_text() -> None:
    known = WORDS | {token: i + len(WORDS) for i, token in enumerate(sorted(BYTE_TOKENS - WORDS.keys()))}
    model = models.BPE(vocab=known, merges=[("a", "b")], byte_fallback=True, fuse_unk=True, unk_token="é")
    tokenizer = composed(Tokenizer(model), normalizers.Sequence(PREPENDED))
    assert text_bound(tokenizer) == TextBound(len("<0x00>"))


def test_characters_that_the_bundled_model_does_not_know_count_as_nothing() -> None:
    bound = text_bound(TOKENIZER)
    assert bound is not None and bound.least_tokens("\x04" * 10_000) == 0
    assert bound.least_tokens("a" * 10_000) == -(-10_000 // 81)


def test_byte_level_spells_as_the_library_does() -> None:
    assert {*BYTE_LEVEL} == {*pre_tokenizers.ByteLevel.alphabet()}
    for number in range(128):
        spelled = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(number))[0][0]
        assert BYTE_LEVEL[spelled] == number
