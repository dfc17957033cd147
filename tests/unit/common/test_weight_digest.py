"""The digest of weights is that of the files as they are, and is computed once a file."""

import hashlib
import os
from pathlib import Path

import pytest

from common.weight_digest import digest_weights


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_one_file_has_its_own_sha256_and_several_that_of_their_list(tmp_path: Path) -> None:
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    one.write_bytes(b"one")
    two.write_bytes(b"two")
    assert digest_weights([]) == ""
    assert digest_weights([one]) == sha256(b"one")
    listed = f"{sha256(b'one')}  1.safetensors\n{sha256(b'two')}  2.safetensors\n"
    assert digest_weights([one, two]) == sha256(listed.encode())


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, num_reads = tmp_path / "1.safetensors", 0

    def count_read(*arguments: object) -> object:
        nonlocal num_reads
        num_reads += 1
        return file_digest(*arguments)  # type: ignore[arg-type]

    file_digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", count_read)
    file.write_bytes(b"one")
    assert [digest_weights([file]) for _ in range(2)] == [sha256(b"one")] * 2 and num_reads == 1
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))
    assert digest_weights([file]) == sha256(b"two") and num_reads == 2
