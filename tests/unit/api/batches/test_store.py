"""Stored files, and their lines."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from api.errors import ApiError
from api.jobs.files import FileStore, StoredFile, lines_of
from common.broker.pool_client import BrokerClock

FILE = StoredFile(f"file-{1:032x}", "acme", "a.jsonl", "batch", 1, 0, None, [(f"{0:09d}", 1)])


async def parts(*texts: bytes) -> AsyncIterator[bytes]:
    for text in texts:
        yield text


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ((b"a\nb", b"c\n", b"d"), [(b"a", 1), (b"bc", 2), (b"d", 1)]),
        ((b"1234", b"5678", b"9\nb\n"), [(b"12345", 9), (b"b", 1)]),
        ((b"123456789",), [(b"12345", 9)]),
        ((b"\n\n",), [(b"", 0), (b"", 0)]),
    ],
)
async def test_a_line_beyond_the_limit_is_cut_and_never_held_whole(
    given: tuple[bytes, ...], lines: list[tuple[bytes, int]]
) -> None:
    assert [line async for line in lines_of(parts(*given), 4)] == lines


@pytest.mark.parametrize(
    "record",
    [
        replace(FILE, owner="other"),
        replace(FILE, id=f"file-{2:032x}"),
        replace(FILE, id="../of-other/file"),
        {"id": FILE.id},
        [1],
    ],
    ids=str,
)
async def test_a_record_that_is_not_its_files_own_is_not_believed(tmp_path: Path, record: object) -> None:
    """It stands in the folder of one tenant and names another: nothing of either is read or deleted."""
    store = FileStore(str(tmp_path), BrokerClock())
    await store.put_record(FILE)
    Path(store.path(FILE.owner, FILE.id)).write_bytes(orjson.dumps(record))
    with pytest.raises(ApiError) as refused:
        await store.find(FILE.owner, FILE.id)
    assert refused.value.status == 503 and "broker" not in refused.value.text
    await store.put_record(replace(FILE, id=f"file-{3:032x}", expires_at=1))
    assert await store.delete_expired(now_s=2) == 1, "the faulty one does not stop it"
