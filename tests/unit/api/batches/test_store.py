"""Stored files, and their lines."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from api.errors import ApiError
from api.jobs.files import BATCH_TTL_S, FileStore, StoredFile, lines_of
from common.broker.pool_client import BrokerClock

PART = f"{0:09d}"
FILE = StoredFile(f"file-{1:032x}", "acme", "a.jsonl", "batch", 1, 0, None, [(PART, 1)])


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


async def test_parts_without_a_record_do_not_stay_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be those of an upload, or of a batch that has not ended. A delete that fails can be tried
    again.
    """
    store = FileStore(str(tmp_path), BrokerClock())
    kept, needed, _ = names = [f"file-{number:032x}" for number in (1, 2, 3)]
    for name in names:
        await store.put_part("acme", name, PART, b"x")
    await store.put_record(FILE)
    for later_s, left in ((0, {*names}), (BATCH_TTL_S + 60, {kept, needed})):
        assert await store.delete_expired(time.time() + later_s, [needed]) == 0
        assert {path.parent.name for path in tmp_path.rglob(PART)} == left
    with monkeypatch.context() as patch, pytest.raises(ApiError):
        patch.setattr(store.fs, "rm", lambda *_, **__: 1 / 0)
        await store.delete(FILE)
    await store.delete(await store.find("acme", kept))
    assert {path.name for path in (tmp_path / "of-acme").iterdir()} == {needed}


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
