"""Detokenizer: complete characters, right spacing, stop strings anywhere."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from api.streams.stream import generated_text
from common import model_files
from common.detokenize import (
    MAX_INCOMPLETE_TOKENS,
    Detokenizer,
    StopMatcher,
    concatenates,
    piece_cache,
)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_file(str(model_files.resolve("smollm2") / "tokenizer.json"))


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    """A small tokenizer of the SentencePiece kind: ▁ for spaces, bytes for what it has no piece for, the
    first space stripped.
    """
    pieces = ["<unk>", "<s>", "▁", "▁Hello", "▁world", "ly", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(
            dict(zip(pieces, range(len(pieces)), strict=True)), [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def texts(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [detokenizer.step(token_id) for token_id in ids]


@settings(max_examples=50)
@given(prompt=st.text(max_size=8), text=st.text(max_size=40))
def test_the_pieces_of_any_text_are_the_text(smollm2: Tokenizer, prompt: str, text: str) -> None:
    ids = smollm2.encode(text).ids
    assume(
        "\ufffd" not in text and smollm2.decode(ids, skip_special_tokens=False) == text
    )  # its vocabulary has not all bytes
    prompt_ids = smollm2.encode(prompt).ids
    assert "".join(texts(smollm2, prompt_ids, ids)) == text
    assert generated_text(smollm2, prompt_ids, ids, [], "length") == text


def test_an_incomplete_last_character_contributes_nothing(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("ab𐍈").ids[:-1]
    assert "".join(texts(smollm2, [], ids)) == "ab"
    assert generated_text(smollm2, [], ids, [], "length") == "ab"


def test_endless_invalid_bytes_do_not_wait_for_ever(smollm2: Tokenizer) -> None:
    half = smollm2.encode("𐍈").ids[0]
    pieces = texts(smollm2, [], [half] * (2 * MAX_INCOMPLETE_TOKENS))
    assert max(map(len, pieces)) <= MAX_INCOMPLETE_TOKENS
    assert len("".join(pieces)) > MAX_INCOMPLETE_TOKENS


def test_the_first_piece_keeps_its_space(llama: Tokenizer) -> None:
    hello, world, special = (id_of(llama, piece) for piece in ("▁Hello", "▁world", "<s>"))
    assert texts(llama, [special, hello], [world, special, hello]) == [" world", "<s>", " Hello"]
    assert texts(llama, [], [hello, world]) == ["Hello", " world"]
    assert generated_text(llama, [special, hello], [world, hello], [], "length") == " world Hello"


@pytest.mark.parametrize(
    ("stops", "pieces", "matched"),
    [
        ([], ["a"], [False]),
        (["b"], ["a", "abc", "x"], [False, True, True]),
        (["END"], ["E", "N", "x", "EN", "D!"], [False, False, False, False, True]),
        (["\n\n"], ["a\n", "\nb"], [False, True]),
        (["long stop", "x"], ["long", "", " st", "op"], [False, False, False, True]),
        (["🙂🚀"], ["", "🙂", "", "🚀"], [False, False, False, True]),
    ],
)
def test_stop_strings_are_found_inside_and_across_pieces(
    stops: list[str], pieces: list[str], matched: list[bool]
) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.step(piece) for piece in pieces] == matched


def decoded(tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]) -> list[str]:
    """What each token adds, without the cache."""
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [detokenizer.decode_step(token_id) for token_id in ids]


@settings(max_examples=50)
@given(data=st.data())
@pytest.mark.parametrize("name", ["smollm2", "llama"])
def test_cached_pieces_are_what_the_tokens_add(
    name: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    """Few tokens, so they repeat: spaces, parts of characters, invalid bytes, special tokens, unknown ids."""
    tokenizer: Tokenizer = request.getfixturevalue(name)
    if name == "llama":
        some: list[int] | range = range(tokenizer.get_vocab_size() + 1)
    else:
        some = [*tokenizer.encode(" the sea\n\n🙂  日本𐍈<|im_end|>\x00'll").ids, 10**6]
    token = st.sampled_from(some)
    prompt_ids, ids = data.draw(st.lists(token, max_size=7)), data.draw(st.lists(token, max_size=60))
    assert texts(tokenizer, prompt_ids, ids) == decoded(tokenizer, prompt_ids, ids)


def test_pieces_are_cached_only_if_the_decoder_concatenates(smollm2: Tokenizer, llama: Tokenizer) -> None:
    """With WordPiece a token depends on its neighbours: `##` joins it to the one before."""
    assert concatenates(smollm2) and concatenates(llama)
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "sea": 1, "##side": 2, "the": 3}, unk_token="[UNK]"))
    for decoder in (
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("e s", "ES")]),
    ):
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.decoder = decoder
        assert not concatenates(tokenizer)
        ids = [3, 1, 2, 1, 3, 1, 2, 3, 2, 1]
        assert texts(tokenizer, [3], ids) == decoded(tokenizer, [3], ids)
        assert not piece_cache(tokenizer)
