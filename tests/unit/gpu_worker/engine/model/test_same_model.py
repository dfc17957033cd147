"""Ranks of several machines must have the same model."""

from pathlib import Path
from typing import Any

import pytest

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.model.same_model import check_same, describe_model
from gpu_worker.engine.parallel.rank_links import Member

MEMBERS = [Member(0, "node0", "10.0.0.1"), Member(1, "node1", "10.0.0.2")]


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    texts = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"} | {
        name.replace("_", "."): text for name, text in files.items()
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "settings", "line"),
    [
        (
            {"config_json": "[]"},
            {},
            "MODEL_ID: config.json of tiny at rank 1 on node1 .10.0.0.2. is not that of",
        ),
        ({"model_safetensors": "weighty"}, {}, "MODEL_ID: model.safetensors of tiny at rank 1 on node1"),
        ({"more_safetensors": ""}, {}, "MODEL_ID: more.safetensors of tiny at rank 1 on node1"),
        ({}, {"block_size": 32}, "BLOCK_SIZE: 32 at rank 1 on node1 .10.0.0.2., but None at rank 0 on node0"),
    ],
)
def test_what_differs_is_named_with_its_machine(
    tmp_path: Path, files: dict[str, str], settings: dict[str, Any], line: str
) -> None:
    first = describe_model(write(tmp_path / "0"), Settings(), "float32", "cpu")
    second = describe_model(write(tmp_path / "1", **files), Settings(**settings), "float32", "cpu")
    check_same("tiny", [first, first], MEMBERS)
    with pytest.raises(SettingError, match=line):
        check_same("tiny", [first, second], MEMBERS)
