"""Block hashes: a hash depends on all tokens up to it and on the salt, and on nothing else."""

from common.messages.records import pack_ids
from common.messages.request import HASH_BYTES, block_names, extend_hashes, root_hash

IDS = list(range(70))


def hashes_of(ids: list[int], salt: str = "") -> bytes:
    return extend_hashes(root_hash(salt), pack_ids(ids))


def test_only_whole_pieces_have_hashes() -> None:
    assert [len(hashes_of(IDS[:n])) // HASH_BYTES for n in (0, 15, 16, 31, 32, 70)] == [1, 1, 2, 2, 3, 5]


def test_hashes_go_on_where_they_ended() -> None:
    assert extend_hashes(hashes_of(IDS[:40]), pack_ids(IDS)) == hashes_of(IDS)


def test_a_hash_depends_on_all_tokens_before_it() -> None:
    names, others = block_names(hashes_of(IDS), 16), block_names(hashes_of([*IDS[:20], 0, *IDS[21:]]), 16)
    assert [one == other for one, other in zip(names, others, strict=True)] == [True, False, False, False]
    assert not set(names) & set(block_names(hashes_of(IDS, "salt"), 16))


def test_a_larger_block_has_the_name_of_its_last_hash() -> None:
    assert block_names(hashes_of(IDS), 32) == block_names(hashes_of(IDS), 16)[1::2]
    assert block_names(hashes_of(IDS), 64) == block_names(hashes_of(IDS), 16)[3:]


def test_without_a_root_there_are_no_names() -> None:
    assert block_names(b"", 16) == []


def test_hashes_are_the_same_in_every_version() -> None:
    """Workers and gateways of two versions may run at once."""
    assert hashes_of(IDS[:16]).hex() == "cae66941d9efbd404e4d88758ea67670724f387046a7ef1970878eae3ed5c2d2"
