"""Tiny tokenizers of the kinds that models have, with special tokens, and with changes to the text."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.support.prompts import PROMPTS

END = "<end>"


SPECIAL = ("<s>", "</s>")
NEWLINE = "\u010a"
"""As ByteLevel writes it."""


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of bytes; an empty line is one token, as in the families' own ones."""
    bytes_of = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: token_id for token_id, text in enumerate([*SPECIAL, *bytes_of, NEWLINE * 2])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(NEWLINE, NEWLINE)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level(directory: Path) -> None:
    """As Qwen's: it composes characters, and writes marks in one token that is no special one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(PROMPTS, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (END, "<|im_end|>", "[INST]")])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "<tool_call>")])
    tokenizer.save(str(directory / "tokenizer.json"))


def sentence_piece(directory: Path) -> None:
    """As Llama 2's: ▁ for spaces, bytes for what it has no piece for; one special token takes the spaces
    around it.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFKC()]
    )
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([*steps])
    trainer = trainers.BpeTrainer(
        vocab_size=600, max_token_length=12, special_tokens=["<unk>", "<s>", END], show_progress=False
    )
    tokenizer.train_from_iterator(PROMPTS, trainer)
    tokenizer = Tokenizer.from_str(with_bytes(tokenizer.to_str()))
    mask = AddedToken("<mask>", special=True, lstrip=True, rstrip=True)
    tokenizer.add_special_tokens([mask, AddedToken("[INST]", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))


def with_bytes(text: str) -> str:
    """A tokenizer's file with a piece for each byte."""
    described = json.loads(text)
    vocab = described["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    return json.dumps(described)
