"""`tokenfleet download-weights` fetches or converts a model, `tokenfleet quantize` makes a quantised one of a
plain one; both print where it is. Their flags are TGI's, with some of our own.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from common import model_files
from common.quantize_job import WHOLE_ROW, QuantizeJob
from common.settings.fields import convert
from common.settings.flags import flag_of
from common.settings.settings import SettingError, Settings
from deploy.launcher import prepare
from deploy.launcher.launcher import command

BITS = (4, 8)
MAX_GROUP = 1024
LEAST_TOKENS = 128
SWITCHES = ("auto_convert", "trust_remote_code", "json_output", "merge_lora")


def settings_of(flags: argparse.Namespace) -> Settings:
    """The settings among the flags of a command. Raises SettingError."""
    given = {name: value for name, value in vars(flags).items() if value is not None}
    words = [
        f"{flag_of(name)}={value}"
        for name, value in given.items()
        if name in Settings.model_fields or name == "logger_level"
    ]
    settings = Settings.read(words, prog="tokenfleet")
    prepare.set_hub_variables(settings)
    return settings


def download(flags: argparse.Namespace) -> int:
    """Print the model's directory. Raises SettingError."""
    switches = {name: convert(bool, getattr(flags, name), flag_of(name)) for name in SWITCHES}
    if flags.extension != ".safetensors":
        cause = "is not served: only .safetensors, and GGUF files, which are converted"
        raise SettingError("--extension", f"{flags.extension} {cause}")
    if switches["merge_lora"]:
        raise SettingError("--merge-lora", "an adapter is not merged: it is served as it is (LORA_ADAPTERS)")
    settings = settings_of(flags)
    name, dtype = settings.model_id, prepare.weights_dtype(settings)
    path = model_files.find_local(name, settings.revision, dtype)
    if path is not None:
        print(f"{name} is here already", file=sys.stderr)
    else:
        path = model_files.resolve(name, settings.revision, prepare.progress, dtype=dtype)
    if not model_files.weight_files(path):
        cause = f"has no whole set of .safetensors files in {path}; nothing else is served"
        raise SettingError("model_id", f"{name} {cause}")
    print(os.fspath(path))
    return 0


def quantize(flags: argparse.Namespace) -> int:
    """Become the process that quantises. Raises SettingError for what is wrong before it starts."""
    read_job(flags, "")  # refuses what is wrong before anything is fetched
    settings = settings_of(flags)
    dtype = prepare.weights_dtype(settings)
    path = model_files.resolve(settings.model_id, settings.revision, prepare.progress, dtype=dtype)
    words = [*command("gpu_worker.engine.quantizing"), read_job(flags, str(path)).to_json()]
    os.execve(words[0], words, os.environ | settings.environ())


def read_job(flags: argparse.Namespace, source: str) -> QuantizeJob:
    """What is asked for, with the directory of the model. Raises SettingError."""
    for name, cause in faults(flags):
        raise SettingError(name, cause)
    return QuantizeJob(
        source=source,
        output=str(Path(flags.output).expanduser().absolute()),
        bits=flags.bits,
        group_size=flags.group_size,
        damping=flags.percdamp,
        act_order=convert(bool, flags.act_order, "--act-order"),
        calibration=flags.calibration and str(Path(flags.calibration).absolute()),
        max_tokens=flags.calibration_tokens,
    )


def faults(flags: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield flags that are not served, and why."""
    if flags.upload_to_model_id is not None:
        yield "--upload-to-model-id", "is not served: `hf upload ID OUT` does it afterwards"
    if flags.method == "fp8":
        yield "--method", "fp8 is not written: `tokenfleet serve MODEL --quantize fp8` rounds at load"
    if flags.method != "gptq":
        others = "checkpoints of other methods that llm-compressor and AutoAWQ write are read"
        yield "--method", f"{flags.method!r} is not gptq; {others}"
    if flags.bits not in BITS:
        yield "--bits", f"{flags.bits} is neither 4 nor 8"
    size = flags.group_size
    if size not in (None, WHOLE_ROW) and (size not in range(16, MAX_GROUP + 1) or size & (size - 1)):
        yield "--group-size", f"{size} is neither {WHOLE_ROW} nor a power of two from 16 to {MAX_GROUP}"
    if not 0 < flags.percdamp <= 1:
        yield "--percdamp", f"{flags.percdamp} is not above 0 and at most 1"
    if flags.calibration_tokens < LEAST_TOKENS:
        yield "--calibration-tokens", f"{flags.calibration_tokens} is less than {LEAST_TOKENS}"
    if flags.calibration is not None and not Path(flags.calibration).is_file():
        yield "--calibration", f"{flags.calibration} is no file"
    output = Path(flags.output).expanduser().absolute()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        yield "output", f"{output} exists already"
