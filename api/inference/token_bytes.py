"""The bytes of one token. Text decoding cannot tell them if a character consists of several tokens."""

import re
from functools import cache

from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a token; empty for an unknown id."""
    piece: str = tokenizer.id_to_token(token_id) or ""
    if "ByteLevel(" in repr(tokenizer.decoder) and byte_of_character().keys() >= set(piece):
        return bytes(byte_of_character()[character] for character in piece)
    if match := BYTE.fullmatch(piece):
        return bytes.fromhex(match[1])
    return piece.replace("▁", " ").encode()


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable character → byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
