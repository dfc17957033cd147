"""Damaged GGUF files: what their headers say is checked before anybody believes it."""

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from common import model_files
from common.gguf_check import check_gguf
from common.settings.settings import SettingError
from tests.support.gguf.tiny_gguf import HIDDEN, LAYERS, TYPES, VOCAB, damage, write

NUM_DAMAGED = 1500
Change = Callable[[bytes], bytes]
ALIGNMENT = b"general.alignment"
ONLY_ALIGNMENT = struct.pack(f"<4sIQQQ{len(ALIGNMENT)}sII", b"GGUF", 3, 0, 1, len(ALIGNMENT), ALIGNMENT, 4, 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TYPES.F16)


def refusal(path: Path) -> str:
    with pytest.raises(SettingError) as refused:
        check_gguf(path)
    text = str(refused.value)
    assert text.startswith(f"MODEL_ID: {path} is damaged, or no GGUF file: ")
    assert len(text) < 600 and "\n" not in text
    return text


def put(key: str, kind: str, value: object, header: bytes) -> bytes:
    """A header whose key has another value, of the same size."""
    at = header.index(key.encode()) + len(key) + 4
    return header[:at] + struct.pack(f"<{kind}", value) + header[at + struct.calcsize(f"<{kind}") :]


def replace(old: bytes, new: bytes, header: bytes) -> bytes:
    assert old in header
    return header.replace(old, new, 1)


def cut(length: int, header: bytes) -> bytes:
    return header[:length]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (partial(cut, 0), "it is empty"),
        (partial(cut, 3), "its head ends after the file's end (3 bytes)"),
        (partial(cut, 1000), "more than the file has room for"),
        (partial(cut, -1), "ends at byte"),
        (partial(replace, b"GGUF", b"GGML"), "it begins with b'GGML', not b'GGUF'"),
        (partial(replace, b"GGUF\3", b"GGUF\7"), "its version is 7; those read are 2, 3"),
        (partial(put, "GGUF", "Q", 2**60), f"its head has {2**60} tensors, more than the file has room for"),
        (
            partial(put, "llama.block_count", "I", 10**6),
            f"`llama.block_count` is 1000000, but it has tensors of {LAYERS} blocks",
        ),
        (
            partial(put, "llama.embedding_length", "I", 65),
            f"`llama.embedding_length` is 65, and `tokenizer.ggml.tokens` has {VOCAB} elements, "
            f"but `token_embd.weight` has the shape [{HIDDEN}, {VOCAB}]",
        ),
        (
            partial(put, "llama.attention.head_count", "I", 0),
            "`llama.attention.head_count` is 0; a whole number from 1 to 134217728 is possible",
        ),
        (
            partial(put, "llama.context_length", "I", 2**31),
            "`llama.context_length` is 2147483648; a whole number from 1 to 134217728 is possible",
        ),
        (
            partial(put, "llama.attention.layer_norm_rms_epsilon", "f", float("nan")),
            "`llama.attention.layer_norm_rms_epsilon` is nan",
        ),
        (
            partial(put, "tokenizer.ggml.eos_token_id", "I", VOCAB),
            f"`tokenizer.ggml.eos_token_id` is {VOCAB}; it has the tokens 0 to {VOCAB - 1}",
        ),
        (partial(replace, b"gpt2", b"gp\xff2"), "`tokenizer.ggml.model` is no UTF-8: b'"),
        (lambda _: ONLY_ALIGNMENT, "`general.alignment` is 0, which is no power of two"),
        (
            partial(replace, b"blk.1.attn_q", b"blk.0.attn_q"),
            "`blk.0.attn_q.weight` is there twice",
        ),
        (
            partial(replace, b"general.architecture", b"general.architectura"),
            "it has no `general.architecture`",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(whole: Path, tmp_path: Path, change: Change, words: str) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(change(whole.read_bytes()))
    assert words in refusal(damaged)


@pytest.mark.slow
def test_whatever_byte_is_damaged_the_file_is_possible_or_refused_in_our_words(
    whole: Path, tmp_path: Path
) -> None:
    damaged, content, draw = tmp_path / "damaged.gguf", whole.read_bytes(), Random(0)
    num_refused = 0
    for _ in range(NUM_DAMAGED):
        damaged.write_bytes(damage(content, draw))
        try:
            check_gguf(damaged)
        except SettingError:
            num_refused += 1
            refusal(damaged)
    assert num_refused > NUM_DAMAGED / 2


def test_the_bundled_model_and_a_small_one_are_possible(whole: Path) -> None:
    check_gguf(whole)
    check_gguf(model_files.bundled_gguf())
