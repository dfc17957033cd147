"""Block hashes: names of KV blocks by what they hold, so that rows that begin alike can share blocks.

A hash names HASHED_TOKENS tokens and all tokens before them: it is the digest of the hash before it, of
their ids, and of the digests of pictures whose placeholders are among them. The first of all, the root, is
the digest of a salt, with the adapter as its key: requests with other salts or adapters share nothing.
Gateways hash prompts, agents what is generated, the batcher what a request resumes with. A block of several
times HASHED_TOKENS has the name of the last hash within it, so workers of different block sizes can use the
same hashes.
"""

from collections.abc import Sequence
from hashlib import blake2b

from common.messages.request import Generate, Picture

HASHED_TOKENS = 16
HASH_BYTES = 16
PIECE_BYTES = 4 * HASHED_TOKENS


def root_hash(salt: str, adapter: str = "") -> bytes:
    """Return the hash before the first token. No salt gives that of another adapter: adapters are keys of it.

    Args:
        adapter: its key, which changes with its files; empty for the model alone.
    """
    key = blake2b(adapter.encode(), digest_size=HASH_BYTES).digest() if adapter else b""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=HASH_BYTES, key=key).digest()


def extend_hashes(hashes: bytes, ids: bytes, pictures: Sequence[Picture] = ()) -> bytes:
    """Return the root and the hashes of all whole pieces of packed `ids`, of which `hashes` has the first.
    `pictures`: all those that have placeholders among the ids.
    """
    num_hashed = len(hashes) // HASH_BYTES - 1  # the root is of no piece
    last, parts = hashes[-HASH_BYTES:], [hashes]
    for begin in range(num_hashed * PIECE_BYTES, len(ids) - PIECE_BYTES + 1, PIECE_BYTES):
        seen = pictures_at(begin // 4, pictures) if pictures else b""
        last = blake2b(last + ids[begin : begin + PIECE_BYTES] + seen, digest_size=HASH_BYTES).digest()
        parts.append(last)
    return b"".join(parts)


def pictures_at(start: int, pictures: Sequence[Picture]) -> bytes:
    """Return the digests of the pictures that have a placeholder in the piece that begins at `start`, with
    where they begin.
    """
    end = start + HASHED_TOKENS
    seen = [one for one in pictures if one.start < end and one.start + one.num_tokens > start]
    return "".join(f" {one.digest} {one.start}" for one in seen).encode()


def prompt_hashes(request: Generate) -> bytes:
    """Return the root and the hashes of a request's prompt."""
    root = root_hash(request.cache_salt, request.adapter)
    return extend_hashes(root, request.prompt_ids, request.pictures)


def block_names(hashes: bytes, block_size: int) -> list[bytes]:
    """Return the names of the blocks that the hashed pieces fill; HASHED_TOKENS divides `block_size`.

    Without hashes, not even a root, there are none.
    """
    step = block_size // HASHED_TOKENS * HASH_BYTES
    return [hashes[end - HASH_BYTES : end] for end in range(HASH_BYTES + step, len(hashes) + 1, step)]
