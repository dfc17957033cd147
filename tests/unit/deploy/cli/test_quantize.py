"""`tokenfleet quantize`: wrong arguments are refused before it starts, and a cut run leaves nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.settings.settings import SettingError
from deploy.cli import admin
from tests.support.engine import tiny_models
from tests.support.source_tree import ROOT

INTERRUPTED = 130
WRONG = {
    "--method awq": "--method: 'awq' is not gptq; checkpoints of other methods that llm-compressor",
    "--bits 3": "--bits: 3 is neither 4 nor 8",
    "--method fp8": "--method: fp8 is not written: `tokenfleet serve MODEL --quantize fp8` rounds at load",
    "--scales tensor": "--scales: unknown flag",
    "--groupsize 100": "--group-size: 100 is neither -1 nor a power of two from 16 to 1024",
    "--percdamp 0": "--percdamp: 0.0 is not above 0 and at most 1",
    "--calibration-tokens 5": "--calibration-tokens: 5 is less than 128",
    "--calibration /nowhere": "--calibration: /nowhere is no file",
    "--act-order perhaps": "--act-order: 'perhaps' is not true or false",
    "--upload-to-model-id a/b": "--upload-to-model-id: is not served: `hf upload ID OUT` does it afterwards",
    "--bit 4": "--bit: unknown flag",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_argument_is_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as refusal:
        admin.main(["quantize", "smollm2", str(tmp_path / "out"), *words.split()])
    assert str(refusal.value).startswith(WRONG[words])


def test_what_is_there_already_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"^OUTPUT: .* exists already$"):
        admin.main(["quantize", "smollm2", str(tmp_path)])
    with pytest.raises(SettingError, match=r"^OUT: is missing"):
        admin.main(["quantize", "smollm2"])
    with pytest.raises(SettingError, match=r"^MODEL_ID: /nowhere does not exist$"):
        admin.main(["quantize", "/nowhere", str(tmp_path / "out")])


def start(*argv: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "deploy.cli", "quantize", *argv, "--threads", "1", "--device", "cpu"]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=dict(os.environ))


@pytest.mark.slow
def test_a_run_prints_its_directory_and_an_interrupted_one_leaves_nothing(tmp_path: Path) -> None:
    source = tiny_models.save_with_bytes(tmp_path / "plain", *tiny_models.FAMILIES["Llama"])
    whole, text = start(str(source), str(tmp_path / "deep" / "made")), tmp_path / "text"
    text.write_text("All work and no play makes Jack a dull boy. " * 5000)
    cut = start(str(source), str(tmp_path / "cut"), "--calibration", str(text))
    assert cut.stderr
    for line in cut.stderr:
        if line.startswith("quantising"):
            cut.send_signal(signal.SIGTERM)
            break
    assert cut.wait(120) == INTERRUPTED
    printed, said = whole.communicate(timeout=120)
    assert whole.returncode == 0 and printed == f"{tmp_path / 'deep' / 'made'}\n"
    assert said.splitlines()[-1].endswith(" MiB after")
    config = json.loads((tmp_path / "deep" / "made" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "plain", "text"]
