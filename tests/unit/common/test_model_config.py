"""Model config: context length, end-of-sequence ids and special ids, from whichever file has them."""

import json
from pathlib import Path

import pytest

from common import model_files
from common.settings.settings import SettingError


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_eos_ids_come_from_the_first_file_that_knows(tmp_path: Path) -> None:
    added = [{"id": 5, "content": "</s>", "special": True}, {"id": 6, "content": "<tool>", "special": False}]
    path = write(
        tmp_path,
        config={"max_position_embeddings": 99},
        tokenizer={"added_tokens": added},
        tokenizer_config={"eos_token": "</s>"},
    )
    assert model_files.eos_ids(path) == [5]
    write(path, config={"max_position_embeddings": 99, "eos_token_id": 7})
    assert model_files.eos_ids(path) == [7]
    write(path, generation_config={"eos_token_id": [8, 9]})
    assert model_files.eos_ids(path) == [8, 9]
    other = write(
        tmp_path / "other", tokenizer={"added_tokens": added}, tokenizer_config={"eos_token": "</s>"}
    )
    assert model_files.eos_ids(path, other) == [8, 9, 5]
    write(path, generation_config={"eos_token_id": 5})
    assert model_files.eos_ids(path, other) == [5]
    assert model_files.special_ids(path) == {5}
    assert model_files.context_length(path) == 99


def test_a_config_without_a_context(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="has no max_position_embeddings"):
        model_files.context_length(write(tmp_path, config={}))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"model": {"vocab": ', b"\xff\xfe", b"\0" * 9])
def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(SettingError, match=r"^MODEL_ID: .*tokenizer\.json is no tokenizer, or damaged: "):
        model_files.read_tokenizer(tmp_path)
    if content != b"{}":
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(SettingError, match=r"^MODEL_ID: .*config\.json is (not JSON|no JSON object)"):
            model_files.eos_ids(tmp_path)
