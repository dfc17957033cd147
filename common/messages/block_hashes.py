"""Block hashes: names of KV blocks by what they hold, so that rows that begin alike can share blocks.

A hash names HASHED_TOKENS tokens and all tokens before them: it is the digest of the hash before it and of
their ids. The first of all, the root, is the digest of a salt: requests with different salts share nothing.
Gateways hash prompts, agents what is generated, the batcher what a request resumes with. A block of several
times HASHED_TOKENS has the name of the last hash within it, so workers of different block sizes can use the
same hashes.
"""

from hashlib import blake2b

HASHED_TOKENS = 16
HASH_BYTES = 16
PIECE_BYTES = 4 * HASHED_TOKENS


def root_hash(salt: str) -> bytes:
    """Return the hash before the first token."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=HASH_BYTES).digest()


def extend_hashes(hashes: bytes, ids: bytes) -> bytes:
    """Return the root and the hashes of all whole pieces of packed `ids`, of which `hashes` has the first."""
    num_hashed = len(hashes) // HASH_BYTES - 1  # the root is of no piece
    last, parts = hashes[-HASH_BYTES:], [hashes]
    for begin in range(num_hashed * PIECE_BYTES, len(ids) - PIECE_BYTES + 1, PIECE_BYTES):
        last = blake2b(last + ids[begin : begin + PIECE_BYTES], digest_size=HASH_BYTES).digest()
        parts.append(last)
    return b"".join(parts)


def prompt_hashes(salt: str, ids: bytes) -> bytes:
    """Return the root and the hashes of a prompt of packed ids."""
    return extend_hashes(root_hash(salt), ids)


def block_names(hashes: bytes, block_size: int) -> list[bytes]:
    """Return the names of the blocks that the hashed pieces fill; HASHED_TOKENS divides `block_size`.

    Without hashes, not even a root, there are none.
    """
    step = block_size // HASHED_TOKENS * HASH_BYTES
    return [hashes[end - HASH_BYTES : end] for end in range(HASH_BYTES + step, len(hashes) + 1, step)]
